"""A video with its sound as one file: H.264 and AAC in an mp4, which browsers and W&B play.

PyAV writes it, as in diffusers' own exporters. It is looked for when it is needed, since pictures do
without it.
"""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles_rollout import Media
from miles_rollout.errors import MilesRolloutError
from miles_rollout.shapes import Float

_AAC_RATES = (
    7350,
    8000,
    11025,
    12000,
    16000,
    22050,
    24000,
    32000,
    44100,
    48000,
    64000,
    88200,
    96000,
)
_AAC_FRAME = 1024
"""Samples that the codec takes at a time."""
_CRF = "18"
"""Constant quality of x264, visually near lossless."""


class VideoFileError(MilesRolloutError, RuntimeError):
    """A video cannot be written."""


def require_av() -> Any:
    """The PyAV module. Raises ``VideoFileError`` where it is not installed."""
    try:
        import av
    except ImportError as error:
        raise VideoFileError(
            f"video: writing one needs PyAV, which cannot be imported; got {error}; install it: "
            "pip install av"
        ) from error
    return av


def write_video(path: Path, media: Media) -> Path:
    """Write ``media.video`` [F, 3, H, W] and, if there is one, ``media.audio`` [C, N].

    Frame rate and sampling rate are those of ``media``; the sound is neither cut nor stretched to
    the pictures. Sides are made even for the codec by repeating the last row or column. Values out
    of range are clipped, NaN is black or silence. Raises ``VideoFileError`` for media without a
    video, for a sampling rate that AAC does not have, and for more than two channels.
    """
    av = require_av()
    if media.video is None or media.fps is None:
        raise VideoFileError("video: these media hold none; got an image; write it as a picture")
    _check_sound(media)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    with av.open(str(partial), mode="w", format="mp4") as container:
        frames = _even(media.video)
        rate = Fraction(media.fps).limit_denominator(1001)
        pictures = container.add_stream("libx264", rate=rate)
        pictures.height, pictures.width = frames.shape[-2:]
        pictures.pix_fmt = "yuv420p"
        pictures.options = {"crf": _CRF}
        # Every stream before the first packet: the header lists them.
        sound = None
        if media.audio is not None:
            layout = "stereo" if len(media.audio) == 2 else "mono"
            sound = container.add_stream("aac", rate=media.sampling_rate, layout=layout)
        for frame in frames:
            image = av.VideoFrame.from_ndarray(_eight_bit(frame), format="rgb24")
            container.mux(pictures.encode(image))
        container.mux(pictures.encode(None))
        if sound is not None and media.audio is not None:
            _write_sound(av, container, sound, media.audio)
    os.replace(partial, path)
    return path


def _write_sound(av: Any, container: Any, stream: Any, audio: Float[Tensor, "c n"]) -> None:
    values = audio.detach().cpu().float().nan_to_num(nan=0.0).clamp(-1, 1)
    for start in range(0, values.shape[1], _AAC_FRAME):
        part = values[:, start : start + _AAC_FRAME].contiguous().numpy()
        frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=stream.layout.name)
        frame.sample_rate = stream.rate
        frame.time_base = Fraction(1, stream.rate)
        frame.pts = start
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def _check_sound(media: Media) -> None:
    if media.audio is None:
        return
    if len(media.audio) not in (1, 2) or not media.audio.shape[1]:
        raise VideoFileError(
            f"video: sound has one channel or two; got {tuple(media.audio.shape)}; pass "
            "[channels, samples]"
        )
    if media.sampling_rate not in _AAC_RATES:
        raise VideoFileError(
            f"video: AAC has no such sampling rate; got {media.sampling_rate}; resample to one of "
            f"{', '.join(map(str, _AAC_RATES))}"
        )


def _even(frames: Float[Tensor, "frames 3 height width"]) -> Tensor:
    for axis in (2, 3):
        if frames.shape[axis] % 2:
            last = frames.narrow(axis, frames.shape[axis] - 1, 1)
            frames = torch.cat([frames, last], dim=axis)
    return frames


def _eight_bit(frame: Float[Tensor, "3 height width"]) -> Any:
    values = frame.detach().float().nan_to_num(nan=0.0).clamp(0, 1).mul(255).round()
    return values.to(torch.uint8).permute(1, 2, 0).contiguous().cpu().numpy()
