"""One reward on one batch: called whole, then sample by sample if that failed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_rollout.errors import MilesRolloutError
from miles_rollout.media import Media
from trainers.rewards.protocol import Reward
from trainers.rewards.time_limit import call_within

TOTAL = "total"
"""The component that is the reward itself."""

Columns = dict[str, list[float]]
"""Component -> one number a sample, NaN where there is none; always with ``TOTAL``."""


class RewardFailure(MilesRolloutError, RuntimeError):
    """A reward broke its contract, or too few samples have a score to train on."""


class RewardUnavailable(MilesRolloutError, ConnectionError):
    """What a reward asks is away: to ask for each sample by itself would not help."""

    scores: Mapping[str, Sequence[float | None]] = MappingProxyType({})
    """What it said before, as a reward returns it, with None for the samples that are left."""


@dataclass(kw_only=True, slots=True)
class RewardCall:
    """A reward with what it scores; ``errors`` grows as it is called."""

    label: str
    reward: Reward
    media: Sequence[Media]
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    timeout_s: float | int
    first: int = 0
    """The number of the first sample, where they are a part of more."""
    errors: list[str] = field(default_factory=list)
    failures: int = 0
    """Samples that failed by themselves after the batch did, or with what they were asked of."""

    def scores(self, max_failures: int) -> dict[str, Tensor]:
        """float64 [N] a component, NaN where missing; gives up after ``max_failures`` samples."""
        everyone = range(len(self.media))
        try:
            columns = self._call(everyone)
        except RewardFailure:
            raise
        except RewardUnavailable as error:
            self.errors.append(f"reward {self.label!r}, batch of {len(everyone)}: {_told(error)}")
            columns = self._before(error)
        except Exception as error:  # whatever foreign code raises is a score that is missing
            self.errors.append(f"reward {self.label!r}, batch of {len(everyone)}: {_told(error)}")
            columns = self._one_by_one(max_failures)
        scores = {name: torch.tensor(c, dtype=torch.float64) for name, c in columns.items()}
        return {name: c.where(c.isfinite(), math.nan) for name, c in scores.items()}

    def nothing(self) -> dict[str, Tensor]:
        """NaN for every sample, without a call."""
        return {TOTAL: torch.full((len(self.media),), math.nan, dtype=torch.float64)}

    def _before(self, error: RewardUnavailable) -> Columns:
        """What was said before ``error``; the other samples failed."""
        count = len(self.media)
        columns: Columns = {TOTAL: [math.nan] * count}
        if error.scores:
            columns = self._columns(error.scores, count)
        self.failures += sum(not math.isfinite(score) for score in columns[TOTAL])
        return columns

    def _one_by_one(self, max_failures: int) -> Columns:
        columns: Columns = {TOTAL: [math.nan] * len(self.media)}
        for row in range(len(self.media)):
            try:
                single = self._call([row])
            except RewardFailure:
                raise
            except RewardUnavailable as error:
                self.errors.append(f"{self._named(row)}: {_told(error)}")
                self.failures += len(self.media) - row
                break
            except Exception as error:  # as above
                self.errors.append(f"{self._named(row)}: {_told(error)}")
                self.failures += 1
                if self.failures > max_failures:
                    break
                continue
            for name, values in single.items():
                columns.setdefault(name, [math.nan] * len(self.media))[row] = values[0]
        return columns

    def _call(self, rows: Sequence[int]) -> Columns:
        def call() -> Columns:
            result = self.reward(
                [self.media[row] for row in rows],
                [self.prompts[row] for row in rows],
                [self.metadata[row] for row in rows],
            )
            # Within the time limit too: reading a tensor waits for the accelerator.
            return self._columns(result, len(rows))

        own = getattr(self.reward, "time_limit_s", None)
        limit = self.timeout_s if own is None else max(self.timeout_s, own(len(rows)))
        try:
            columns = call_within(limit, call)
        except TimeoutError as error:
            if own is None:
                raise
            raise RewardUnavailable(str(error)) from error  # it may still be asking, beside us
        for row, score in zip(rows, columns[TOTAL], strict=True):
            if not math.isfinite(score):
                self.errors.append(f"{self._named(row)}: has no finite score; got {score}")
        return columns

    def _columns(self, result: Any, count: int) -> Columns:
        if not isinstance(result, Mapping):
            return {TOTAL: self._numbers(result, count, "")}
        columns = {
            str(name): self._numbers(values, count, f" for component {name!r}")
            for name, values in result.items()
        }
        if not columns:
            raise RewardFailure(
                f"reward {self.label!r}: returned no component; got {dict(result)}; return at least one"
            )
        if TOTAL not in columns:
            columns[TOTAL] = [sum(row) for row in zip(*columns.values(), strict=True)]
        return columns

    def _numbers(self, values: Any, count: int, what: str) -> list[float]:
        if isinstance(values, Tensor):
            values = values.detach().cpu().double().numpy()
        if isinstance(values, np.ndarray):
            values = values.tolist()
        if not isinstance(values, Sequence) or len(values) != count:
            got = f"{len(values)}" if isinstance(values, Sequence) else f"{values!r}"
            raise RewardFailure(
                f"reward {self.label!r}: must return one number a sample{what}; got {got} for "
                f"{count} samples; return a list, tensor or array of {count}"
            )
        return [self._number(value, what) for value in values]

    def _number(self, value: Any, what: str) -> float:
        if value is None:
            return math.nan
        if isinstance(value, (numbers.Real, np.generic)) or (
            isinstance(value, Tensor) and value.ndim == 0
        ):
            return float(value)
        raise RewardFailure(
            f"reward {self.label!r}: must return numbers{what}; got {value!r}; return a number or "
            "None for each sample"
        )

    def _named(self, row: int) -> str:
        return (
            f"reward {self.label!r}, sample {self.first + row} (prompt {self.prompts[row][:60]!r})"
        )


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
