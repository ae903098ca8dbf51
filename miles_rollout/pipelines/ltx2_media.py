"""From LTX-2's latents to video and sound, as its pipeline does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from miles_rollout.errors import RolloutParamsError
from miles_rollout.media import Media


def decode_media(
    pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
) -> list[Media]:
    """One `Media` a row; ``request`` has the sizes. Raises ``RolloutParamsError``."""
    if pipe.vae.config.timestep_conditioning:
        raise RolloutParamsError(
            "RolloutEngine.decode: this VAE's decoder is given fresh noise; got "
            "timestep_conditioning True; decode with the pipeline, by output_type='pt'"
        )
    video = _video_latents(pipe, latents["video"], request).to(pipe.vae.dtype)
    pixels = pipe.vae.decode(video, None, return_dict=False)[0]
    frames = pipe.video_processor.postprocess_video(pixels, output_type="pt")
    audio = _audio_latents(pipe, latents["audio"]).to(pipe.audio_vae.dtype)
    sound = pipe.vocoder(pipe.audio_vae.decode(audio, return_dict=False)[0])
    return [
        Media(
            video=frames[row].float(),
            audio=sound[row].float(),
            fps=request.get("frame_rate", 24.0),
            sampling_rate=pipe.vocoder.config.output_sampling_rate,
        )
        for row in range(len(frames))
    ]


def _video_latents(pipe: Any, video: Tensor, request: Mapping[str, Any]) -> Tensor:
    """[B, channels, frames, height, width] as the VAE takes them."""
    if video.ndim == 5:
        return video
    space, time = pipe.vae_spatial_compression_ratio, pipe.vae_temporal_compression_ratio
    unpacked = pipe._unpack_latents(
        video,
        (request["num_frames"] - 1) // time + 1,
        request["height"] // space,
        request["width"] // space,
        pipe.transformer_spatial_patch_size,
        pipe.transformer_temporal_patch_size,
    )
    vae = pipe.vae
    # That of the prompts; without their encoder, that of the denoiser which takes them.
    dtype = (pipe.text_encoder or pipe.transformer).dtype
    return pipe._denormalize_latents(
        unpacked.to(dtype),
        vae.latents_mean,
        vae.latents_std,
        vae.config.scaling_factor,
    )


def _audio_latents(pipe: Any, audio: Tensor) -> Tensor:
    """[B, channels, length, mel bins] as the audio VAE takes them."""
    if audio.ndim == 4:
        return audio
    vae = pipe.audio_vae
    whole = pipe._denormalize_audio_latents(audio, vae.latents_mean, vae.latents_std)
    bins = vae.config.mel_bins // pipe.audio_vae_mel_compression_ratio
    return pipe._unpack_audio_latents(whole, audio.shape[1], num_mel_bins=bins)
