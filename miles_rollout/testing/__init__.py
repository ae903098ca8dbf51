"""Tiny real pipelines: for tests, for documentation and for recipes that run on a CPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

import diffusers
from packaging.version import Version

from miles_rollout.errors import RolloutParamsError
from miles_rollout.testing.qwen_image import tiny_qwen_image

if TYPE_CHECKING:
    from miles_rollout.testing.cosmos3 import (
        tiny_cosmos3,
        tiny_cosmos3_distilled,
        tiny_cosmos3_modular,
    )
    from miles_rollout.testing.flux import tiny_flux
    from miles_rollout.testing.flux_2_klein import tiny_flux_2_klein
    from miles_rollout.testing.hunyuan_video15 import tiny_hunyuan_video15
    from miles_rollout.testing.ltx2 import tiny_ltx2
    from miles_rollout.testing.minimax_h3 import tiny_minimax_h3
    from miles_rollout.testing.qwen_image_2_1 import tiny_qwen_image_2_1
    from miles_rollout.testing.qwen_image_edit_plus import tiny_qwen_image_edit_plus
    from miles_rollout.testing.sana import tiny_sana
    from miles_rollout.testing.sd3 import tiny_sd3
    from miles_rollout.testing.wan import tiny_wan
    from miles_rollout.testing.z_image import tiny_z_image

__all__ = [
    "tiny_cosmos3",
    "tiny_cosmos3_distilled",
    "tiny_cosmos3_modular",
    "tiny_flux",
    "tiny_flux_2_klein",
    "tiny_hunyuan_video15",
    "tiny_ltx2",
    "tiny_minimax_h3",
    "tiny_qwen_image",
    "tiny_qwen_image_2_1",
    "tiny_qwen_image_edit_plus",
    "tiny_sana",
    "tiny_sd3",
    "tiny_wan",
    "tiny_z_image",
]


class _Lazy(NamedTuple):
    module: str
    since: str
    """The first diffusers that has the family as it is used here."""


_LAZY = {
    "tiny_cosmos3": _Lazy("cosmos3", "0.42.0"),
    "tiny_cosmos3_distilled": _Lazy("cosmos3", "0.42.0"),
    "tiny_cosmos3_modular": _Lazy("cosmos3", "0.42.0"),
    "tiny_flux": _Lazy("flux", "0.30.0"),
    "tiny_flux_2_klein": _Lazy("flux_2_klein", "0.37.0"),
    "tiny_hunyuan_video15": _Lazy("hunyuan_video15", "0.36.0"),
    "tiny_ltx2": _Lazy("ltx2", "0.42.1"),
    "tiny_minimax_h3": _Lazy("minimax_h3", "0.40.0"),
    "tiny_qwen_image_2_1": _Lazy("qwen_image_2_1", "0.41.0"),
    "tiny_qwen_image_edit_plus": _Lazy("qwen_image_edit_plus", "0.36.0"),
    "tiny_sana": _Lazy("sana", "0.32.0"),
    "tiny_sd3": _Lazy("sd3", "0.29.0"),
    "tiny_wan": _Lazy("wan", "0.33.0"),
    "tiny_z_image": _Lazy("z_image", "0.36.0"),
}


def __getattr__(name: str) -> Any:
    """Import a family's classes when it is asked for: each costs seconds.

    Raises ``RolloutParamsError`` where diffusers is too old for the family.
    """
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    lazy = _LAZY[name]
    if Version(diffusers.__version__) < Version(lazy.since):
        raise RolloutParamsError(
            f"{name}: this diffusers is too old for the family; got {diffusers.__version__}; install "
            f"diffusers>={lazy.since}"
        )
    return getattr(importlib.import_module(f"{__name__}.{lazy.module}"), name)
