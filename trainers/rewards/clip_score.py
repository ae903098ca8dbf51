"""Reward: how well a picture fits its prompt, by CLIP."""

from __future__ import annotations

from trainers.config_loader import ConfigError
from trainers.rewards.clip_features import ClipFeatures, ImageTextSimilarity
from trainers.rewards.pretrained import check_settings


def clip_score(
    *,
    model: str = "openai/clip-vit-large-patch14",
    processor: str = "openai/clip-vit-large-patch14",
    device: str = "auto",
    dtype: str = "float32",
    batch_size: int = 32,
    frames: int = 8,
    divisor: float | None = 30.0,
) -> ImageTextSimilarity:
    """exp(logit_scale) * cosine / ``divisor``, as Flow-GRPO has it with 30; None: the cosine alone.

    Of a video the mean over ``frames`` evenly spaced ones. ``model`` and ``processor`` are folders or
    hub names. Text after 77 tokens is not looked at. Raises ``ConfigError`` for a model that cannot
    be loaded.
    """
    check_settings("clip_score", dtype=dtype, frames=frames)
    if divisor is not None and not divisor > 0:
        raise ConfigError(
            f"reward 'clip_score': divisor: must be positive; got {divisor}; set 30, or null for "
            "the cosine"
        )
    clip = ClipFeatures(
        "clip_score",
        model=model,
        processor=processor,
        device=device,
        dtype=dtype,
        batch_size=batch_size,
    )
    scale = 1.0 if divisor is None else clip.logit_scale / divisor
    return ImageTextSimilarity(clip, scale=scale, frames=frames)
