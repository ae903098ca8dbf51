"""What a MiniMax H3 request must be: checked here, since the blocks fail late or only warn."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    align_num_frames,
    resolve_canvas_size,
)

from miles_rollout.errors import RolloutParamsError

GUIDANCE = ("guidance_scale", "true_cfg_scale")
"""Arguments that other pipelines know; here a value up to 1 says what is so anyway."""

_KNOWN: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""Blocks -> the names of their inputs, which take milliseconds to collect."""


def check_request(pipe: Any, request: Mapping[str, Any]) -> None:
    """Raise ``RolloutParamsError`` for a call that H3 cannot take; warn of a rounded frame count."""
    check_guidance(request)
    given = {k: v for k, v in request.items() if v is not None and k not in (*GUIDANCE, "output")}
    if "state" in given:
        refuse("a state hides its arguments", "state=", "them as arguments")
    known = _inputs(pipe._blocks, given)
    unknown = sorted(set(given) - known)
    if unknown:
        refuse(
            "no such argument, which the pipeline would ignore",
            ", ".join(unknown),
            f"one of {', '.join(sorted(known))}",
        )
    check_points(given)
    if "generator" not in given and not {"latents", "audio_latents"} <= set(given):
        refuse(
            "the noise of one stream would come from the global RNG",
            "no generator",
            "generator=session.generators, or both latents= and audio_latents=",
        )
    _check_sizes(pipe, given)


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
    by_text = not any(request.get(name) for name in ("image", "last_image", "references"))
    if height is None and width is None and by_text:
        config = pipe.config
        height, width = resolve_canvas_size(
            16, 9, pipe.canvas_multiple, config.canvas_short_edge, config.canvas_max_pixels
        )
    frames = align_num_frames(
        request.get("num_frames") or 124, pipe.vae_frames_per_chunk, pipe.vae_latents_per_chunk
    )
    return {**request, "height": height, "width": width, "num_frames": frames}


def refuse(problem: str, value: object, advice: str) -> NoReturn:
    """Raise ``RolloutParamsError``."""
    raise RolloutParamsError(f"rollout: {problem}; got {value}; set {advice}")


def _inputs(blocks: Any, given: Collection[str]) -> set[str]:
    """The names that the blocks take; asked for again only where a name is new."""
    known = _KNOWN.get(blocks, set())
    if not set(given) <= known:
        known = _KNOWN[blocks] = {i.name or i.kwargs_type for i in blocks.inputs}
    return known


def _check_sizes(pipe: Any, given: Mapping[str, Any]) -> None:
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
    if sides != (None, None) and any(not side or side % multiple for side in sides):
        refuse(
            "a size that the canvas cannot have",
            f"{sides[0]} x {sides[1]}",
            f"both height and width, to multiples of {multiple}",
        )
