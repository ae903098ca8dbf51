"""DiffusionNFT (arXiv 2509.16117): online RL on the forward process.

1. An old policy, a second set of weights that follows the trained one, samples by any sampler:
   nothing is stochastic, no trajectory is kept, there are no log-probs.
2. A finished sample is noised again to the levels of the trained steps (``rollout.window``).
3. There the velocity of now is pulled towards good samples and away from bad ones
   (``trainers.losses.forward_process``), relative to the old policy's.
4. After each iteration the old policy moves a little towards the trained one.

The sampler's guidance has to be off: the loss is on the velocity that the denoiser predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from trainers.advantages import Advantages
from trainers.algorithms.base import Algorithm, LossTerms, Needs, Reference
from trainers.algorithms.group_relative import GroupRelativeConfig, group_relative
from trainers.config_loader import STRICT
from trainers.losses import NFT_METRIC_REDUCTIONS, diffusion_nft_loss_terms, reward_probability
from trainers.old_policy import OldPolicyDecay
from trainers.rewards.scoring import Scores
from trainers.trained_step import TrainedStep


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionNFTConfig(GroupRelativeConfig):
    """The published setting."""

    __pydantic_config__ = STRICT

    type: Literal["diffusion_nft"] = "diffusion_nft"
    beta: float = 1.0
    """How far the mixtures go from the old velocity; 0.1 for several rewards."""
    adaptive_weight_min: float = 1e-5
    """Floor of the distance that a sample's loss is divided by."""
    kl_beta: float = 1e-4
    """Weight of the squared distance to the reference's velocity; 0: it is not computed."""
    reference: Reference = "base"
    """The model without its LoRA, or with the one that ``model.lora.start`` names."""
    old_policy: OldPolicyDecay = field(default_factory=OldPolicyDecay)
    """How fast the policy that samples follows."""

    def __post_init__(self) -> None:
        GroupRelativeConfig.__post_init__(self)
        if not self.beta > 0 or not self.adaptive_weight_min > 0 or not self.kl_beta >= 0:
            raise ValueError(
                "beta and adaptive_weight_min must be positive and kl_beta >= 0; got "
                f"{self.beta}, {self.adaptive_weight_min}, {self.kl_beta}"
            )
        if self.reference != "base" and not self.kl_beta:
            raise ValueError(
                f"reference has no effect at kl_beta 0; got {self.reference!r}; set kl_beta above 0"
            )


@final
class DiffusionNFT(Algorithm):
    """`DiffusionNFTConfig`, at work."""

    reductions: ClassVar[Mapping[str, str]] = NFT_METRIC_REDUCTIONS

    def __init__(self, config: DiffusionNFTConfig) -> None:
        self.config = config

    @property
    def needs(self) -> Needs:
        """An old policy, and a reference for the KL; no log-probs."""
        return replace(
            self.config.group_needs(),
            log_probs=False,
            old_policy=self.config.old_policy,
            reference=self.config.reference if self.config.kl_beta else None,
        )

    def advantages(self, scores: Scores, group_ids: Tensor) -> Advantages:
        """Reward minus the group's mean, over ``advantage_std``."""
        return group_relative(self.config, scores, group_ids)

    def terms(self, step: TrainedStep) -> LossTerms:
        """The loss at the step's noise level, joined over the streams as log-probs are."""
        config, held = self.config, step.trajectory.streams
        final = {name: stream.latent(stream.num_steps) for name, stream in held.items()}
        noised: dict[str, Tensor] = {}
        for name, x0 in final.items():
            sigma = held[name].sigmas[step.index].to(x0.device)
            x = (1 - sigma) * x0.float() + sigma * step.noise(name, x0)
            mask = held[name].mask
            noised[name] = (x if mask is None else x.where(mask, x0.float())).to(x0.dtype)
        now = step.velocities(noised)
        old = step.velocities(noised, "old")
        reference = step.velocities(noised, config.reference) if config.kl_beta else {}
        prob = reward_probability(step.advantages, adv_clip_max=config.adv_clip_max)
        parts = {
            name: diffusion_nft_loss_terms(
                now[name],
                old[name],
                reference.get(name),
                x0=x0,
                xt=noised[name],
                t=held[name].sigmas[step.index].item(),
                reward_prob=prob,
                beta=config.beta,
                adv_clip_max=config.adv_clip_max,
                adaptive_weight_min=config.adaptive_weight_min,
                ref_kl_coef=config.kl_beta,
                mask=held[name].mask,
            )
            for name, x0 in final.items()
        }
        shares = _shares(step)

        def joined(values: Mapping[str, Tensor]) -> Tensor:
            return torch.stack([shares[name] * value for name, value in values.items()]).sum(0)

        metrics = {
            metric: joined({name: terms[metric] for name, (_, terms) in parts.items()})
            for metric in next(iter(parts.values()))[1]
        }
        loss = joined({name: loss for name, (loss, _) in parts.items()})
        return LossTerms(loss=config.step_weight(step.index) * loss, metrics=metrics)


def _shares(step: TrainedStep) -> dict[str, Tensor]:
    """[R] a stream: its elements' share, or the weight that the rollout gives it."""
    streams, weights = step.trajectory.streams, step.trajectory.params.stream_weights
    counts = {name: stream.num_elements for name, stream in streams.items()}
    if not isinstance(weights, str):
        return {name: torch.ones_like(c) * weights.get(name, 0.0) for name, c in counts.items()}
    total = torch.stack(list(counts.values())).sum(0)
    return {name: count / total for name, count in counts.items()}
