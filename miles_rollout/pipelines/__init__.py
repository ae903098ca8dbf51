"""Adapters: what a pipeline alone cannot say. One small file a model family."""

from __future__ import annotations

import importlib
from typing import Any

from miles_rollout.pipelines.base import PipelineAdapter
from miles_rollout.pipelines.generic import GenericAdapter

ADAPTERS = {
    "FluxPipeline": "miles_rollout.pipelines.flux:FluxAdapter",
    "MiniMaxH3ModularPipeline": "miles_rollout.pipelines.minimax_h3:MiniMaxH3Adapter",
    "QwenImagePipeline": "miles_rollout.pipelines.qwen_image:QwenImageAdapter",
    "StableDiffusion3Pipeline": "miles_rollout.pipelines.sd3:SD3Adapter",
}
"""Pipeline class name -> where its adapter lives; imported when it is asked for."""


def adapter_for(pipe: Any) -> PipelineAdapter:
    """The adapter of a pipeline's class or of the nearest base class that has one."""
    for cls in type(pipe).__mro__:
        if cls.__name__ in ADAPTERS:
            module, _, name = ADAPTERS[cls.__name__].partition(":")
            return getattr(importlib.import_module(module), name)()
    return GenericAdapter()


__all__ = ["ADAPTERS", "GenericAdapter", "PipelineAdapter", "adapter_for"]
