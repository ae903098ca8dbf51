"""Two iterations of a shipped recipe, and every number of them under a name, in causal order.

All comes from what a run shows of itself: recorded rollouts, the tracker, metrics.jsonl, and torch's
hook on optimizers. Floats are exact; tensors that are too large to keep are sha256 of their bytes.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainers.build import build_trainer, read_inputs
from trainers.config import TrainConfig
from trainers.config_loader import load
from trainers.recorded import load_rollout
from trainers.tracking import Tracker

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "iterations=2",
    "model.device=cpu",
    "optim.updates_per_iteration=2",
    "eval={every: 0, num_prompts: 1, samples_per_prompt: 1, num_inference_steps: 2}",
    "tracking={wandb: disabled, media_every: 0, num_media: 1}",
    "debug.save_rollouts=true",
)
OVERRIDES: dict[str, tuple[str, ...]] = {
    "qwen_image": (
        *(f"data.{part}={ROOT}/configs/prompts/shapes_{part}.txt" for part in ("train", "eval")),
        "rollout.num_prompts=2",
        "rollout.group_size=4",
        "rollout.chunk_size=4",
    ),
    "minimax_h3": (
        *(f"data.{part}={ROOT}/configs/prompts/films_{part}.txt" for part in ("train", "eval")),
        "rollout.num_prompts=2",
        "rollout.group_size=2",
    ),
}
"""Overrides of ``configs/<recipe>/tiny_cpu.yaml``: fewer samples, nothing else."""

Entries = dict[str, Any]
"""Name -> a float, a list of floats, or the sha256 of a tensor (names end in ``sha256``)."""


class RecordingTracker(Tracker):
    """Keeps the histograms, which no file holds."""

    histograms: list[dict[str, list[float]]]

    def log(self, iteration: int, metrics: Any, **kwargs: Any) -> None:
        given = (kwargs.get("histograms") or {}).items()
        self.__dict__.setdefault("histograms", []).append({k: t.tolist() for k, t in given})
        super().log(iteration, metrics, **kwargs)


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """The settings of the process that numbers depend on, whatever it ran before."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    strict = torch.are_deterministic_algorithms_enabled()
    dtype, flushed = torch.get_default_dtype(), torch.tensor(1e-40) == 0
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.set_flush_denormal(False)
    try:
        with torch.autocast("cpu", enabled=False), torch.enable_grad():
            yield
    finally:
        torch.set_flush_denormal(bool(flushed))
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(strict)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)


def observe(recipe: str, folder: Path, *overrides: str) -> Entries:
    """Run the recipe in the empty ``folder``; every number of it, the earlier first."""
    config = load(
        TrainConfig,
        [ROOT / "configs" / recipe / "tiny_cpu.yaml"],
        [*SMALL, *OVERRIDES[recipe], f"output_dir={folder}", *overrides],
    )
    updates: list[Entries] = []

    def after_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in weights if p.grad is not None]
        updates.append(
            {
                "clipped_gradient/norm": _norm(gradients),
                "clipped_gradient/sha256": sha256(gradients),
                "weights/norm": _norm(weights),
                "weights/sha256": sha256(weights),
            }
        )

    with pinned():
        trainer = build_trainer(config, read_inputs(config))
        hook = register_optimizer_step_post_hook(after_update)
        try:
            with RecordingTracker(folder, config.tracking, {}) as tracker:
                trainer.run(tracker)
        finally:
            hook.remove()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: Entries = {}
    each = config.optim.updates_per_iteration
    for i in range(config.iterations):
        told = _rollout(folder / "rollouts", i)
        told["advantages"] = tracker.histograms[i]["train/advantages"]
        for u in range(each):
            told[f"update_{u}/ratios"] = tracker.histograms[i][f"train/ratios/update_{u}"]
            for name in ("loss", "grad_norm"):
                told[f"update_{u}/{name}"] = lines[i][f"train/{name}/update_{u}"]
            told |= {f"update_{u}/{name}": value for name, value in updates[i * each + u].items()}
        found |= {f"iteration_{i}/{name}": value for name, value in told.items()}
    return found


def _rollout(folder: Path, iteration: int) -> Entries:
    """States and log-probs by stream and step, final latents, and what they were worth."""
    batches, scores = load_rollout(folder, iteration)
    found: Entries = {}
    trajectories = [batch.trajectory for batch in batches]
    for name, stream in trajectories[0].streams.items():
        streams = [trajectory.streams[name] for trajectory in trajectories]
        for place, boundary in enumerate(stream.latent_step_indices.tolist()):
            states = [s.latents[:, place] for s in streams]
            found[f"{name}/boundary_{boundary}/norm"] = _norm(states)
            found[f"{name}/boundary_{boundary}/sha256"] = sha256(states)
            if boundary in stream.sde_step_indices:
                log_probs = torch.cat([s.log_probs[:, boundary] for s in streams])
                found[f"{name}/step_{boundary}/log_probs"] = log_probs.tolist()
        final = [batch.latents[name] for batch in batches]
        found[f"{name}/final/norm"] = _norm(final)
        found[f"{name}/final/sha256"] = sha256(final)
    found |= {f"rewards/{name}": t.tolist() for name, t in scores.components.items()}
    return found | {"rewards/total": scores.total.tolist()}


def sha256(tensors: Sequence[Tensor]) -> str:
    """Of the bytes of all, in order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _norm(tensors: Sequence[Tensor]) -> float:
    return sum(t.detach().double().square().sum().item() for t in tensors) ** 0.5
