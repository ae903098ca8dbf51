"""DiffusionNFT (arXiv 2509.16117): reward on the forward process, without log-probs.

A finished sample ``x0`` is noised to ``x_t = (1 - t) x0 + t noise``. Two mixtures of the velocity of
now and that of the policy that sampled are asked to bring it back:

    v+ = beta v + (1 - beta) v_old          v- = (1 + beta) v_old - beta v
    L+- = mean((x_t - t v+- - x0)^2) / w+-  with w+- = mean|x_t - t v+- - x0|, a constant

and the loss is ``r L+ / beta + (1 - r) L- / beta``: a good sample (r near 1) pulls the velocity of
now to itself, a bad one pushes it the other way, as far as it left the old one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_rollout.shapes import Bool, Float
from trainers.losses.distances import LossError, element_mean, per_sample_scale, velocity_mse

NFT_METRIC_REDUCTIONS = {
    "nft_loss": "mean",
    "nft_positive_loss": "mean",
    "nft_negative_loss": "mean",
    "old_deviation": "mean",
    "velocity_kl": "mean",
}
"""How the terms of each metric become one number."""


def reward_probability(
    advantages: Float[Tensor, " batch"], *, adv_clip_max: float | int
) -> Float[Tensor, " batch"]:
    """``r = clip(A / adv_clip_max, -1, 1) / 2 + 1/2``, within 0..1: how optimal a sample counts."""
    if not adv_clip_max > 0:
        raise LossError(
            f"reward_probability: adv_clip_max must be positive; got {adv_clip_max}; set it near 5"
        )
    return (advantages / adv_clip_max).clamp(-1, 1) / 2 + 0.5


def diffusion_nft_loss(
    velocity: Float[Tensor, "batch ..."],
    old_velocity: Float[Tensor, "batch ..."],
    ref_velocity: Float[Tensor, "batch ..."] | None,
    *,
    x0: Float[Tensor, "batch ..."],
    xt: Float[Tensor, "batch ..."],
    t: Float[Tensor, "..."] | float | int,
    reward_prob: Float[Tensor, " batch"],
    beta: float | int = 1.0,
    adv_clip_max: float | int = 5.0,
    adaptive_weight_min: float | int = 1e-5,
    ref_kl_coef: float | int = 1e-4,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """The mean loss and its metrics; arguments as in ``diffusion_nft_loss_terms``."""
    loss, terms = diffusion_nft_loss_terms(
        velocity,
        old_velocity,
        ref_velocity,
        x0=x0,
        xt=xt,
        t=t,
        reward_prob=reward_prob,
        beta=beta,
        adv_clip_max=adv_clip_max,
        adaptive_weight_min=adaptive_weight_min,
        ref_kl_coef=ref_kl_coef,
    )
    return loss.mean(), {name: float(values.mean()) for name, values in terms.items()}


def diffusion_nft_loss_terms(
    velocity: Float[Tensor, "batch ..."],
    old_velocity: Float[Tensor, "batch ..."],
    ref_velocity: Float[Tensor, "batch ..."] | None,
    *,
    x0: Float[Tensor, "batch ..."],
    xt: Float[Tensor, "batch ..."],
    t: Float[Tensor, "..."] | float | int,
    reward_prob: Float[Tensor, " batch"],
    beta: float | int,
    adv_clip_max: float | int,
    adaptive_weight_min: float | int,
    ref_kl_coef: float | int,
    mask: Bool[Tensor, "batch ..."] | None = None,
) -> tuple[Float[Tensor, " batch"], dict[str, Tensor]]:
    """The loss of every sample, with graph, and the terms of every metric, without.

    Velocities are noise - x0; ``t`` is the noise level 0..1, one number or one a sample;
    ``reward_prob`` is `reward_probability`. The policy loss is multiplied by ``adv_clip_max``, as
    published, and ``ref_kl_coef`` times the squared distance to ``ref_velocity`` is added (None: not).
    At least float32; only ``velocity`` gets a gradient. With ``mask``, over what is live (True).
    """
    if not beta > 0:
        raise LossError(f"diffusion_nft_loss: beta must be positive; got {beta}; set 1 or 0.1")
    tensors = {"old_velocity": old_velocity, "x0": x0, "xt": xt}
    unfit = [name for name, tensor in tensors.items() if tensor.shape != velocity.shape]
    if unfit or len(reward_prob) != len(velocity):
        raise LossError(
            f"diffusion_nft_loss: shapes differ; got {tuple(velocity.shape)} for velocity, others "
            f"for {unfit or 'reward_prob'}; pass [B, ...] and reward_prob [B]"
        )
    dtype = torch.promote_types(velocity.dtype, torch.float32)
    v, old = velocity.to(dtype), old_velocity.detach().to(dtype)
    x0, xt = x0.detach().to(dtype), xt.detach().to(dtype)
    level = per_sample_scale("diffusion_nft_loss: t", t, velocity)

    def distance(mixed: Tensor) -> Tensor:
        gap = xt - level * mixed - x0
        weight = element_mean(gap.detach().abs(), mask).clamp(min=adaptive_weight_min)
        return element_mean(gap**2, mask) / weight

    positive = distance(beta * v + (1 - beta) * old)
    negative = distance((1 + beta) * old - beta * v)
    prob = reward_prob.detach().to(positive)
    nft = (prob * positive + (1 - prob) * negative) / beta
    loss = adv_clip_max * nft
    metrics = {
        "nft_loss": nft,
        "nft_positive_loss": positive,
        "nft_negative_loss": negative,
        "old_deviation": velocity_mse(v, old, mask=mask),
    }
    if ref_velocity is not None:
        metrics["velocity_kl"] = velocity_mse(v, ref_velocity, mask=mask)
        loss = loss + ref_kl_coef * metrics["velocity_kl"]
    return loss, {name: values.detach() for name, values in metrics.items()}
