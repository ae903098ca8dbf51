"""Distances of a step to another policy's, a number a sample: between means, between velocities."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_rollout.errors import MilesRolloutError
from miles_rollout.shapes import Bool, Float


class LossError(MilesRolloutError, ValueError):
    """Inputs from which no loss can be computed."""


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
    scale = per_sample_scale("mean_kl: std", std, mean)
    square = (mean.to(dtype) - ref_mean.detach().to(dtype)) ** 2
    return element_mean(square / (2 * scale**2), mask)


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
    return element_mean(square, mask)


def per_sample_scale(
    where: str, scale: Float[Tensor, "..."] | float | int, like: Float[Tensor, "batch ..."]
) -> Tensor:
    """A positive scale that broadcasts against ``like``: from a number, [B], or its rank.

    At least float32 and without a graph. Raises ``LossError``, which begins with ``where``.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    values = torch.as_tensor(scale, device=like.device, dtype=dtype).detach()
    if values.ndim == 1 and len(values) == len(like):
        values = values.reshape(-1, *[1] * (like.ndim - 1))
    fits = values.ndim in (0, like.ndim) and all(
        size in (1, wanted) for size, wanted in zip(values.shape, like.shape, strict=False)
    )
    if not fits:
        raise LossError(
            f"{where} does not fit; got {tuple(values.shape)} for means {tuple(like.shape)}; pass a "
            "number, [B], or one of the means' rank"
        )
    if not bool((values > 0).all()):
        raise LossError(
            f"{where} must be positive; got {float(values.min())}; leave out the steps without "
            "noise, they have no density"
        )
    return values


def element_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """[B]: over all elements of each sample, or over the live ones."""
    if mask is None:
        return values.flatten(1).mean(1)
    live = mask.to(values.device)
    return values.where(live, 0).flatten(1).sum(1) / live.flatten(1).sum(1)
