"""Which model family a pipeline's name stands for, told before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers

from miles_rollout.loading import TINY_PIPELINES
from miles_rollout.pipelines import ADAPTERS, PipelineAdapter, adapter_for_class, adapter_named

RELEASED: dict[str, str] = {
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": "SanaPipeline",
    "Lightricks/LTX-2": "LTX2Pipeline",
    "MiniMaxAI/MiniMax-H3": "MiniMaxH3ModularPipeline",
    "Qwen/Qwen-Image": "QwenImagePipeline",
    "Qwen/Qwen-Image-2.1": "QwenImage21Pipeline",
    "Qwen/Qwen-Image-Edit-2509": "QwenImageEditPlusPipeline",
    "Tongyi-MAI/Z-Image-Turbo": "ZImagePipeline",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "WanPipeline",
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": "WanPipeline",
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": "WanPipeline",
    "black-forest-labs/FLUX.1-dev": "FluxPipeline",
    "black-forest-labs/FLUX.2-klein-base-9B": "Flux2KleinPipeline",
    "diffusers/LTX-2.3-Diffusers": "LTX2Pipeline",
    "hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v": "HunyuanVideo15Pipeline",
    "nvidia/Cosmos3-Nano": "Cosmos3OmniPipeline",
    "stabilityai/stable-diffusion-3-medium-diffusers": "StableDiffusion3Pipeline",
    "stabilityai/stable-diffusion-3.5-large": "StableDiffusion3Pipeline",
    "stabilityai/stable-diffusion-3.5-medium": "StableDiffusion3Pipeline",
}
"""Hub name -> pipeline class. A hub name that is not here is known once it is loaded."""


def class_name_of(name: str) -> str | None:
    """The pipeline class behind a name; None where only loading can tell.

    A tiny pipeline goes by its function: ``tiny_flux`` belongs to ``pipelines/flux.py``.
    """
    if name in TINY_PIPELINES:
        module = TINY_PIPELINES[name][0].removeprefix("tiny_")
        ours = [key for key, path in ADAPTERS.items() if f".{module}:" in path]
        return ours[0] if len(ours) == 1 else None
    for index in ("model_index.json", "modular_model_index.json"):
        path = Path(name).expanduser() / index
        if path.is_file():
            found = json.loads(path.read_text()).get("_class_name")
            return found if isinstance(found, str) else None
    return RELEASED.get(name)


def find_adapter(name: str) -> PipelineAdapter | None:
    """The adapter of a pipeline by its name, without the pipeline; None as in `class_name_of`."""
    class_name = class_name_of(name)
    if class_name in ADAPTERS:
        return adapter_named(class_name)
    found = None if class_name is None else getattr(diffusers, class_name, None)
    return None if found is None else adapter_for_class(found)
