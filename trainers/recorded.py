"""Rollouts on disk: record an iteration's samples and scores, and train on them again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from miles_rollout import RolloutBatch, RolloutTrajectory
from miles_rollout.errors import MilesRolloutError
from trainers.algorithms.base import Needs
from trainers.rewards.scoring import Scores


class RecordedRolloutError(MilesRolloutError, RuntimeError):
    """There is no recorded rollout where one was to be read."""


def save_rollout(
    root: Path, iteration: int, batches: Sequence[RolloutBatch], scores: Scores
) -> None:
    """Write ``root/iteration_000003/{chunk_000/, scores.safetensors, rollout.json}``."""
    folder = _folder(root, iteration)
    shutil.rmtree(folder, ignore_errors=True)
    chunks = []
    for i, batch in enumerate(batches):
        batch.trajectory.save(folder / f"chunk_{i:03d}")
        save_file(dict(batch.latents), folder / f"chunk_{i:03d}" / "latents.safetensors")
        chunks.append(
            {
                "prompts": batch.prompts,
                "group_ids": batch.group_ids.tolist(),
                "sample_ids": batch.sample_ids.tolist(),
                "metadata": [dict(m) for m in batch.metadata],
            }
        )
    tensors = {f"component:{name}": values for name, values in scores.components.items()}
    tensors |= {"total": scores.total, "masked": scores.masked}
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "scores.safetensors")
    document = {
        "chunks": chunks,
        "errors": list(scores.errors),
        "weights": dict(scores.weights),
        "holds": _holds(batches[0].trajectory),
    }
    (folder / "rollout.json").write_text(json.dumps(document, indent=1))


def _holds(trajectory: RolloutTrajectory) -> dict[str, bool]:
    """What an algorithm could be trained on."""
    streams = trajectory.streams.values()
    return {
        "log_probs": bool(trajectory.replayable_steps),
        "means": any(stream.means for stream in streams),
        "final_latents": all(s.num_steps in s.latent_step_indices.tolist() for s in streams),
    }


def check_needs(root: Path, iterations: Iterable[int], needs: Needs) -> None:
    """Raise ``RecordedRolloutError`` where ``root`` was recorded for an algorithm of another kind."""
    wanted = {
        "log_probs": needs.log_probs,
        "means": needs.means,
        "final_latents": not needs.log_probs,
    }
    for iteration in iterations:
        held = json.loads((_folder(root, iteration) / "rollout.json").read_text())["holds"]
        missing = [name for name, is_wanted in wanted.items() if is_wanted and not held[name]]
        if missing:
            raise RecordedRolloutError(
                f"debug.load_rollouts: iteration {iteration} was recorded for another algorithm, "
                f"without {', '.join(missing)}; got {str(root)!r}; set the algorithm of that run, or "
                "record anew"
            )


def check_rollouts(root: Path, iterations: Iterable[int]) -> None:
    """Raise ``RecordedRolloutError`` unless ``root`` holds all of these."""
    missing = [i for i in iterations if not (_folder(root, i) / "rollout.json").is_file()]
    if missing:
        found = sorted(path.parent.name for path in root.glob("iteration_*/rollout.json"))
        raise RecordedRolloutError(
            f"debug.load_rollouts: no recorded rollout of iteration {missing[0]}; got "
            f"{len(found)} in {str(root)!r}; set iterations to {len(found)} or record more with "
            "debug.save_rollouts"
        )


def load_rollout(root: Path, iteration: int) -> tuple[list[RolloutBatch], Scores]:
    """Read what `save_rollout` wrote. Raises ``RecordedRolloutError`` for an iteration not there."""
    check_rollouts(root, [iteration])
    folder = _folder(root, iteration)
    document = json.loads((folder / "rollout.json").read_text())
    batches = []
    for i, chunk in enumerate(document["chunks"]):
        part = folder / f"chunk_{i:03d}"
        batches.append(
            RolloutBatch(
                trajectory=RolloutTrajectory.load(part),
                latents=load_file(part / "latents.safetensors"),
                prompts=chunk["prompts"],
                group_ids=torch.tensor(chunk["group_ids"]),
                sample_ids=torch.tensor(chunk["sample_ids"]),
                metadata=chunk["metadata"],
            )
        )
    tensors = load_file(folder / "scores.safetensors")
    components = {
        name.removeprefix("component:"): values
        for name, values in tensors.items()
        if name.startswith("component:")
    }
    scores = Scores(
        total=tensors["total"],
        components=components,
        masked=tensors["masked"],
        errors=tuple(document["errors"]),
        weights=document["weights"],
    )
    return batches, scores


def _folder(root: Path, iteration: int) -> Path:
    return root / f"iteration_{iteration:06d}"
