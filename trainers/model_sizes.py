"""How large a model and its latents are, without reading a weight where that can be."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import diffusers
import torch
from diffusers import ModularPipeline
from torch import nn

from miles_rollout import RolloutEngine, RolloutTrajectory
from miles_rollout.call_signature import call_defaults
from miles_rollout.families import class_name_of, find_adapter
from miles_rollout.loading import TINY_PIPELINES, load_pipeline
from miles_rollout.pipelines import PipelineAdapter, adapter_for, adapter_for_class
from trainers.config import TrainConfig
from trainers.evaluation import DETERMINISTIC

_RELEASED_SIZES = (
    "FluxPipeline",
    "LTX2Pipeline",
    "MiniMaxH3ModularPipeline",
    "QwenImagePipeline",
)
"""Families whose classes have the released model's sizes as their defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What is known of a model before a run."""

    denoisers: Mapping[str, nn.Module]
    """Those that are trained, perhaps without storage."""
    latents: Mapping[str, int] | None
    """Stream -> latent elements of one sample; None: not known."""
    branches: int
    """Samples that pass through the denoiser for one step of one sample: more than 1 with guidance."""
    source: str
    """Where this is from."""


def measure(config: TrainConfig) -> ModelSizes | None:
    """The sizes of the configured model; None where only its files tell, which are not here."""
    name = config.model.pipeline
    if name in TINY_PIPELINES:
        return _of_tiny(config)
    class_name = class_name_of(name)
    pipe_class = getattr(diffusers, class_name or "", None)
    if class_name is None or pipe_class is None:
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir() and class_name not in _RELEASED_SIZES:
        return None
    adapter = adapter_for_class(pipe_class)
    modules = _empty_modules(pipe_class, folder if folder.is_dir() else None)
    if config.model.workflow is not None and issubclass(pipe_class, ModularPipeline):
        blocks = pipe_class().blocks.get_workflow(config.model.workflow)
        used = {spec.name for spec in blocks.expected_components}
        modules = {component: module for component, module in modules.items() if component in used}
    request = {**call_defaults(pipe_class), **config.rollout.arguments()}
    return ModelSizes(
        denoisers=_trained(config, modules, adapter),
        latents=adapter.latent_elements(modules, request),
        branches=_branches(config, adapter),
        source=str(folder) if folder.is_dir() else f"sizes of the released {folder.name}",
    )


def _of_tiny(config: TrainConfig) -> ModelSizes:
    """It is here, so its latents are measured, by one sample of two steps."""
    name = config.model.pipeline
    pipe = load_pipeline(name)
    adapter = adapter_for(pipe)
    trajectory = _one_sample(pipe, config, {})
    return ModelSizes(
        denoisers=_trained(config, pipe.components, adapter),
        latents={stream: int(held.num_elements[0]) for stream, held in trajectory.streams.items()},
        branches=_branches_of(adapter, trajectory.guidance),
        source=name,
    )


def _trained(
    config: TrainConfig, modules: Mapping[str, Any], adapter: PipelineAdapter
) -> dict[str, nn.Module]:
    wanted = config.model.denoisers or adapter.denoisers
    return {n: m for n in wanted if isinstance(m := modules.get(n), nn.Module)}


def _branches(config: TrainConfig, adapter: PipelineAdapter) -> int:
    """By the family's tiny pipeline, with the same guidance: the engine turns off what is not asked."""
    rollout = config.rollout
    name = next((n for n in TINY_PIPELINES if type(find_adapter(n)) is type(adapter)), None)
    if name is None:
        return 1 if rollout.negative_prompt is None else 2
    pipe = load_pipeline(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that the tiny one is too small for
        trajectory = _one_sample(pipe, config, adapter.small_request(pipe))
    return _branches_of(adapter, trajectory.guidance)


def _one_sample(pipe: Any, config: TrainConfig, instead: Mapping[str, Any]) -> RolloutTrajectory:
    """Two steps of one sample as configured, but for the arguments ``instead``."""
    engine = RolloutEngine(pipe)
    (batch,) = engine.generate(
        ["a prompt"],
        1,
        DETERMINISTIC,
        seed=0,
        decode=False,
        negative_prompt=config.rollout.negative_prompt,
        inputs=[engine.adapter.sample_inputs(pipe)],
        **config.rollout.arguments(2) | dict(instead),
    )
    return batch.trajectory


def _branches_of(adapter: PipelineAdapter, guidance: Mapping[str, float | bool]) -> int:
    calls = adapter.calls_per_step(guidance) or 1
    return calls * max(adapter.blocks(guidance).values(), default=1)


def _empty_modules(pipe_class: Any, folder: Path | None) -> dict[str, nn.Module]:
    """Denoisers and VAEs of diffusers on the meta device: from a folder's files, else as declared."""
    modules: dict[str, nn.Module] = {}
    for name, kind in _component_classes(pipe_class, folder).items():
        if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
            continue
        path = None if folder is None else folder / name / "config.json"
        if path is not None and not path.is_file():
            continue
        with (
            torch.device("meta"),
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", FutureWarning)  # diffusers' use of old weight_norm
            loader: Any = kind
            built = loader() if path is None else loader.from_config(loader.load_config(path))
        modules[name] = built
    return modules


def _component_classes(pipe_class: Any, folder: Path | None) -> dict[str, Any]:
    if folder is None:
        if issubclass(pipe_class, ModularPipeline):
            return {n: spec.type_hint for n, spec in pipe_class()._component_specs.items()}
        hints = get_type_hints(pipe_class.__init__)
        return {n: next(iter(get_args(hint)), hint) for n, hint in hints.items()}
    indices = [folder / f"{kind}model_index.json" for kind in ("", "modular_")]
    tree = json.loads(next(path for path in indices if path.is_file()).read_text())
    entries = {n: entry for n, entry in tree.items() if isinstance(entry, list)}
    return {n: getattr(diffusers, entry[1] or "", None) for n, entry in entries.items()}
