"""What a Cosmos3 request must be: checked here, since the pipelines fail late or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from diffusers.pipelines.cosmos.mixed_precision import Cosmos3MixedPrecisionConfig

from miles_rollout.errors import RolloutParamsError

_PRECISION = (
    "mixed_precision_format",
    "mixed_precision_first_steps",
    "mixed_precision_last_steps",
    "mixed_precision_reasoner_policy",
)


def check_request(pipe: Any, request: Mapping[str, Any]) -> None:
    """Raise ``RolloutParamsError`` for what the pipeline would drop, ignore, or draw unseeded."""
    given = {name: value for name, value in request.items() if value is not None}
    for name in ("prompt", "negative_prompt"):
        value = given.get(name, "")
        if not isinstance(value, str) and len(value) != 1:
            refuse(
                "one sample a call, so the pipeline would drop all prompts but the first",
                f"{len(value)} in {name}",
                f"one {name}, with a call for every sample",
            )
    _check_effect(given)
    if "generator" not in given:
        _check_noise(given)
    precision = {name: given.get(name) for name in _PRECISION}
    if Cosmos3MixedPrecisionConfig.resolve(pipe.transformer, **precision).enabled:
        refuse(
            "the first and last steps would run in another precision than their replay",
            f"an FP8 checkpoint with mixed_precision_format={precision['mixed_precision_format']}",
            "mixed_precision_format='none'",
        )


def check_frames(request: Mapping[str, Any]) -> None:
    """Refuse a frame count that the VAE would cut: it packs four frames after the first."""
    frames = request.get("num_frames", 189)
    if isinstance(frames, bool) or not isinstance(frames, int) or frames < 1:
        refuse("a frame count is a positive int", repr(frames), "num_frames")
    if (frames - 1) % 4:
        refuse(
            "num_frames must be of the form 4 n + 1, or the pipeline cuts it",
            frames,
            f"num_frames={frames - (frames - 1) % 4}",
        )


def check_guardrail(guarded: bool, advice: str) -> None:
    """Refuse a pipeline whose safety checker redraws or blocks what it has decoded."""
    if guarded:
        refuse("media are decoded without the safety checker", "an active one", advice)


def resolve_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request with the sizes that the pipeline puts where there are none."""
    action = request.get("action")
    if action is not None:
        return {**request, "num_frames": action.chunk_size + 1}
    sizes = {"num_frames": 189, "height": 720, "width": 1280}
    return {**request, **{k: request.get(k) or default for k, default in sizes.items()}}


def refuse(problem: str, value: object, advice: str) -> NoReturn:
    """Raise ``RolloutParamsError``."""
    raise RolloutParamsError(f"rollout: {problem}; got {value}; set {advice}")


def _check_effect(given: Mapping[str, Any]) -> None:
    """What has no effect, and frames that the VAE would cut."""
    if "sound_latents" in given and not given.get("enable_sound"):
        refuse("sound that is decoded and never denoised", "sound_latents", "enable_sound=True")
    if "action_latents" in given and "action" not in given:
        refuse("actions that are never denoised", "action_latents", "action, or leave them out")
    if "action" in given:
        return
    check_frames(given)
    if given.get("num_frames") == 1 and "image" in given:
        refuse("an image has no effect on a single frame", "num_frames=1", "num_frames=5 or more")


def _check_noise(given: Mapping[str, Any]) -> None:
    """Without a generator every stream needs latents of its own."""
    asked = {
        "latents": True,
        "sound_latents": bool(given.get("enable_sound")),
        "action_latents": "action" in given,
    }
    missing = [name for name, needed in asked.items() if needed and name not in given]
    if missing:
        refuse(
            "the noise of a stream would come from the global RNG",
            f"neither a generator nor {', '.join(missing)}",
            "generator=session.generators",
        )
