"""What a run will do and cost, before it does: ``--dry-run``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from miles_rollout.loading import TINY_PIPELINES, load_pipeline
from trainers.algorithms import build_algorithm
from trainers.build import Inputs
from trainers.config import TrainConfig
from trainers.config_loader import to_yaml
from trainers.lora import LoraConfig

_ADAM_BYTES = 16
"""A float32 weight, its gradient and two moments."""


def describe(config: TrainConfig, inputs: Inputs) -> str:
    """The resolved config, batch arithmetic, denoiser samples and memory of an iteration."""
    rollout, optim = config.rollout, config.optim
    branches = 2 if rollout.negative_prompt is not None else 1
    steps = rollout.window.choose(0, rollout.num_inference_steps, config.seed)
    evaluated = config.eval.num_prompts or len(inputs.eval_prompts)
    replays = 2 if build_algorithm(config.algorithm).needs_reference else 1
    pairs = rollout.num_samples * len(steps)
    lines = [
        to_yaml(config).rstrip(),
        "",
        "batch",
        f"  {rollout.num_prompts} prompts x {rollout.group_size} samples = {rollout.num_samples} "
        f"samples an iteration, in {rollout.num_chunks} chunks of {rollout.rows} rows",
        f"  {optim.updates_per_iteration} updates of "
        f"{rollout.num_samples // optim.updates_per_iteration} samples x {len(steps)} trained "
        f"steps {list(steps)} (window of iteration 0)",
        f"  backward of {optim.micro_batch_size or rollout.rows} rows at a time",
        f"  {len(inputs.train_prompts)} training prompts; evaluation of {evaluated} held-out "
        f"prompts x {config.eval.samples_per_prompt} samples",
        "denoiser forwards an iteration (samples)",
        f"  rollout {rollout.num_samples * rollout.num_inference_steps * branches} = "
        f"{rollout.num_samples} x {rollout.num_inference_steps} steps x {branches}"
        f"{' (guidance)' if branches == 2 else ''}",
        f"  train {pairs * branches * replays} = {rollout.num_samples} x {len(steps)} steps x "
        f"{branches}{' x 2 (reference for the KL)' if replays == 2 else ''}, with backward",
        "memory",
        *_memory(config, len(steps)),
    ]
    return "\n".join(lines)


def _memory(config: TrainConfig, num_steps: int) -> list[str]:
    denoiser, latent_elements, note = _sizes(config)
    weights = sum(p.numel() for p in denoiser.parameters())
    bytes_each = 2 if config.model.dtype == "bfloat16" else 4
    lora = config.model.lora
    trained = weights if lora is None else _lora_parameters(denoiser, lora)
    boundaries = min(num_steps * 2, config.rollout.num_inference_steps + 1)
    state_bytes = 4 if config.rollout.latent_dtype == "float32" else bytes_each
    kept = config.rollout.num_samples * boundaries * latent_elements * state_bytes
    return [
        f"  denoiser {weights / 1e6:.1f} M parameters, {_size(weights * bytes_each)} ({note})",
        f"  trained {trained / 1e6:.2f} M parameters, {_size(trained * _ADAM_BYTES)} with gradient "
        "and AdamW moments in float32",
        f"  kept latents of an iteration at most {_size(kept)} ({latent_elements} elements each); "
        "activations and the text encoder come on top",
    ]


def _sizes(config: TrainConfig) -> tuple[nn.Module, int, str]:
    """The denoiser (perhaps without storage), latent elements a sample, and where they are from."""
    name = config.model.pipeline
    height, width = config.rollout.height, config.rollout.width
    if name in TINY_PIPELINES:
        pipe = load_pipeline(name)
        denoiser, scale, note = pipe.transformer, pipe.vae_scale_factor * 2, name
    else:
        denoiser, note = _meta_qwen_image(Path(name).expanduser())
        scale = 16
    return denoiser, (height // scale) * (width // scale) * denoiser.config.in_channels, note


def _meta_qwen_image(folder: Path) -> tuple[Any, str]:
    """Qwen-Image's denoiser without storage: from a folder's config, else the class's own."""
    from diffusers import QwenImageTransformer2DModel

    path = folder / "transformer" / "config.json"
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        if path.is_file():
            values = QwenImageTransformer2DModel.load_config(path)
            return QwenImageTransformer2DModel.from_config(values), str(path)
        return QwenImageTransformer2DModel(), "sizes of the released Qwen-Image"


def _lora_parameters(module: nn.Module, lora: LoraConfig) -> int:
    return sum(
        lora.rank * (layer.in_features + layer.out_features)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and any(f".{name}".endswith(f".{t}") for t in lora.targets)
    )


def _size(num_bytes: float | int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")
