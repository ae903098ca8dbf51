"""Adapters: what a pipeline alone cannot say. One small file a model family."""

from __future__ import annotations

import importlib
from typing import Any

from miles_rollout.errors import RolloutParamsError
from miles_rollout.pipelines.base import PipelineAdapter
from miles_rollout.pipelines.generic import GenericAdapter

ADAPTERS = {
    "Cosmos3DistilledModularPipeline": (
        "miles_rollout.pipelines.cosmos3_distilled:Cosmos3DistilledAdapter"
    ),
    "Cosmos3OmniModularPipeline": "miles_rollout.pipelines.cosmos3_modular:Cosmos3ModularAdapter",
    "Cosmos3OmniPipeline": "miles_rollout.pipelines.cosmos3:Cosmos3Adapter",
    "Flux2KleinPipeline": "miles_rollout.pipelines.flux_2_klein:Flux2KleinAdapter",
    "FluxPipeline": "miles_rollout.pipelines.flux:FluxAdapter",
    "HunyuanVideo15Pipeline": "miles_rollout.pipelines.hunyuan_video15:HunyuanVideo15Adapter",
    "LTX2Pipeline": "miles_rollout.pipelines.ltx2:LTX2Adapter",
    "MiniMaxH3ModularPipeline": "miles_rollout.pipelines.minimax_h3:MiniMaxH3Adapter",
    "QwenImage21Pipeline": "miles_rollout.pipelines.qwen_image_2_1:QwenImage21Adapter",
    "QwenImageEditPlusPipeline": (
        "miles_rollout.pipelines.qwen_image_edit_plus:QwenImageEditPlusAdapter"
    ),
    "QwenImagePipeline": "miles_rollout.pipelines.qwen_image:QwenImageAdapter",
    "SanaPipeline": "miles_rollout.pipelines.sana:SanaAdapter",
    "StableDiffusion3Pipeline": "miles_rollout.pipelines.sd3:SD3Adapter",
    "WanPipeline": "miles_rollout.pipelines.wan:WanAdapter",
    "ZImagePipeline": "miles_rollout.pipelines.z_image:ZImageAdapter",
}
"""Pipeline class name -> where its adapter lives; imported when it is asked for."""

_CONDITIONED = "its condition frames are stepped with the generated ones, and nothing masks them"
REFUSED = {
    "Flux2KleinKVPipeline": (
        "a later denoiser call depends on a cache of the references that the first one fills, so "
        "that no step could be replayed by itself"
    ),
    "LTX2ConditionPipeline": _CONDITIONED,
    "LTX2DFRPipeline": _CONDITIONED,
    "LTX2DFRTemporalRefinePipeline": _CONDITIONED,
    "LTX2HDRPipeline": _CONDITIONED,
    "LTX2ImageToVideoPipeline": _CONDITIONED,
    "LTX2InContextPipeline": _CONDITIONED,
    "LTX2ModularPipeline": _CONDITIONED,
    "LTX25ModularPipeline": _CONDITIONED,
}
"""Pipeline class name -> why it cannot be rolled out."""


def adapter_for(pipe: Any) -> PipelineAdapter:
    """The adapter of a pipeline's class or of the nearest base class that has one."""
    return adapter_for_class(type(pipe))


def adapter_for_class(pipe_class: type) -> PipelineAdapter:
    """The same for a class of which there is no object yet.

    Raises ``RolloutParamsError`` for one that cannot be rolled out.
    """
    for cls in pipe_class.__mro__:
        if cls.__name__ in REFUSED:
            raise RolloutParamsError(
                f"pipeline: {REFUSED[cls.__name__]}; got {cls.__name__}; set another pipeline, or pass adapter="
            )
        if cls.__name__ in ADAPTERS:
            return adapter_named(cls.__name__)
    return GenericAdapter()


def adapter_named(class_name: str) -> PipelineAdapter:
    """The adapter that `ADAPTERS` has for a pipeline class, which is not imported."""
    module, _, name = ADAPTERS[class_name].partition(":")
    return getattr(importlib.import_module(module), name)()


__all__ = [
    "ADAPTERS",
    "REFUSED",
    "GenericAdapter",
    "PipelineAdapter",
    "adapter_for",
    "adapter_for_class",
    "adapter_named",
]
