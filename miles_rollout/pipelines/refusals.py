"""Pipeline arguments that a rollout refuses: what adapters declare, checked and said in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from miles_rollout.call_signature import call_defaults
from miles_rollout.errors import RolloutParamsError

IMAGE_PROMPT = "an image prompt reaches the denoiser in a way that replay cannot cut into rows"
EXPANDED = (
    "prompts are expanded by the caller, one seed a row; set it to 1 and repeat the prompt in the "
    "list instead"
)


def check_refused(refused: Mapping[str, str], pipe: Any, request: Mapping[str, Any]) -> None:
    """Raise ``RolloutParamsError`` for an argument of ``refused`` that is not at its default."""
    defaults = call_defaults(type(pipe))
    for name, reason in refused.items():
        value = request.get(name)
        default = defaults.get(name)
        if value is None or value is default or _equal(value, default):
            continue
        why, _, advice = reason.partition("; ")
        shown = f" {value}" if _is_short(value) else ""
        raise RolloutParamsError(
            f"rollout: {why}; got {name}{shown}; {advice or f'set it to {default}'}"
        )


def _equal(value: Any, default: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) and bool(value == default)


def _is_short(value: Any) -> bool:
    """Numbers, and lists of them: an image or a text would bury the message."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_short, value))
    return isinstance(value, (bool, int, float)) and not isinstance(value, Tensor)
