"""What rewards with models of their own look at: eight-bit RGB pictures, and frames of a video."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from miles_rollout import Media
from miles_rollout.shapes import Float


def to_bytes(image: Float[Tensor, "channels height width"]) -> np.ndarray:
    """[height, width, 3], uint8, red first; values in 0..1 are rounded to the nearest of 256.

    One channel is taken for grey. Raises ``ValueError`` for a picture with NaN or infinity: there is
    nothing in it to judge.
    """
    if not torch.isfinite(image).all():
        raise ValueError("the picture holds NaN or infinity")
    pixels = (image.float() * 255).round().clamp(0, 255).to(torch.uint8)
    return pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().cpu().numpy()


def pictures(media: Sequence[Media], max_frames: int) -> tuple[list[np.ndarray], Tensor]:
    """The pictures to look at, and for each the index of its sample, int64 [pictures].

    An image is one picture. Of a video they are its frames, or, if it has more than
    ``max_frames``, as many evenly spaced ones with the first and the last.
    """
    found: list[np.ndarray] = []
    owners: list[int] = []
    for i, item in enumerate(media):
        if item.video is None:
            assert item.rgb is not None
            chosen = [item.rgb]
        else:
            count = min(max_frames, len(item.video))
            chosen = list(item.video[evenly_spaced(len(item.video), count)])
        found += [to_bytes(picture) for picture in chosen]
        owners += [i] * len(chosen)
    return found, torch.tensor(owners)


def evenly_spaced(size: int, count: int) -> list[int]:
    """``count`` of the indices below ``size``, with the first and, from two on, the last."""
    return [round(i * (size - 1) / max(count - 1, 1)) for i in range(count)]


def mean_per_sample(
    values: Float[Tensor, " pictures"], owners: Tensor, samples: int
) -> Float[Tensor, " samples"]:
    """The mean over the pictures of each sample, float64."""
    sums = torch.zeros(samples, dtype=torch.float64).index_add(0, owners, values.cpu().double())
    return sums / torch.bincount(owners, minlength=samples)
