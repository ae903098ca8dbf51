"""What one sample decodes to: the thing that a reward looks at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from miles_rollout.errors import RolloutParamsError
from miles_rollout.shapes import Float


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """One decoded sample: an image or a video, with its sound if it has one.

    Raises ``RolloutParamsError`` when there is not exactly one of image and video, or when a
    video comes without its frame rate or sound without its sampling rate.
    """

    image: Float[Tensor, "channels height width"] | None = None
    """float32 in 0..1; a fourth channel is alpha."""
    video: Float[Tensor, "frames channels height width"] | None = None
    """float32 in 0..1."""
    audio: Float[Tensor, "audio_channels samples"] | None = None
    """float32 in -1..1."""
    action: Float[Tensor, "actions action_channels"] | None = None
    """Actions that were denoised with a video, in the units of their embodiment."""
    fps: float | int | None = None
    """Frames a second of ``video``."""
    sampling_rate: int | None = None
    """Samples a second of ``audio``."""

    def to(self, device: str | torch.device) -> Media:
        """The same on another device."""
        moved: dict[str, Any] = {
            name: None if tensor is None else tensor.to(device)
            for name, tensor in (
                ("image", self.image),
                ("video", self.video),
                ("audio", self.audio),
                ("action", self.action),
            )
        }
        return replace(self, **moved)

    def __post_init__(self) -> None:
        if (self.image is None) == (self.video is None):
            raise RolloutParamsError(
                f"Media: needs an image or a video and not both; got image "
                f"{self.image is not None}, video {self.video is not None}; pass exactly one"
            )
        if self.video is not None and self.fps is None:
            raise RolloutParamsError("Media: a video needs its frame rate; got fps None; pass fps")
        if self.audio is not None and self.sampling_rate is None:
            raise RolloutParamsError(
                "Media: sound needs its sampling rate; got sampling_rate None; pass sampling_rate"
            )

    @property
    def rgb(self) -> Float[Tensor, "channels height width"] | None:
        """The image as an eye or a judge sees it: one with alpha is laid over white."""
        if self.image is None or len(self.image) != 4:
            return self.image
        color, alpha = self.image[:3], self.image[3:]
        return color * alpha + (1 - alpha)
