"""Cosmos3's latents as media, as both of its pipelines decode them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from miles_rollout.media import Media


def decode(pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]) -> list[Media]:
    """One `Media` a row: a single frame is an image, and actions stay as they are.

    ``latents``: video [rows, channels, frames, height, width], audio [rows, channels, length] and
    action [rows, steps, width], the latter two if there are some.
    """
    media = []
    for row, video in enumerate(latents["video"]):
        frames = _pixels(pipe, video[None])
        made: dict[str, Any] = {"image": frames[0]}
        if len(frames) > 1:
            made = {"video": frames, "fps": request.get("fps", 24.0)}
        if "audio" in latents:
            made["audio"] = pipe.decode_sound(latents["audio"][row]).float()
            made["sampling_rate"] = int(pipe.sound_tokenizer.config.sampling_rate)
        if "action" in latents:
            made["action"] = latents["action"][row]
        media.append(Media(**made))
    return media


def _pixels(pipe: Any, video: Tensor) -> Tensor:
    """Undo the VAE's statistics, decode, and map to 0..1: [frames, 3, height, width]."""
    dtype = pipe.vae.dtype
    mean = pipe._vae_latents_mean.to(device=video.device, dtype=dtype).view(1, -1, 1, 1, 1)
    inverse = pipe._vae_latents_inv_std.to(device=video.device, dtype=dtype).view(1, -1, 1, 1, 1)
    decoded = pipe.vae.decode(video.to(dtype) / inverse + mean).sample.to(video.dtype)
    frames: Tensor = pipe.video_processor.postprocess_video(decoded, output_type="pt")[0]
    return frames
