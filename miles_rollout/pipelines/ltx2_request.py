"""What an LTX-2 request must be, and how it is guided."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

from miles_rollout.errors import RolloutParamsError

SIZES = ("height", "width", "num_frames")
_VIDEO = ("guidance_scale", "stg_scale", "modality_scale", "guidance_rescale")
SCALES = (*_VIDEO, *(f"audio_{name}" for name in _VIDEO))
_DEFAULTS = {"height": 512, "width": 768, "num_frames": 121}


def check_request(pipe: Any, request: Mapping[str, Any]) -> None:
    """Raise ``RolloutParamsError`` for a call that cannot be rolled out; warn of idle settings."""
    if request.get("generator") is None:
        refuse(
            "LTX-2 draws for both streams, also where latents are given, so the global RNG would move",
            "generator None",
            "generator=session.generators",
        )
    _check_sizes(pipe, request)
    _check_guidance(pipe, request)


def resolve_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request with the sizes that the pipeline takes where none are given."""
    given = {name: value for name, value in request.items() if value is not None}
    return {**request, **{name: given.get(name, size) for name, size in _DEFAULTS.items()}}


def guidance_of(request: Mapping[str, Any]) -> dict[str, float | bool]:
    """All scales and which guidances are on; sound takes the video's scale for None and for 0."""
    scales = {name: float(request[name]) for name in _VIDEO}
    scales |= {f"audio_{name}": float(request[f"audio_{name}"] or scales[name]) for name in _VIDEO}

    def most(name: str) -> float:
        return max(scales[name], scales[f"audio_{name}"])

    return {
        "do_classifier_free_guidance": most("guidance_scale") > 1,
        "do_spatio_temporal_guidance": most("stg_scale") > 0,
        "do_modality_isolation_guidance": most("modality_scale") > 1,
        **scales,
    }


def refuse(problem: str, value: object, advice: str) -> NoReturn:
    """Raise ``RolloutParamsError``."""
    raise RolloutParamsError(f"rollout: {problem}; got {value}; set {advice}")


def _check_sizes(pipe: Any, request: Mapping[str, Any]) -> None:
    frames = request.get("num_frames")
    if frames is None:
        if getattr(pipe, "duration_head", None) is not None:
            refuse(
                "the pipeline would predict the duration, and the record not know it",
                "num_frames None",
                "num_frames",
            )
        return
    ratio = pipe.vae_temporal_compression_ratio
    if isinstance(frames, bool) or not isinstance(frames, int) or frames < 1:
        refuse("a frame count is a positive int", repr(frames), "num_frames")
    if (frames - 1) % ratio:
        refuse(
            f"frames come in {ratio} n + 1, or the pipeline rounds them and the sound goes on "
            "beyond the video",
            f"num_frames {frames}",
            f"num_frames {frames - (frames - 1) % ratio}",
        )


def _check_guidance(pipe: Any, request: Mapping[str, Any]) -> None:
    guidance = guidance_of(request)
    embedded, negative = request.get("prompt_embeds"), request.get("negative_prompt_embeds")
    if guidance["do_classifier_free_guidance"] and embedded is not None and negative is None:
        refuse(
            "guidance is on and the prompt is encoded, but no negative one",
            f"guidance_scale {guidance['guidance_scale']}, audio_guidance_scale "
            f"{guidance['audio_guidance_scale']}",
            "both to 1, or pass a negative prompt",
        )
    for name in _VIDEO:
        if request[f"audio_{name}"] == 0 and request[name]:
            warnings.warn(
                f"rollout: the pipeline takes 0 for the sound as the video's scale; got "
                f"audio_{name} 0 and {name} {request[name]}; set audio_{name} to a small number",
                stacklevel=2,
            )
    if guidance["do_spatio_temporal_guidance"]:
        _check_blocks(pipe, request)


def _check_blocks(pipe: Any, request: Mapping[str, Any]) -> None:
    blocks, count = request.get("spatio_temporal_guidance_blocks"), _num_blocks(pipe)
    if blocks and not any(0 <= block < count for block in blocks):
        warnings.warn(
            f"rollout: the spatio-temporal guidance perturbs no block of {count}, so that its call "
            f"changes nothing; got {list(blocks)}; set spatio_temporal_guidance_blocks, or "
            "stg_scale=0",
            stacklevel=2,
        )
    if not pipe.transformer.config.perturbed_attn:
        refuse(
            "this transformer has no perturbed attention, so that the call changes nothing",
            f"stg_scale {request['stg_scale']}",
            "stg_scale=0",
        )


def _num_blocks(pipe: Any) -> int:
    return len(pipe.transformer.transformer_blocks)
