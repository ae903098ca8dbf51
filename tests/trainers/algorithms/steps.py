"""Steps of a real rollout, and scores, for tests of one algorithm by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainers.rewards.scoring import Scores
from trainers.trained_step import TrainedStep

STEPS = (0, 1, 2)
"""The recorded ones."""


def a_step(
    setup: Any, index: int, advantages: Tensor, rows: list[int] | None = None
) -> TrainedStep:
    """A step of the rollout that ``setup`` holds."""
    return TrainedStep(
        setup.engine,
        setup.policy,
        setup.batch.trajectory,
        index,
        advantages=advantages,
        seeds=range(len(advantages)),
        rows=rows,
    )


def scores_of(
    total: Tensor,
    components: Mapping[str, Tensor] | None = None,
    weights: Mapping[str, float] | None = None,
) -> Scores:
    """As a scorer gives them; NaN is masked."""
    return Scores(
        total=total,
        components=components or {},
        masked=total.isnan(),
        errors=(),
        weights=weights or {},
    )
