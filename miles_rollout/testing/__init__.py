"""Tiny real pipelines: for tests, for documentation and for recipes that run on a CPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

import diffusers

from miles_rollout.errors import RolloutParamsError
from miles_rollout.testing.qwen_image import tiny_qwen_image

if TYPE_CHECKING:
    from miles_rollout.testing.flux import tiny_flux
    from miles_rollout.testing.ltx2 import tiny_ltx2
    from miles_rollout.testing.minimax_h3 import tiny_minimax_h3
    from miles_rollout.testing.sd3 import tiny_sd3

__all__ = ["tiny_flux", "tiny_ltx2", "tiny_minimax_h3", "tiny_qwen_image", "tiny_sd3"]


class _Lazy(NamedTuple):
    module: str
    needs: str
    """A class of diffusers without which the family cannot be imported."""
    since: str
    """The first diffusers that has it."""


_LAZY = {
    "tiny_flux": _Lazy("flux", "FluxPipeline", "0.30.0"),
    "tiny_ltx2": _Lazy("ltx2", "LTX2Pipeline", "0.42.1"),
    "tiny_minimax_h3": _Lazy("minimax_h3", "MiniMaxH3Scheduler", "0.40.0"),
    "tiny_sd3": _Lazy("sd3", "StableDiffusion3Pipeline", "0.29.0"),
}


def __getattr__(name: str) -> Any:
    """Import a family's classes when it is asked for: each costs seconds.

    Raises ``RolloutParamsError`` where diffusers is too old for the family.
    """
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    lazy = _LAZY[name]
    if not hasattr(diffusers, lazy.needs):
        raise RolloutParamsError(
            f"{name}: this diffusers has no {lazy.needs}; got diffusers {diffusers.__version__}; "
            f"install diffusers>={lazy.since}"
        )
    return getattr(importlib.import_module(f"{__name__}.{lazy.module}"), name)
