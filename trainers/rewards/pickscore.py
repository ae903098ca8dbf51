"""Reward: PickScore, which of two pictures for a prompt people would pick (arXiv 2305.01569)."""

from __future__ import annotations

from trainers.rewards.clip_features import ClipFeatures, ImageTextSimilarity
from trainers.rewards.pretrained import check_settings

_PER_UNIT = 26
"""Flow-GRPO: scores of good pictures are then near 0.8 to 0.9."""


def pickscore(
    *,
    model: str = "yuvalkirstain/PickScore_v1",
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    device: str = "auto",
    dtype: str = "float32",
    batch_size: int = 32,
    frames: int = 8,
) -> ImageTextSimilarity:
    """exp(logit_scale) * cosine / 26; of a video the mean over ``frames`` evenly spaced ones.

    ``model`` and ``processor`` are folders or hub names. Text after 77 tokens is not looked at.
    Raises ``ConfigError`` for a model that cannot be loaded.
    """
    check_settings("pickscore", dtype=dtype, frames=frames)
    clip = ClipFeatures(
        "pickscore",
        model=model,
        processor=processor,
        device=device,
        dtype=dtype,
        batch_size=batch_size,
    )
    return ImageTextSimilarity(clip, scale=clip.logit_scale / _PER_UNIT, frames=frames)
