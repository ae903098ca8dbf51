"""HunyuanVideo 1.5's guidance, which is a component of the pipeline: checked, read, restated."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

from diffusers import ClassifierFreeGuidance
from diffusers.guiders.guider_utils import rescale_noise_cfg
from torch import Tensor

from miles_rollout.pipelines.common import is_guided, refuse


def check_guider(guider: Any) -> None:
    """Refuse a guider that is not plain classifier-free guidance in all steps."""
    if type(guider) is not ClassifierFreeGuidance:
        refuse(
            "replay knows how one kind of guider combines its calls",
            f"a {type(guider).__name__}",
            "pipe.guider to a ClassifierFreeGuidance",
        )
    if (guider._start, guider._stop) != (0, 1):
        # In diffusers 0.42 the next call would not encode the negative prompt any more.
        refuse(
            "guidance covers all steps",
            f"a guider from {guider._start} to {guider._stop}",
            "its start=0 and stop=1",
        )


def is_on(guider: Any) -> bool:
    """By the guider's own rule, whatever step it has stopped at."""
    fresh = copy.copy(guider)
    fresh._num_inference_steps = None
    return bool(fresh._is_cfg_enabled())


def settings(guider: Any) -> dict[str, float | bool]:
    """What decides how it combines predictions; its rescaling works without guidance, too."""
    return {
        "do_classifier_free_guidance": is_on(guider),
        "guidance_scale": float(guider.guidance_scale),
        "guidance_rescale": float(guider.guidance_rescale),
        "use_original_formulation": bool(guider.use_original_formulation),
    }


def combine(
    positive: Tensor, negative: Tensor | None, guidance: Mapping[str, float | bool]
) -> Tensor:
    """``neg + scale (pos - neg)``, or ``pos + ...`` as first published; then the rescaling."""
    velocity = positive
    if is_guided(guidance) and negative is not None:
        shift = positive - negative
        start = positive if guidance["use_original_formulation"] else negative
        velocity = start + guidance["guidance_scale"] * shift
    if guidance["guidance_rescale"] > 0:
        velocity = rescale_noise_cfg(velocity, positive, guidance["guidance_rescale"])
    return velocity


@contextlib.contextmanager
def guider_at(pipe: Any, scale: float | int | None, guided: bool) -> Iterator[None]:
    """The pipeline's guider at another scale, behind its back: assigning it rewrites the config."""
    held = vars(pipe)["guider"]
    guider = vars(pipe)["guider"] = copy.copy(held)
    if not guided:
        guider.disable()
    elif scale is not None:
        guider.guidance_scale = scale
        guider.enable()
    try:
        yield
    finally:
        vars(pipe)["guider"] = held
