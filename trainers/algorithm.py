"""What an algorithm decides, and nothing else: the loop in ``trainers.trainer`` is written once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from miles_rollout import Replay
from miles_rollout.shapes import Float


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """One step of one micro-batch, an entry a row, unreduced: the trainer knows the counts."""

    loss: Float[Tensor, " rows"]
    """With graph."""
    metrics: Mapping[str, Float[Tensor, " rows"]] = field(default_factory=dict)
    """Without graph; the reduction of each is in `Algorithm.reductions`."""


class Algorithm(ABC):
    """Turns rewards into advantages, and a replayed step into a loss."""

    reductions: ClassVar[Mapping[str, str]]
    """Metric -> "mean" or "max" over all rows and steps of an update."""

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether each step is replayed with the reference policy too, at its cost."""

    @abstractmethod
    def advantages(
        self, rewards: Float[Tensor, " samples"], group_ids: Tensor
    ) -> Float[Tensor, " samples"]:
        """One advantage for each sample of an iteration; 0 for a masked (NaN) reward."""

    @abstractmethod
    def terms(
        self,
        replay: Replay,
        old_log_probs: Float[Tensor, " rows"],
        advantages: Float[Tensor, " rows"],
        reference: Replay | None,
    ) -> LossTerms:
        """The loss of one replayed step."""
