"""Tiny real pipelines: for tests, for documentation and for recipes that run on a CPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from miles_rollout.testing.qwen_image import tiny_qwen_image

if TYPE_CHECKING:
    from miles_rollout.testing.minimax_h3 import tiny_minimax_h3

__all__ = ["tiny_minimax_h3", "tiny_qwen_image"]

_LAZY = {"tiny_minimax_h3": "minimax_h3"}
"""What is imported when it is asked for: its models take a while, or a newer diffusers."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
