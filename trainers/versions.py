"""The versions that decide what a run computes: for checkpoints and for the tracked run."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

from miles_rollout import __version__

_LIBRARIES = ("torch", "diffusers", "transformers", "peft", "numpy", "safetensors")


def library_versions() -> dict[str, str]:
    """Versions of this project, of Python and of the libraries that do the arithmetic."""
    libraries = {name: metadata.version(name) for name in _LIBRARIES}
    return {"miles_rollout": __version__, "python": platform.python_version(), **libraries}


def other_versions(saved: Mapping[str, str]) -> list[str]:
    """What was another version when ``saved`` was taken, as "torch 2.12.0 (here 2.13.0)"."""
    now = library_versions()
    return [
        f"{name} {saved.get(name)} (here {now.get(name)})"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    ]
