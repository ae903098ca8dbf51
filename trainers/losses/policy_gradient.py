"""The clipped policy loss on one denoising step, plain and with a normalised ratio.

A log-prob is the **mean** over the elements of a sample, so the ratio does not depend on the
resolution, and clip ranges are near 1e-4. Of GRPO (arXiv 2402.03300; for flows 2505.05470, eq. 4):

1. ``A`` is clamped to +-``adv_clip_max``.
2. ``r = exp(new - old)``, with the log-ratio held within +-``MAX_LOG_RATIO``.
3. The loss is ``max(-A r, -A clip(r, 1 - low, 1 + high))``, the mean over (sample, step).

Rule for a broken log-ratio: beyond +-20 it counts as +-20 and sends no gradient, so that neither
loss nor gradient overflows. ``log_prob_max_abs_diff`` and ``approx_kl`` are of the raw log-ratio and
show it. A log-prob that is not finite gives a loss that is not finite: the trainer stops there.

`grpo_guard_loss` (arXiv 2510.22319) puts another ratio into 2: the mean of the log-ratio is taken
out and its scale no longer goes by the step's noise, so one clip range fits all steps; and the loss
is divided by ``-dt``, which a step's gradient is proportional to.

Every loss has a form per element: a trainer divides its sum by the count over all micro-batches
and ranks, so that ragged ones weigh right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from miles_rollout.shapes import Bool, Float
from trainers.losses.distances import LossError, element_mean, per_sample_scale

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
    advantages = _per_element(log_probs, old_log_probs, advantages)
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    raw = log_probs.to(dtype) - old_log_probs.detach().to(dtype)
    ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss = _clipped(ratio, advantages, low, high, adv_clip_max)
    return loss, _metric_terms(raw.detach(), ratio.detach(), low, high)


def grpo_guard_loss(
    log_probs: Float[Tensor, " batch"],
    old_log_probs: Float[Tensor, " batch"],
    advantages: Float[Tensor, " batch"],
    *,
    mean: Float[Tensor, "batch ..."],
    old_mean: Float[Tensor, "batch ..."],
    std_dev_t: Float[Tensor, "..."] | float | int,
    sqrt_dt: Float[Tensor, "..."] | float | int,
    clip_range: ClipRange,
    adv_clip_max: float | int,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """The mean loss and its metrics; arguments as in ``grpo_guard_loss_terms``."""
    loss, metric_terms = grpo_guard_loss_terms(
        log_probs,
        old_log_probs,
        advantages,
        mean=mean,
        old_mean=old_mean,
        std_dev_t=std_dev_t,
        sqrt_dt=sqrt_dt,
        clip_range=clip_range,
        adv_clip_max=adv_clip_max,
    )
    return loss.mean(), reduce_metrics(metric_terms)


def grpo_guard_loss_terms(
    log_probs: Float[Tensor, " batch"],
    old_log_probs: Float[Tensor, " batch"],
    advantages: Float[Tensor, " batch"],
    *,
    mean: Float[Tensor, "batch ..."],
    old_mean: Float[Tensor, "batch ..."],
    std_dev_t: Float[Tensor, "..."] | float | int,
    sqrt_dt: Float[Tensor, "..."] | float | int,
    clip_range: ClipRange,
    adv_clip_max: float | int,
    mask: Bool[Tensor, "batch ..."] | None = None,
) -> tuple[Float[Tensor, " batch"], dict[str, Tensor]]:
    """GRPO-Guard (arXiv 2510.22319) on one step: ``r = exp((new - old + b) s)``, loss over ``-dt``.

    ``s = std_dev_t * sqrt_dt`` is the step's full std, ``sqrt_dt`` being ``sqrt(-dt)``: numbers, or
    one a sample. ``b = mean((mean - old_mean)^2) / (2 s^2)`` of each sample, over the live elements
    where ``mask`` is given: with it the log-ratio is ``mean(noise (mean - old_mean))``, whose
    expectation is 0. The log-probs must be those of a Gaussian. Gradients go through ``log_probs``
    and ``mean``.
    """
    low, high = _clip_bounds(clip_range)
    advantages = _per_element(log_probs, old_log_probs, advantages)
    if mean.shape != old_mean.shape or len(mean) != len(log_probs) or log_probs.ndim != 1:
        raise LossError(
            f"grpo_guard_loss: needs a mean of now and of the rollout a sample; got "
            f"{tuple(mean.shape)} and {tuple(old_mean.shape)} for {tuple(log_probs.shape)} "
            "log-probs; pass [B, ...] twice and [B]"
        )
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    root = per_sample_scale("grpo_guard_loss: sqrt_dt", sqrt_dt, mean).flatten()
    std = per_sample_scale("grpo_guard_loss: std_dev_t", std_dev_t, mean).flatten() * root
    square = (mean.to(dtype) - old_mean.detach().to(dtype)) ** 2
    raw = log_probs.to(dtype) - old_log_probs.detach().to(dtype)
    log_ratio = (raw + element_mean(square, mask) / (2 * std**2)) * std
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss = _clipped(ratio, advantages, low, high, adv_clip_max) / root**2
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


def _clipped(
    ratio: Tensor, advantages: Tensor, low: float, high: float, adv_clip_max: float | int
) -> Tensor:
    if not adv_clip_max > 0:
        raise LossError(
            f"grpo_loss: adv_clip_max must be positive; got {adv_clip_max}; set it near 5"
        )
    advantage = advantages.detach().to(ratio.dtype).clamp(-adv_clip_max, adv_clip_max)
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


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
