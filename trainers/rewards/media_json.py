"""Media as JSON: pictures as PNG, videos as MP4, sound as WAV, each in base64.

PNG holds a picture exactly to eight bits and WAV sound to sixteen; MP4 is lossy. Nothing that is read
can run code.
"""

from __future__ import annotations

import base64
import binascii
import io
import tempfile
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from miles_rollout import Media
from miles_rollout.shapes import Float
from trainers.rewards.media_files import read_video
from trainers.video_file import write_video

_SIXTEEN_BITS = 32767


class MediaJsonError(ValueError):
    """What was received is no medium."""


def encode_media(media: Media) -> dict[str, Any]:
    """``{"image"}`` or ``{"video", "fps"}``, with ``{"audio"}`` if there is sound."""
    if media.image is not None:
        return {"image": _base64(_png(media.image))}
    silent = Media(video=media.video, fps=media.fps)
    with tempfile.TemporaryDirectory() as folder:
        path = write_video(Path(folder) / "video.mp4", silent)
        encoded: dict[str, Any] = {
            "video": _base64(path.read_bytes()),
            "fps": float(media.fps or 0),
        }
    if media.audio is not None and media.sampling_rate is not None:
        encoded["audio"] = _base64(_wav(media.audio, media.sampling_rate))
    return encoded


def decode_media(item: Mapping[str, Any]) -> Media:
    """The inverse of `encode_media`. Raises ``MediaJsonError`` for what is none of its results."""
    given = {name for name, value in item.items() if value is not None}
    if ("image" in given) == ("video" in given):
        raise MediaJsonError(f"needs an image or a video and not both; got {sorted(given)}")
    try:
        if "image" in given:
            return Media(image=_read_png(_bytes(item["image"])))
        fps = item.get("fps")
        if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not fps > 0:
            raise MediaJsonError(f"a video needs its frame rate; got fps {fps!r}")
        sound: dict[str, Any] = {}
        if "audio" in given:
            audio, rate = _read_wav(_bytes(item["audio"]))
            sound = {"audio": audio, "sampling_rate": rate}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "video.mp4"
            path.write_bytes(_bytes(item["video"]))
            return Media(video=read_video(path).video, fps=float(fps), **sound)
    except MediaJsonError:
        raise
    except Exception as error:  # whatever a codec says of bytes that are none of its files
        raise MediaJsonError(f"cannot be read: {type(error).__name__}: {error}") from error


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: Any) -> bytes:
    if not isinstance(text, str):
        raise MediaJsonError(f"media are base64 strings; got {type(text).__name__}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaJsonError(f"not base64: {error}") from error


def _png(image: Float[Tensor, "channels height width"]) -> bytes:
    pixels = (image.detach().cpu().float() * 255).round().clamp(0, 255).to(torch.uint8)
    array = pixels.permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(array[..., 0] if len(pixels) == 1 else array).save(buffer, format="PNG")
    return buffer.getvalue()


def _read_png(data: bytes) -> Float[Tensor, "channels height width"]:
    with Image.open(io.BytesIO(data), formats=["PNG", "JPEG", "WEBP"]) as picture:
        mode = picture.mode if picture.mode in ("L", "RGB") else "RGB"
        array = np.asarray(picture.convert(mode), dtype=np.float32) / 255
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())


def _wav(audio: Float[Tensor, "channels samples"], rate: int) -> bytes:
    values = audio.detach().cpu().float().nan_to_num(nan=0.0).clamp(-1, 1)
    samples = (values * _SIXTEEN_BITS).round().to(torch.int16).t().contiguous().numpy()
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(len(audio))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return buffer.getvalue()


def _read_wav(data: bytes) -> tuple[Float[Tensor, "channels samples"], int]:
    with wave.open(io.BytesIO(data), "rb") as file:
        if file.getsampwidth() != 2:
            raise MediaJsonError(f"sound has 16 bits a sample; got {8 * file.getsampwidth()}")
        frames = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        channels, rate = file.getnchannels(), file.getframerate()
    samples = torch.from_numpy(frames.astype(np.float32) / _SIXTEEN_BITS)
    return samples.view(-1, channels).t().contiguous(), rate
