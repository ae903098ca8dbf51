"""What rewards said about samples, and how it is put together from batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_rollout.shapes import Bool, Float
from trainers.rewards.reward_call import TOTAL, RewardFailure

_MAX_ERRORS_TOLD = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """What the rewards say about a batch of samples."""

    total: Float[Tensor, " samples"]
    """float64; NaN where masked."""
    components: Mapping[str, Float[Tensor, " samples"]]
    """``<reward>`` and ``<reward>/<component>``, float64, unweighted; NaN where missing."""
    masked: Bool[Tensor, " samples"]
    errors: tuple[str, ...]
    """Why samples have no score, also for rewards of weight 0."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of the rewards in the total, by the name of their component."""

    def component_means(self) -> dict[str, float]:
        """The mean of every component over the samples that have it; without those no one has."""
        finite = {name: values[values.isfinite()] for name, values in self.components.items()}
        return {name: float(values.mean()) for name, values in finite.items() if len(values)}


class Column:
    """What one reward said so far."""

    def __init__(self, label: str, weight: float) -> None:
        self.label = label
        self.weight = weight
        self.errors: list[str] = []
        self.failures = 0
        """Samples that failed when they were scored one by one."""
        self.gave_up = False
        """More failed than may; the samples after that are not scored."""
        self._batches: list[dict[str, Tensor]] = []

    def add(self, columns: Mapping[str, Tensor]) -> None:
        """The components of the next batch, float64 [N] each, with ``TOTAL``."""
        self._batches.append(dict(columns))

    def components(self) -> dict[str, Float[Tensor, " samples"]]:
        """Of all batches so far, with NaN where one has not what another has."""
        names = dict.fromkeys(name for batch in self._batches for name in batch)
        sizes = [len(batch[TOTAL]) for batch in self._batches]
        return {
            name: torch.cat(
                [
                    batch.get(name, torch.full((size,), math.nan, dtype=torch.float64))
                    for batch, size in zip(self._batches, sizes, strict=True)
                ]
            )
            for name in names
        }


class ScoredParts:
    """Columns of ``num_samples`` samples, of which at most ``max_masked`` may have no score."""

    def __init__(self, num_samples: int, max_masked: int) -> None:
        self.num_samples = num_samples
        self.max_masked = max_masked
        self.rows = 0
        """Samples that all rewards have scored."""
        self.columns: list[Column] = []

    def check(self, rewards: int, advice: str) -> None:
        """Raise ``RewardFailure`` if the first ``rewards`` leave too many samples without a score."""
        total, errors = self._total(self.columns[:rewards])
        count, scored = int(total.isnan().sum()), len(total)
        left = self.num_samples - scored
        if any(c.gave_up and c.weight for c in self.columns[:rewards]):
            count, left = count + left, 0
        if count > self.max_masked or (count == self.num_samples and not left):
            causes = "; ".join(errors[:_MAX_ERRORS_TOLD])
            waiting = f", and {left} are not scored yet" if left else ""
            raise RewardFailure(
                f"rewards: {count} of {self.num_samples} samples have no score{waiting}; got "
                f"{causes}; {advice}"
            )

    def scores(self) -> Scores:
        """Of all samples. The order of components and errors is that of one batch of all."""
        total, errors = self._total(self.columns)
        components: dict[str, Tensor] = {}
        for column in self.columns:
            found = column.components()
            components[column.label] = found.pop(TOTAL)
            components |= {f"{column.label}/{name}": values for name, values in found.items()}
        return Scores(
            total=total,
            components=components,
            masked=total.isnan(),
            errors=tuple(errors),
            weights={column.label: column.weight for column in self.columns if column.weight},
        )

    def _total(self, columns: Sequence[Column]) -> tuple[Float[Tensor, " samples"], list[str]]:
        """The weighted sum, NaN where a reward with a weight has no score; and what went wrong."""
        told = [(column, column.components()[TOTAL]) for column in columns]
        total = torch.zeros(min(len(values) for _, values in told), dtype=torch.float64)
        for column, values in told:
            if column.weight:
                total += column.weight * values[: len(total)]
        return total, [error for column in columns for error in column.errors]
