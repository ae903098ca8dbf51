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
        self._reductions = reductions
        self._terms: dict[str, list[Tensor]] = {}
        self._steps: dict[int, list[Tensor]] = {}
        self.loss = 0.0

    def add(self, step: int, terms: LossTerms, gap: Tensor) -> None:
        """The terms of one step of one micro-batch, and |new - old| of its log-probs."""
        for name, values in terms.metrics.items():
            self._terms.setdefault(name, []).append(values)
        self._steps.setdefault(step, []).append(gap)

    @property
    def ratios(self) -> Tensor:
        """Every ratio of the update."""
        return torch.cat(self._terms["ratio_mean"])

    def reduce(self) -> dict[str, float]:
        """One number a metric."""
        reduced = {}
        for name, parts in self._terms.items():
            values = torch.cat(parts)
            largest = self._reductions[name] == "max"
            reduced[name] = (values.max() if largest else values.mean()).item()
        return reduced

    def step_gaps(self) -> dict[str, float]:
        """The largest log-prob gap of each step."""
        return {
            f"step_{s}": torch.cat(gaps).max().item() for s, gaps in sorted(self._steps.items())
        }


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
                terms, gap = _terms(engine, policy, algorithm, chunk, step, rows)
                weights = chunk.weights if rows is None else chunk.weights[rows]
                loss = (terms.loss * weights.to(terms.loss)).sum() / max(count, 1)
                _check_loss(terms.loss, chunk, step, rows)
                loss.backward()
                metrics.loss += loss.item()
                metrics.add(step, terms, gap)
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
) -> tuple[LossTerms, Tensor]:
    trajectory = chunk.batch.trajectory
    old = trajectory.log_probs[:, step]
    advantages = chunk.advantages
    if rows is not None:
        old, advantages = old[rows], advantages[rows]
    replay = engine.replay(trajectory, step, rows)
    reference: Replay | None = None
    if algorithm.needs_reference:
        with torch.no_grad(), policy.reference():
            reference = engine.replay(trajectory, step, rows)
    old = old.to(replay.log_prob.device)
    terms = algorithm.terms(replay, old, advantages.to(old.device), reference)
    return terms, (replay.log_prob.detach() - old).abs()


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
