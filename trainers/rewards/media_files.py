"""Media from files: pictures through Pillow, videos with their sound through PyAV."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from miles_rollout import Media
from miles_rollout.shapes import Float
from trainers.config_loader import ConfigError
from trainers.video_file import require_av

IMAGES = (".png", ".jpg", ".jpeg", ".webp")
VIDEOS = (".mp4",)


def read_media(path: Path) -> Media:
    """A picture or a video. Raises ``ConfigError`` for a file that is none."""
    try:
        return read_video(path) if path.suffix.lower() in VIDEOS else Media(image=_picture(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path.name}: cannot be read; got {type(error).__name__}: {error}; remove or replace it"
        ) from error


def _picture(path: Path) -> Float[Tensor, "3 height width"]:
    with Image.open(path, formats=["PNG", "JPEG", "WEBP"]) as picture:
        array = np.asarray(picture.convert("RGB"), dtype=np.float32) / 255
    return torch.from_numpy(array.transpose(2, 0, 1).copy())


def read_video(path: Path) -> Media:
    """All frames, and the sound at its own rate if there is one. Raises ``ValueError``, ``OSError``."""
    av = require_av()
    frames, sound = [], []
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError("holds no video")
        fps = float(container.streams.video[0].average_rate or Fraction(0))
        rate = container.streams.audio[0].rate if container.streams.audio else None
        for frame in container.decode():
            if isinstance(frame, av.VideoFrame):
                frames.append(frame.to_ndarray(format="rgb24"))
            else:
                sound.append(_planes(frame))
    if not frames or fps <= 0:
        raise ValueError("holds no frames")
    pixels = torch.from_numpy(np.stack(frames).astype(np.float32) / 255).permute(0, 3, 1, 2)
    audio = torch.from_numpy(np.concatenate(sound, axis=1)) if sound else None
    return Media(
        video=pixels.contiguous(),
        fps=fps,
        audio=audio,
        sampling_rate=None if audio is None else rate,
    )


def _planes(frame: Any) -> np.ndarray:
    """[channels, samples] in -1..1."""
    array = frame.to_ndarray()
    if array.dtype != np.float32:
        array = array.astype(np.float32) / np.iinfo(array.dtype).max
    return array if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels).T
