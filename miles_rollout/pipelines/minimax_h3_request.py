"""What a MiniMax H3 request must be: checked here, since the blocks fail late or only warn."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    MINIMAX_H3_AUDIO_CHANNELS,
    align_num_frames,
    audio_latent_num_frames,
    resolve_canvas_size,
    video_latent_num_frames,
)

from miles_rollout.pipelines.minimax_h3_blocks import REFERENCES, TEXT, inputs_of, workflow_of
from miles_rollout.pipelines.minimax_h3_inputs import check_inputs, refuse

GUIDANCE = ("guidance_scale", "true_cfg_scale")
"""Arguments that other pipelines know; here a value up to 1 says what is so anyway."""


def check_request(pipe: Any, request: Mapping[str, Any]) -> None:
    """Raise ``RolloutParamsError`` for a call that H3 cannot take; warn of a rounded frame count."""
    check_guidance(request)
    given = {k: v for k, v in request.items() if v is not None and k not in (*GUIDANCE, "output")}
    if "state" in given:
        refuse("a state hides its arguments", "state=", "them as arguments")
    known = inputs_of(pipe._blocks, workflow_of(given), given)
    if "prompt" in known:  # its denoising blocks alone get what was encoded
        check_inputs(pipe, given)
    unknown = sorted(set(given) - known)
    if unknown:
        refuse(
            "no such argument, which the pipeline would ignore",
            ", ".join(unknown),
            f"one of {', '.join(sorted(known))}",
        )
    check_points(given)
    _check_noise(given)
    check_sizes(pipe, given)


def check_guidance(request: Mapping[str, Any]) -> None:
    """Refuse classifier-free guidance: it is distilled into the weights."""
    for name in GUIDANCE:
        scale = request.get(name)
        if scale is not None and scale > 1:
            refuse(
                "MiniMax H3 is guidance-distilled, with one conditional call a step",
                f"{name}={scale}",
                f"{name}=1, or leave it out",
            )


def check_points(request: Mapping[str, Any]) -> None:
    """Refuse a schedule without an evaluation."""
    points = request.get("num_inference_steps")
    if isinstance(points, bool) or not isinstance(points, int) or points < 2:
        refuse(
            "MiniMax H3 counts grid points, the last one clean, so N drive N - 1 evaluations",
            f"num_inference_steps={points}",
            "num_inference_steps >= 2",
        )


def resolve_request(pipe: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """The request with the frame count and the canvas that the blocks will make of it."""
    height, width = request.get("height"), request.get("width")
    if height is None and width is None:
        height, width = _canvas(pipe, request)
    frames = align_num_frames(
        request.get("num_frames") or 124, pipe.vae_frames_per_chunk, pipe.vae_latents_per_chunk
    )
    return {**request, "height": height, "width": width, "num_frames": frames}


def latent_elements(
    components: Mapping[str, Any], sampling: Mapping[str, Any]
) -> dict[str, int] | None:
    """Stream -> latent elements of one sample; None without a size."""
    vae, audio_vae = components["vae"], components["audio_vae"]
    height, width = sampling.get("height"), sampling.get("width")
    if height is None or width is None:
        return None
    chunk, latents = vae.config.clip_length, vae.tokens_chunk_size
    frames = align_num_frames(sampling.get("num_frames") or 124, chunk, latents)
    ratio = vae.spatial_compression_ratio
    area = (height // ratio) * (width // ratio) * vae.config.latent_channels
    channels = MINIMAX_H3_AUDIO_CHANNELS * audio_vae.config.latent_channels
    return {
        "video": video_latent_num_frames(frames, chunk, latents) * area,
        "audio": audio_latent_num_frames(frames) * channels,
    }


def _canvas(pipe: Any, request: Mapping[str, Any]) -> tuple[int, int]:
    """The shape of the first key frame, or 16:9."""
    keyframes = (request.get("image"), request.get("last_image"))
    first = next((image for image in keyframes if image is not None), None)
    ratio = (16, 9) if first is None or workflow_of(request) == REFERENCES else first.size
    if max(ratio) > 4 * min(ratio):
        refuse(
            "the canvas takes the shape of the first key frame, within 1:4 and 4:1",
            f"{ratio[0]} x {ratio[1]}",
            "height and width, or a crop of it",
        )
    config = pipe.config
    return resolve_canvas_size(
        *ratio, pipe.canvas_multiple, config.canvas_short_edge, config.canvas_max_pixels
    )


def _check_noise(given: Mapping[str, Any]) -> None:
    """One generator draws the noise of the conditions first, then of the video, then of the sound."""
    conditioned = workflow_of(given) != TEXT or "condition_latents" in given
    if "generator" in given or (not conditioned and {"latents", "audio_latents"} <= set(given)):
        return
    refuse(
        "the noise of one stream would come from the global RNG",
        "no generator",
        "generator=session.generators"
        + ("" if conditioned else ", or both latents= and audio_latents="),
    )


def check_sizes(pipe: Any, given: Mapping[str, Any]) -> None:
    """Refuse a canvas or a duration that cannot be; warn of a frame count that will be rounded."""
    if workflow_of(given) == REFERENCES and "num_frames" not in given:
        refuse("references need a duration", "no num_frames", "num_frames=124 or more")
    asked = given.get("num_frames", 124)
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        refuse("a frame count is a positive int", repr(asked), "num_frames")
    resolved = resolve_request(pipe, given)
    frames, sides = resolved["num_frames"], (resolved["height"], resolved["width"])
    if frames != asked:
        warnings.warn(
            f"rollout: frames come in 17 n + 5; got num_frames={asked}, taken as {frames}; set "
            f"num_frames={frames} to say so",
            stacklevel=2,
        )
    if not pipe.min_duration <= frames / pipe.fps <= pipe.max_duration:
        refuse(
            f"MiniMax H3 makes {pipe.min_duration:g} to {pipe.max_duration:g} seconds",
            f"{frames} frames at {pipe.fps} a second",
            "num_frames in between, of the form 17 n + 5",
        )
    multiple = pipe.canvas_multiple
    if any(not side or side % multiple for side in sides):
        refuse(
            "a size that the canvas cannot have",
            f"{sides[0]} x {sides[1]}",
            f"both height and width, to multiples of {multiple}",
        )
