"""Tiny real pipelines: for tests, for documentation and for recipes that run on a CPU."""

from __future__ import annotations

import importlib
from typing import Any

from miles_rollout.testing.qwen_image import tiny_qwen_image

__all__ = ["tiny_flux", "tiny_qwen_image", "tiny_sd3"]

_LAZY = {"tiny_flux": "flux", "tiny_sd3": "sd3"}


def __getattr__(name: str) -> Any:
    """Import a pipeline's classes when it is asked for: each family costs seconds."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
