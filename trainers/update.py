"""One optimizer step on part of an iteration's samples: replay, loss, backward, accumulate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from miles_rollout import Replay, RolloutBatch, RolloutEngine
from miles_rollout.errors import MilesRolloutError
from trainers.algorithm import Algorithm, LossTerms
from trainers.losses import STREAM_REDUCTIONS, ratio_metrics
from trainers.policy import Policy


class TrainingError(MilesRolloutError, RuntimeError):
    """Numbers that must not be trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainChunk:
    """Rows that were denoised together, with what they earned."""

    batch: RolloutBatch
    advantages: Tensor
    """[B]; 0 where masked."""
    weights: Tensor
    """[B]: 1, or 0 for a masked sample, which still passes through the denoiser."""


class UpdateMetrics:
    """Collects the per-row terms of an update; reduced once, so that ragged parts weigh right."""

    def __init__(self, reductions: Mapping[str, str]) -> None:
        self._reductions = {**STREAM_REDUCTIONS, **reductions}
        self._terms: dict[str, list[Tensor]] = {}
        self._gaps: dict[str, list[Tensor]] = {}
        self.loss = 0.0

    def add(self, terms: Mapping[str, Tensor], gaps: Mapping[str, Tensor]) -> None:
        """What one step of one micro-batch gave: metrics, and |new - old| of its log-probs."""
        for name, values in terms.items():
            self._terms.setdefault(name, []).append(values)
        for name, gap in gaps.items():
            self._gaps.setdefault(name, []).append(gap)

    @property
    def ratios(self) -> Tensor | None:
        """Every ratio of the update, if the algorithm has one."""
        parts = self._terms.get("ratio_mean")
        return None if parts is None else torch.cat(parts)

    def reduce(self) -> dict[str, float]:
        """One number a metric."""
        reduced = {}
        for name, parts in self._terms.items():
            values = torch.cat(parts)
            largest = self._reductions[name.partition("/")[0]] == "max"
            reduced[name] = (values.max() if largest else values.mean()).item()
        return reduced

    def step_gaps(self) -> dict[str, float]:
        """The largest log-prob gap of each step, joint and of each stream."""
        return {name: torch.cat(gaps).max().item() for name, gaps in self._gaps.items()}


def run_update(
    engine: RolloutEngine,
    policy: Policy,
    algorithm: Algorithm,
    optimizer: Optimizer,
    chunks: Sequence[TrainChunk],
    *,
    micro_batch_size: int | None,
    max_grad_norm: float,
) -> tuple[UpdateMetrics, float]:
    """Accumulate the mean loss over all live (sample, step) pairs, then step once.

    Returns the metrics and the gradient norm before clipping. Raises ``TrainingError`` for a loss
    or gradient that is not finite, with the weights as they were.
    """
    metrics = UpdateMetrics(algorithm.reductions)
    optimizer.zero_grad(set_to_none=True)
    steps = {id(chunk): chunk.batch.trajectory.replayable_steps for chunk in chunks}
    count = sum(chunk.weights.sum().item() * len(steps[id(chunk)]) for chunk in chunks)
    for chunk in chunks:
        for rows in _micro_batches(len(chunk.weights), micro_batch_size):
            for step in steps[id(chunk)]:
                terms, told, gaps = _terms(engine, policy, algorithm, chunk, step, rows)
                weights = chunk.weights if rows is None else chunk.weights[rows]
                loss = (terms.loss * weights.to(terms.loss)).sum() / max(count, 1)
                _check_loss(terms.loss, chunk, step, rows)
                loss.backward()
                metrics.loss += loss.item()
                metrics.add({**terms.metrics, **told}, gaps)
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), max_grad_norm).item()
    if not torch.tensor(grad_norm).isfinite():
        raise TrainingError(
            f"train: the gradient is not finite; got norm {grad_norm}; lower optim.lr, or leave "
            "the last steps out of rollout.window"
        )
    optimizer.step()
    return metrics, grad_norm


def _terms(
    engine: RolloutEngine,
    policy: Policy,
    algorithm: Algorithm,
    chunk: TrainChunk,
    step: int,
    rows: list[int] | None,
) -> tuple[LossTerms, dict[str, Tensor], dict[str, Tensor]]:
    """The loss of a step, the metrics of its streams, and the gaps of its log-probs."""
    trajectory = chunk.batch.trajectory
    old_streams = {name: s.log_probs[:, step] for name, s in trajectory.streams.items()}
    old = trajectory.joint(old_streams, step)
    advantages = chunk.advantages
    if rows is not None:
        old, advantages = old[rows], advantages[rows]
        old_streams = {name: values[rows] for name, values in old_streams.items()}
    replay = engine.replay(trajectory, step, rows)
    reference: Replay | None = None
    if algorithm.needs_reference:
        with torch.no_grad(), policy.reference():
            reference = engine.replay(trajectory, step, rows)
    old = old.to(replay.log_prob.device)
    terms = algorithm.terms(replay, old, advantages.to(old.device), reference)
    told: dict[str, Tensor] = {}
    gaps = {f"step_{step}": (replay.log_prob.detach() - old).abs()}
    if len(trajectory.streams) > 1:
        for name, stream in replay.streams.items():
            log_ratio = stream.log_prob.detach() - old_streams[name].to(old.device)
            told |= {f"{key}/{name}": value for key, value in ratio_metrics(log_ratio).items()}
            gaps[f"{name}/step_{step}"] = log_ratio.abs()
    return terms, told, gaps


def _micro_batches(rows: int, size: int | None) -> Iterator[list[int] | None]:
    """None: the rollout's batch as it is, whose replay is bitwise."""
    if size is None or size >= rows:
        yield None
        return
    for start in range(0, rows, size):
        yield list(range(start, min(start + size, rows)))


def _check_loss(loss: Tensor, chunk: TrainChunk, step: int, rows: list[int] | None) -> None:
    bad = (~loss.detach().isfinite()).nonzero().flatten().tolist()
    if bad:
        row = bad[0] if rows is None else rows[bad[0]]
        batch = chunk.batch
        raise TrainingError(
            f"train: the loss of step {step} is not finite for prompt "
            f"{batch.group_ids[row].item()} ({batch.prompts[row][:60]!r}) sample "
            f"{batch.sample_ids[row].item()}; got {loss[bad[0]].item()}; look at its "
            "log-prob, and lower optim.lr or noise_level"
        )
