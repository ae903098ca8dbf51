"""What a run will do and cost, before it does: ``--dry-run``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from miles_rollout.families import find_adapter
from trainers.algorithms import build_algorithm
from trainers.algorithms.base import Needs
from trainers.build import Inputs
from trainers.config import TrainConfig
from trainers.config_loader import to_yaml
from trainers.denoiser_samples import DenoiserSamples, denoiser_samples
from trainers.lora import LoraConfig
from trainers.model_sizes import ModelSizes, measure

_ADAM_BYTES = 16
"""A float32 weight, its gradient and two moments."""

_STATE_BYTES = 4
"""Of an element in float32, the largest."""


def describe(config: TrainConfig, inputs: Inputs) -> str:
    """The resolved config, batch arithmetic, denoiser samples and memory of an iteration."""
    rollout, optim = config.rollout, config.optim
    sizes = measure(config)
    guided = rollout.negative_prompt is not None
    branches = sizes.branches if sizes is not None else 2 if guided else 1
    adapter = find_adapter(config.model.pipeline)
    points = rollout.num_inference_steps
    evaluations = points if adapter is None else adapter.num_steps(points)
    steps = rollout.window.choose(0, evaluations, config.seed)
    evaluated = config.eval.num_prompts or len(inputs.eval_prompts)
    needs = build_algorithm(config.algorithm).needs
    trained = needs.fraction.choose(steps)
    counts = denoiser_samples(config, evaluations=evaluations, branches=branches)
    lines = [
        to_yaml(config).rstrip(),
        "",
        "batch",
        f"  {rollout.num_prompts} prompts x {rollout.group_size} samples = {rollout.num_samples} "
        f"samples an iteration, in {rollout.num_chunks} chunks of {rollout.rows} rows",
        f"  {optim.updates_per_iteration} updates of "
        f"{_share(counts.trained_samples, optim.updates_per_iteration, needs)} samples x {len(trained)} trained "
        f"steps {_told_steps(steps, trained, needs.fraction.order)} (window of iteration 0)",
        f"  backward of {optim.micro_batch_size or rollout.rows} rows at a time",
        f"  {inputs.train.told} to train on; {inputs.held_out.told} held out",
        f"  evaluation of {evaluated} held-out prompts x {config.eval.samples_per_prompt} samples",
        "denoiser forwards an iteration (samples)",
        _rollout_forwards(config, counts, branches),
        f"  train {counts.train} = {counts.trained_samples} x {counts.trained_steps} steps x "
        f"{branches}, with backward",
        *(
            f"  {other} {count}, without backward: the same samples and steps"
            for other, count in counts.beside.items()
        ),
        "memory",
        *_memory(config, sizes, needs, len(steps), counts.steps),
    ]
    if rollout.share_prefix and sizes is not None and sizes.latents is not None:
        answers = rollout.num_prompts * counts.prefix_steps * branches * sum(sizes.latents.values())
        lines.append(
            f"  shared prefix: answers of at most {_size(answers * _STATE_BYTES)} until the last "
            "chunk of their prompts"
        )
    return "\n".join(lines)


def _share(samples: int, updates: int, needs: Needs) -> str:
    """Samples an update; chosen ones are wherever they were sampled."""
    about = "about " if needs.samples_of_group and updates > 1 else ""
    return f"{about}{samples // updates}"


def _told_steps(steps: Sequence[int], trained: Sequence[int], order: str) -> str:
    if len(trained) == len(steps):
        return f"{list(steps)}"
    return f"{list(trained)}" if order == "first" else f"drawn of {list(steps)} for each chunk"


def _rollout_forwards(config: TrainConfig, counts: DenoiserSamples, branches: int) -> str:
    rollout, prefix, steps = config.rollout, counts.prefix_steps, counts.steps
    samples = rollout.num_samples
    guidance = " (guidance)" if branches > 1 else ""
    if not rollout.share_prefix:
        return f"  rollout {counts.rollout} = {samples} x {steps} steps x {branches}{guidance}"
    return (
        f"  rollout {counts.rollout} = ({rollout.num_prompts} prompts "
        f"x {prefix} shared steps + {samples} x {steps - prefix}) x {branches}{guidance}"
    )


def _memory(
    config: TrainConfig, sizes: ModelSizes | None, needs: Needs, num_steps: int, last: int
) -> list[str]:
    if sizes is None:
        return [
            f"  not known: {config.model.pipeline!r} is no folder here, and its sizes are told by "
            "its files"
        ]
    bytes_each = 2 if config.model.dtype == "bfloat16" else 4
    lora = config.model.lora
    lines, trained = [], 0
    for name, denoiser in sizes.denoisers.items():
        weights = sum(p.numel() for p in denoiser.parameters())
        trained += weights if lora is None else _lora_parameters(denoiser, lora)
        label = "denoiser" if len(sizes.denoisers) == 1 else name
        lines.append(
            f"  {label} {weights / 1e6:.1f} M parameters, {_size(weights * bytes_each)} "
            f"({sizes.source})"
        )
    lines.append(
        f"  trained {trained / 1e6:.2f} M parameters, {_size(trained * _ADAM_BYTES)} with gradient "
        "and AdamW moments in float32"
    )
    # The base of a LoRA is the model itself, with the LoRA off.
    reference = needs.reference if lora is None or needs.reference == "start" else None
    copies = {"average": config.ema, "old policy": needs.old_policy, "reference": reference}
    lines += [
        f"  {name} {_size(trained * _STATE_BYTES)} in float32"
        for name, kept in copies.items()
        if kept is not None
    ]
    return [*lines, _latents(config, sizes, needs, num_steps, last), *_videos(config)]


def _latents(
    config: TrainConfig, sizes: ModelSizes, needs: Needs, num_steps: int, last: int
) -> str:
    rest = "activations and the text encoder come on top"
    if sizes.latents is None:
        return f"  kept latents: their size is not known before the model is loaded; {rest}"
    each = sum(sizes.latents.values())
    boundaries = min(num_steps * 2, last + 1) if needs.log_probs else 1
    boundaries += num_steps if needs.means else 0
    kept = config.rollout.num_samples * boundaries * each * _STATE_BYTES
    told = ", ".join(f"{count} {stream}" for stream, count in sizes.latents.items())
    return f"  kept latents of an iteration at most {_size(kept)} ({told} elements each); {rest}"


def _videos(config: TrainConfig) -> list[str]:
    """A picture is small; all videos of an iteration are held until they are scored."""
    rollout = config.rollout
    if not rollout.num_frames:
        return []
    pixels = rollout.num_frames * 3 * rollout.height * rollout.width
    size = _size(rollout.num_samples * pixels * _STATE_BYTES)
    return [f"  decoded videos of an iteration {size} of host memory, until they are scored"]


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
