"""One optimizer step on part of an iteration's samples: replay, loss, backward, accumulate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from miles_rollout import RolloutBatch, RolloutEngine
from miles_rollout.errors import MilesRolloutError
from miles_rollout.noise import derive_seed
from trainers.algorithms.base import Algorithm, LossTerms
from trainers.losses import STREAM_REDUCTIONS, ratio_metrics
from trainers.policy import Policy
from trainers.trained_step import TrainedStep


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
    rows: Sequence[int] | None = None
    """Those that are replayed at all (None: all, as they were sampled, so that replay is bitwise). None
    of them: the chunk is left out."""
    key: tuple[int, ...] = field(default=(0, 0))
    """(seed, iteration): with a row's prompt and sample it keys what is drawn for training."""

    @property
    def seeds(self) -> list[int]:
        """One a row."""
        ids = zip(self.batch.group_ids.tolist(), self.batch.sample_ids.tolist(), strict=True)
        return [derive_seed("training", *self.key, prompt, sample) for prompt, sample in ids]

    def steps(self, algorithm: Algorithm) -> list[int]:
        """The steps that are trained: all that were recorded, or the part that is asked for."""
        needs, trajectory = algorithm.needs, self.batch.trajectory
        recorded = trajectory.replayable_steps if needs.log_probs else trajectory.call_steps
        first = (int(self.batch.group_ids[0]), int(self.batch.sample_ids[0]))
        return needs.fraction.choose(recorded, *self.key, *first)


class UpdateMetrics:
    """Collects the per-row terms of an update; reduced once, so that ragged parts weigh right."""

    def __init__(self, reductions: Mapping[str, str]) -> None:
        self._reductions = {**STREAM_REDUCTIONS, **reductions}
        self._terms: dict[str, list[Tensor]] = {}
        self._gaps: dict[str, list[Tensor]] = {}
        self.loss = 0.0

    def add(self, terms: Mapping[str, Tensor], gaps: Mapping[str, Tensor]) -> None:
        """What one step of the live rows gave: metrics, and |new - old| of their log-probs.

        Raises ``TrainingError`` for a metric that the algorithm's ``reductions`` do not name.
        """
        unknown = sorted({n.partition("/")[0] for n in terms} - self._reductions.keys())
        if unknown:
            raise TrainingError(
                f"train: nothing says how the rows of {', '.join(unknown)} become one number; got "
                f"reductions of {', '.join(sorted(self._reductions))}; add it to the algorithm's "
                "reductions"
            )
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

    Without such a pair there is no step: AdamW would move the weights by its momentum. Returns the metrics and the gradient norm before clipping. Raises ``TrainingError`` for a loss
    or gradient that is not finite, with the weights as they were.
    """
    metrics = UpdateMetrics(algorithm.reductions)
    optimizer.zero_grad(set_to_none=True)
    steps = [chunk.steps(algorithm) for chunk in chunks]
    count = sum(c.weights.sum().item() * len(s) for c, s in zip(chunks, steps, strict=True))
    for chunk, trained in zip(chunks, steps, strict=True):
        for rows in _micro_batches(chunk, micro_batch_size):
            for step in trained:
                terms, told, gaps = _terms(engine, policy, algorithm, chunk, step, rows)
                weights = chunk.weights if rows is None else chunk.weights[rows]
                loss = (terms.loss * weights.to(terms.loss)).sum() / max(count, 1)
                _check_loss(terms.loss, chunk, step, rows)
                loss.backward()
                metrics.loss += loss.item()
                if weights.any():
                    live = (weights > 0).to(terms.loss.device)
                    metrics.add(
                        {
                            name: values[live]
                            for name, values in (dict(terms.metrics) | told).items()
                        },
                        {name: gap[live] for name, gap in gaps.items()},
                    )
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), max_grad_norm).item()
    if not torch.tensor(grad_norm).isfinite():
        raise TrainingError(
            f"train: the gradient is not finite; got norm {grad_norm}; lower optim.lr, or leave "
            "the last steps out of rollout.window"
        )
    if count:
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
    trained = TrainedStep(
        engine,
        policy,
        chunk.batch.trajectory,
        step,
        advantages=chunk.advantages,
        seeds=chunk.seeds,
        rows=rows,
    )
    terms = algorithm.terms(trained)
    replay, told, gaps = trained.replayed, dict[str, Tensor](), dict[str, Tensor]()
    if replay is not None and algorithm.needs.log_probs:
        gaps[f"step_{step}"] = (replay.log_prob.detach() - trained.old_log_probs).abs()
        for name, stream in replay.streams.items() if len(trained.trajectory.streams) > 1 else ():
            log_ratio = stream.log_prob.detach() - trained.old_stream_log_probs[name]
            told |= {f"{key}/{name}": value for key, value in ratio_metrics(log_ratio).items()}
            gaps[f"{name}/step_{step}"] = log_ratio.abs()
    return terms, told, gaps


def _micro_batches(chunk: TrainChunk, size: int | None) -> Iterator[list[int] | None]:
    """None: the rollout's batch as it is, whose replay is bitwise."""
    count = len(chunk.weights)
    if chunk.rows is None and (size is None or size >= count):
        yield None
        return
    rows = list(range(count) if chunk.rows is None else chunk.rows)
    for start in range(0, len(rows), size or count):
        yield rows[start : start + (size or count)]


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
