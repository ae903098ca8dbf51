"""Signs that a reward is exploited: told once in the log, never a reason to stop.

The reward that is trained always rises in the end. Whether samples became better is told by what is
not trained: a second reward on the evaluation samples, how much the samples of a group still differ,
and how far the evaluation samples are from those of the base model, without its LoRA (`drift`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from miles_rollout.shapes import Int
from trainers.config_loader import STRICT
from trainers.rewards.scores import Scores

logger = logging.getLogger(__name__)

TRAINED = "mean"
"""What the total is called in metrics: ``eval/reward/mean``."""
OWN = "own"
"""What the scores of a held-out reward itself are called in a checkpoint."""
_HELD_OUT = "held_out/"


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorsConfig:
    """What is measured besides the trained reward, and when the log warns of it."""

    __pydantic_config__ = STRICT

    drift_samples: int = 16
    """``eval/drift/<stream>``: RMS difference of the final latents of the first so many evaluation
    samples from those of the base model, without its LoRA, which are sampled once; 0: off."""
    max_held_out_fall: float | None = 3.0
    """Warn when a reward that is not trained (of weight 0, or of ``eval.rewards``) fell by so many
    standard errors since the first evaluation, while the trained one rose by as many (null: off)."""
    min_diversity: float | None = 0.5
    """Warn when ``rollout/diversity/<stream>`` is below this fraction of its first value (null: off)."""

    def __post_init__(self) -> None:
        fall, least = self.max_held_out_fall, self.min_diversity
        if self.drift_samples < 0:
            raise ValueError(f"drift_samples must be >= 0, 0 for off; got {self.drift_samples}")
        if fall is not None and not fall > 0:
            raise ValueError(f"max_held_out_fall must be above 0 or null; got {fall}")
        if least is not None and not 0 < least < 1:
            raise ValueError(f"min_diversity must be between 0 and 1, or null; got {least}")


class Monitors:
    """Remembers how a run began, and which warnings were given."""

    def __init__(self, config: MonitorsConfig, held_out: Sequence[str]) -> None:
        self.config = config
        self.held_out = tuple(held_out)
        """The rewards that are not trained, by the names of their scores."""
        self._first: dict[str, dict[str, list[float | None]]] = {}
        """Held-out reward -> its scores (``OWN``) and the trained ones (``TRAINED``), sample by sample,
        None where there is none: of the first evaluation in which both have at least two."""
        self._evaluation: str | None = None
        """The digest of the evaluations that ``_first`` is of."""
        self._diversity: dict[str, float] = {}
        self._told: set[str] = set()

    def watch_evaluation(self, scores: Scores, evaluation: str) -> None:
        """Compare with the first evaluation that scored a held-out reward.

        ``evaluation``: a digest of what makes its samples, prompts and seeds among it. Scores of other
        samples than the remembered ones are not compared: those of now are the first then.
        """
        if self._first and evaluation != self._evaluation:
            logger.warning(
                "monitors: the evaluation has other prompts or settings than before, so held-out "
                "rewards are compared with this one from now on; got %s after %s; set data.eval and "
                "eval as they were to keep the first one",
                evaluation,
                self._evaluation,
            )
            self._first = {}
            self._told = {event for event in self._told if not event.startswith(_HELD_OUT)}
        self._evaluation = evaluation
        trained = _listed(scores.total)
        for name in self.held_out:
            own = _listed(scores.components[name])
            if name in self._first:
                self._compare(name, own, trained)
            elif min(_count(own), _count(trained)) >= 2:
                self._first[name] = {OWN: own, TRAINED: trained}

    def _compare(
        self, name: str, own: Sequence[float | None], trained: Sequence[float | None]
    ) -> None:
        bound = self.config.max_held_out_fall
        if bound is None:
            return
        rise, rise_errors = rise_of(self._first[name][TRAINED], trained)
        change, errors = rise_of(self._first[name][OWN], own)
        self._tell(
            f"{_HELD_OUT}{name}",
            rise_errors > bound and errors < -bound,
            f"monitors: eval/reward/{name}, which is not trained, fell by {-change:.4g} "
            f"({-errors:.1f} standard errors) since the first evaluation, while eval/reward/"
            f"{TRAINED} rose by {rise:.4g} ({rise_errors:.1f}): the trained reward may be "
            "exploited; compare samples/ with the first ones, or train less, or with a KL",
        )

    def watch_diversity(self, metrics: Mapping[str, float]) -> None:
        """Compare ``rollout/diversity/*`` with the run's first."""
        least = self.config.min_diversity
        for name, value in metrics.items():
            first = self._diversity.setdefault(name, value)
            if least is not None:
                self._tell(
                    name,
                    value < least * first,
                    f"monitors: {name} is {value:.4g}, less than {least:g} of the first "
                    f"{first:.4g}: the samples of a prompt become one; look at samples/, or train "
                    "less, or with a KL",
                )

    def _tell(self, event: str, is_so: bool, message: str) -> None:
        """Warn when ``event`` begins; again only after it was over."""
        if is_so and event not in self._told:
            logger.warning("%s", message)
        (self._told.add if is_so else self._told.discard)(event)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "first": self._first,
            "evaluation": self._evaluation,
            "diversity": self._diversity,
            "told": sorted(self._told),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """What `state` gave; nothing, of a run that had no monitors."""
        self._first = {name: dict(both) for name, both in state.get("first", {}).items()}
        self._evaluation = state.get("evaluation")
        self._diversity = dict(state.get("diversity", {}))
        self._told = set(state.get("told", ()))


def _listed(scores: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in scores.tolist()]


def _count(scores: Sequence[float | None]) -> int:
    return sum(score is not None for score in scores)


def rise_of(
    first: Sequence[float | int | None], now: Sequence[float | int | None]
) -> tuple[float, float]:
    """The mean rise over the samples that have both scores, and its number of standard errors.

    Pairs of the same prompt and seed are compared, so that how prompts differ is no error. Zero errors
    where fewer than two samples have both, infinitely many where all rose alike.
    """
    changes = [b - a for a, b in zip(first, now, strict=True) if a is not None and b is not None]
    if len(changes) < 2:
        return (float(changes[0]) if changes else 0.0), 0.0
    mean, error = fmean(changes), stdev(changes) / math.sqrt(len(changes))
    if error == 0:
        return mean, math.copysign(math.inf, mean) if mean else 0.0
    return mean, mean / error


def diversity_metrics(
    latents: Sequence[Mapping[str, Tensor]], group_ids: Int[Tensor, " samples"]
) -> dict[str, float]:
    """``rollout/diversity/<stream>``: the mean over all pairs of samples of one group.

    A pair's is the RMS difference of their final latents, in latent units. ``latents``: those of each
    chunk, [rows, ...] a stream.
    """
    metrics = {}
    for stream in latents[0]:
        rows = [row for chunk in latents for row in chunk[stream]]
        distances = [
            distance
            for group in group_ids.unique().tolist()
            for distance in _distances([rows[i] for i in (group_ids == group).nonzero()[:, 0]])
        ]
        if distances:
            metrics[f"rollout/diversity/{stream}"] = torch.stack(distances).mean().item()
    return metrics


def _distances(rows: Sequence[Tensor]) -> list[Tensor]:
    """The RMS difference of every pair, float32 scalars."""
    held = [row.float() for row in rows]
    return [(a - b).square().mean().sqrt() for i, a in enumerate(held) for b in held[i + 1 :]]
