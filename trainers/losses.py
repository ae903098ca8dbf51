"""Losses on one denoising step: the clipped policy loss and two distances to a reference.

A log-prob is the **mean** over the elements of a sample, so the ratio does not depend on the
resolution, and clip ranges are near 1e-4. Of GRPO (arXiv 2402.03300; for flows 2505.05470, eq. 4):

1. ``A`` is clamped to +-``adv_clip_max``.
2. ``r = exp(new - old)``, with the log-ratio held within +-``MAX_LOG_RATIO``.
3. The loss is ``max(-A r, -A clip(r, 1 - low, 1 + high))``, the mean over (sample, step).

Rule for a broken log-ratio: beyond +-20 it counts as +-20 and sends no gradient, so that neither
loss nor gradient overflows. ``log_prob_max_abs_diff`` and ``approx_kl`` are of the raw log-ratio and
show it. A log-prob that is not finite gives a loss that is not finite: the trainer stops there.

Every loss has a form per element: a trainer divides its sum by the count over all micro-batches
and ranks, so that ragged ones weigh right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from miles_rollout.errors import MilesRolloutError
from miles_rollout.shapes import Bool, Float

MAX_LOG_RATIO = 20.0

METRIC_REDUCTIONS: Mapping[str, Literal["mean", "max"]] = {
    "ratio_mean": "mean",
    "ratio_abs_minus_1": "max",
    "clipfrac": "mean",
    "clipfrac_high": "mean",
    "clipfrac_low": "mean",
    "approx_kl": "mean",
    "log_prob_mean_abs_diff": "mean",
    "log_prob_max_abs_diff": "max",
}
"""How the terms of each metric become one number. All of them are finite for one element too."""

STREAM_REDUCTIONS: Mapping[str, Literal["mean", "max"]] = {
    name: METRIC_REDUCTIONS[name]
    for name in (
        "ratio_mean",
        "ratio_abs_minus_1",
        "log_prob_mean_abs_diff",
        "log_prob_max_abs_diff",
    )
}
"""Those that are told of each stream as well, where there are several."""

ClipRange = float | int | tuple[float | int, float | int]
"""A ratio is clipped to 1 - low .. 1 + high; one number is both."""


class LossError(MilesRolloutError, ValueError):
    """Inputs from which no loss can be computed."""


def grpo_loss(
    log_probs: Float[Tensor, "..."],
    old_log_probs: Float[Tensor, "..."],
    advantages: Float[Tensor, "..."],
    *,
    clip_range: ClipRange,
    adv_clip_max: float | int,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """The mean loss and its metrics; arguments as in ``grpo_loss_terms``."""
    loss, metric_terms = grpo_loss_terms(
        log_probs,
        old_log_probs,
        advantages,
        clip_range=clip_range,
        adv_clip_max=adv_clip_max,
    )
    return loss.mean(), reduce_metrics(metric_terms)


def grpo_loss_terms(
    log_probs: Float[Tensor, "..."],
    old_log_probs: Float[Tensor, "..."],
    advantages: Float[Tensor, "..."],
    *,
    clip_range: ClipRange,
    adv_clip_max: float | int,
) -> tuple[Float[Tensor, "..."], dict[str, Tensor]]:
    """The loss of every element, with graph, and the terms of every metric, without.

    ``log_probs`` [N] or [N, S]; ``old_log_probs`` alike; ``advantages`` alike or [N]. Only
    ``log_probs`` gets a gradient. At least float32, whatever the inputs are.
    """
    low, high = _clip_bounds(clip_range)
    if not adv_clip_max > 0:
        raise LossError(
            f"grpo_loss: adv_clip_max must be positive; got {adv_clip_max}; set it near 5"
        )
    advantages = _per_element(log_probs, old_log_probs, advantages)
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    raw = log_probs.to(dtype) - old_log_probs.detach().to(dtype)
    ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantage = advantages.detach().to(dtype).clamp(-adv_clip_max, adv_clip_max)
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    return loss, _metric_terms(raw.detach(), ratio.detach(), low, high)


def reduce_metrics(metric_terms: Mapping[str, Tensor]) -> dict[str, float]:
    """One number a metric, from the terms of one or (concatenated) of many micro-batches."""
    return {
        name: float(terms.max() if METRIC_REDUCTIONS[name] == "max" else terms.mean())
        for name, terms in metric_terms.items()
    }


def ratio_metrics(log_ratio: Float[Tensor, "..."]) -> dict[str, Tensor]:
    """The terms of `STREAM_REDUCTIONS` from a raw log-ratio without graph: no loss is in them."""
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "ratio_mean": ratio,
        "ratio_abs_minus_1": (ratio - 1).abs(),
        "log_prob_mean_abs_diff": log_ratio.abs(),
        "log_prob_max_abs_diff": log_ratio.abs(),
    }


def mean_kl(
    mean: Float[Tensor, "batch ..."],
    ref_mean: Float[Tensor, "batch ..."],
    std: Float[Tensor, "..."] | float | int,
    *,
    mask: Bool[Tensor, "batch ..."] | None = None,
) -> Float[Tensor, " batch"]:
    """KL between two Gaussian steps of one std: ``(mean - ref_mean)^2 / (2 std^2)``.

    The mean over the elements of each sample, any rank, at least float32; over the live ones
    (True) where ``mask`` is given, as a log-prob is. Only ``mean`` gets a
    gradient. ``std`` is a number, one a sample [B], or of the rank of ``mean``; **which** std is the
    caller's choice: that of the step, ``std_t sqrt(-dt)``, gives the KL of the paper, and
    ``std_t`` alone the weighting without dt of the published code.
    """
    if mean.shape != ref_mean.shape or mean.ndim < 2:
        raise LossError(
            f"mean_kl: needs two means of one shape; got {tuple(mean.shape)} and "
            f"{tuple(ref_mean.shape)}; pass two of shape [B, ...]"
        )
    dtype = torch.promote_types(mean.dtype, torch.float32)
    scale = torch.as_tensor(std, device=mean.device).detach().to(dtype)
    if scale.ndim == 1 and len(scale) == len(mean):
        scale = scale.reshape(-1, *[1] * (mean.ndim - 1))
    fits = scale.ndim in (0, mean.ndim) and all(
        size in (1, wanted) for size, wanted in zip(scale.shape, mean.shape, strict=False)
    )
    if not fits:
        raise LossError(
            f"mean_kl: std does not fit; got {tuple(scale.shape)} for means "
            f"{tuple(mean.shape)}; pass a number, [B], or one of the means' rank"
        )
    if not bool((scale > 0).all()):
        raise LossError(
            f"mean_kl: std must be positive; got {float(scale.min())}; leave out the steps "
            "without noise, they have no density"
        )
    square = (mean.to(dtype) - ref_mean.detach().to(dtype)) ** 2
    return _element_mean(square / (2 * scale**2), mask)


def velocity_mse(
    velocity: Float[Tensor, "batch ..."],
    ref_velocity: Float[Tensor, "batch ..."],
    *,
    mask: Bool[Tensor, "batch ..."] | None = None,
) -> Float[Tensor, " batch"]:
    """Mean square distance of two velocities, a sample; only ``velocity`` gets a gradient.

    With ``mask``, over what is live (True).
    """
    if velocity.shape != ref_velocity.shape or velocity.ndim < 2:
        raise LossError(
            f"velocity_mse: needs two velocities of one shape; got {tuple(velocity.shape)} and "
            f"{tuple(ref_velocity.shape)}; pass two of shape [B, ...]"
        )
    dtype = torch.promote_types(velocity.dtype, torch.float32)
    square = (velocity.to(dtype) - ref_velocity.detach().to(dtype)) ** 2
    return _element_mean(square, mask)


def _element_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """[B]: over all elements of each sample, or over the live ones."""
    if mask is None:
        return values.flatten(1).mean(1)
    live = mask.to(values.device)
    return values.where(live, 0).flatten(1).sum(1) / live.flatten(1).sum(1)


def _clip_bounds(clip_range: ClipRange) -> tuple[float, float]:
    low, high = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    if not all(0 < bound < math.inf for bound in (low, high)):
        raise LossError(
            f"grpo_loss: clip_range must be positive and finite; got {clip_range}; set a number "
            "such as 1e-4 or (low, high)"
        )
    return float(low), float(high)


def _per_element(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """``advantages`` of the rank of ``log_probs``: broadcasting by itself aligns the last axis."""
    shape = log_probs.shape
    if old_log_probs.shape != shape or log_probs.ndim == 0 or log_probs.numel() == 0:
        raise LossError(
            f"grpo_loss: needs a new and an old log-prob an element; got {tuple(shape)} and "
            f"{tuple(old_log_probs.shape)}; pass two of shape [N] or [N, S]"
        )
    if advantages.shape == shape:
        return advantages
    if advantages.shape != shape[:1]:
        raise LossError(
            f"grpo_loss: advantages do not fit; got {tuple(advantages.shape)} for log-probs "
            f"{tuple(shape)}; pass one a sample, [N], or one an element"
        )
    return advantages.reshape(-1, *[1] * (log_probs.ndim - 1))


def _metric_terms(log_ratio: Tensor, ratio: Tensor, low: float, high: float) -> dict[str, Tensor]:
    above, below = ratio - 1 > high, 1 - ratio > low
    return {
        "ratio_mean": ratio,
        "ratio_abs_minus_1": (ratio - 1).abs(),
        "clipfrac": (above | below).to(ratio.dtype),
        "clipfrac_high": above.to(ratio.dtype),
        "clipfrac_low": below.to(ratio.dtype),
        "approx_kl": 0.5 * log_ratio**2,
        "log_prob_mean_abs_diff": log_ratio.abs(),
        "log_prob_max_abs_diff": log_ratio.abs(),
    }
