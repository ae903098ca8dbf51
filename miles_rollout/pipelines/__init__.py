"""Adapters: what a pipeline alone cannot say. One small file a model family."""

from __future__ import annotations

import importlib
from typing import Any

from miles_rollout.errors import RolloutParamsError
from miles_rollout.pipelines.base import PipelineAdapter
from miles_rollout.pipelines.generic import GenericAdapter

ADAPTERS = {
    "FluxPipeline": "miles_rollout.pipelines.flux:FluxAdapter",
    "LTX2Pipeline": "miles_rollout.pipelines.ltx2:LTX2Adapter",
    "MiniMaxH3ModularPipeline": "miles_rollout.pipelines.minimax_h3:MiniMaxH3Adapter",
    "QwenImagePipeline": "miles_rollout.pipelines.qwen_image:QwenImageAdapter",
    "StableDiffusion3Pipeline": "miles_rollout.pipelines.sd3:SD3Adapter",
}
"""Pipeline class name -> where its adapter lives; imported when it is asked for."""


_CONDITIONED = "its condition frames are stepped with the generated ones, and nothing masks them"
UNSUPPORTED = {
    "LTX2ConditionPipeline": _CONDITIONED,
    "LTX2DFRPipeline": _CONDITIONED,
    "LTX2DFRTemporalRefinePipeline": _CONDITIONED,
    "LTX2HDRPipeline": _CONDITIONED,
    "LTX2ImageToVideoPipeline": _CONDITIONED,
    "LTX2InContextPipeline": _CONDITIONED,
    "LTX2ModularPipeline": _CONDITIONED,
    "LTX25ModularPipeline": _CONDITIONED,
}
"""Pipeline class name -> why a rollout of it would score what it must not."""


def adapter_for(pipe: Any) -> PipelineAdapter:
    """The adapter of a pipeline's class or of the nearest base class that has one.

    Raises ``RolloutParamsError`` for a class that is known not to work.
    """
    for cls in type(pipe).__mro__:
        if cls.__name__ in UNSUPPORTED:
            raise RolloutParamsError(
                f"rollout: {cls.__name__} cannot be rolled out: {UNSUPPORTED[cls.__name__]}; got "
                "no adapter; use a pipeline without conditions, or pass adapter="
            )
        if cls.__name__ in ADAPTERS:
            module, _, name = ADAPTERS[cls.__name__].partition(":")
            return getattr(importlib.import_module(module), name)()
    return GenericAdapter()


__all__ = ["ADAPTERS", "UNSUPPORTED", "GenericAdapter", "PipelineAdapter", "adapter_for"]
