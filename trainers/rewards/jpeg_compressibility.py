"""Reward: how small the picture is as a JPEG. Needs no model, so recipes are tried out with it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from miles_rollout.media import Media
from miles_rollout.shapes import Float

_QUALITY = 95
_BYTES_PER_UNIT = 500 * 1000
"""Flow-GRPO: minus kilobytes (of 1000 bytes) over 500, which is about -1..0 for 512 x 512."""


def jpeg_compressibility(
    media: Sequence[Media], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Minus kilobytes / 500 at quality 95; of a video the mean over its frames."""
    return [-_mean_bytes(item) / _BYTES_PER_UNIT for item in media]


def _mean_bytes(media: Media) -> float:
    if media.video is not None:
        return sum(map(_jpeg_bytes, media.video)) / len(media.video)
    assert media.rgb is not None
    return float(_jpeg_bytes(media.rgb))


def _jpeg_bytes(image: Float[Tensor, "channels height width"]) -> int:
    pixels = (image.float() * 255).round().clamp(0, 255).to(torch.uint8).cpu()
    array = pixels.permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(array[..., 0] if len(pixels) == 1 else array).save(
        buffer, format="JPEG", quality=_QUALITY
    )
    return buffer.tell()
