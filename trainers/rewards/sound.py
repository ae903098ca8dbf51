"""The sound of a sample as rewards with models of their own hear it: one channel, at one rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from miles_rollout import Media
from miles_rollout.errors import RolloutParamsError


def mono(reward: str, media: Media, rate: int, soxr: Any) -> np.ndarray:
    """[samples], float32, at ``rate`` a second: the mean of the channels, resampled by ``soxr``.

    Raises ``RolloutParamsError`` for media without sound and ``ValueError`` for sound that is empty
    or holds NaN or infinity.
    """
    if media.audio is None or media.sampling_rate is None:
        got = "an image" if media.video is None else "a video without sound"
        raise RolloutParamsError(
            f"{reward}: listens to the sound of a video; got {got}; set another reward for this "
            "pipeline"
        )
    if not media.audio.numel() or not torch.isfinite(media.audio).all():
        raise ValueError(f"{reward}: the sound is empty or holds NaN or infinity")
    samples = media.audio.float().mean(dim=0).cpu().numpy()
    if media.sampling_rate == rate:
        return samples
    resampled: np.ndarray = soxr.resample(samples, media.sampling_rate, rate)
    if not len(resampled):
        raise ValueError(
            f"{reward}: the sound is shorter than one sample at {rate} a second; got {len(samples)} at "
            f"{media.sampling_rate}"
        )
    return resampled
