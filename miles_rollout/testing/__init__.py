"""Tiny real pipelines: for tests, for documentation and for recipes that run on a CPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from miles_rollout.testing.qwen_image import tiny_qwen_image

if TYPE_CHECKING:
    from miles_rollout.testing.flux import tiny_flux
    from miles_rollout.testing.minimax_h3 import tiny_minimax_h3
    from miles_rollout.testing.sd3 import tiny_sd3

__all__ = ["tiny_flux", "tiny_minimax_h3", "tiny_qwen_image", "tiny_sd3"]

_LAZY = {"tiny_flux": "flux", "tiny_minimax_h3": "minimax_h3", "tiny_sd3": "sd3"}


def __getattr__(name: str) -> Any:
    """Import a pipeline's classes when it is asked for: each family costs seconds."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
