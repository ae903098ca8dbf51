"""What a prompt comes with besides its text: images, read from the files that its line names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from miles_rollout.errors import MilesRolloutError


class InputError(MilesRolloutError, ValueError):
    """What a line of a prompt file names as its inputs cannot be read."""


def read_images(named: Any, folder: Path, where: str) -> dict[str, Any]:
    """``{"image": "a.png", "references": ["b.png", "c.png"]}`` with RGB pictures for the paths.

    Paths are relative to ``folder``. ``where`` is the line, for errors.
    """
    if not isinstance(named, dict):
        raise InputError(
            f"{where}: 'inputs' must be an object of paths; got {named!r}; write "
            '{"image": "a.png"}'
        )
    return {
        name: _picture(value, folder, f"{where}: inputs.{name}") for name, value in named.items()
    }


def inputs_of(records: Sequence[Any]) -> list[Mapping[str, Any]] | None:
    """The engine's ``inputs`` of prompt records; None where none has any."""
    return [r.inputs for r in records] if any(r.inputs for r in records) else None


def _picture(value: Any, folder: Path, where: str) -> Any:
    if isinstance(value, list):
        return [_picture(item, folder, where) for item in value]
    if not isinstance(value, str):
        raise InputError(f"{where}: must be a path or a list of them; got {value!r}; write a path")
    path = folder / value
    try:
        with Image.open(path) as opened:
            return opened.convert("RGB")
    except OSError as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{where}: no picture can be read; got {str(path)!r} ({reason}); name a file beside the "
            "prompts"
        ) from error
