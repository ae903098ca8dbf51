"""What an algorithm decides, and nothing else: the loop in ``trainers.trainer`` is written once.

An algorithm says what it needs before anything exists (`Needs`), turns the scores of an iteration
into advantages, and a trained step into a loss. It does not sample, count, sum or step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from miles_rollout.shapes import Float, Int
from miles_rollout.transitions import SdeType
from trainers.advantages import Advantages
from trainers.old_policy import OldPolicyDecay
from trainers.rewards.scoring import Scores
from trainers.trained_step import TrainedStep
from trainers.windows import TrainedFraction

Reference = Literal["base", "start"]
"""The model without what is trained, or with the LoRA that the run started from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """One step of one micro-batch, an entry a row, unreduced: the trainer knows the counts."""

    loss: Float[Tensor, " rows"]
    """With graph."""
    metrics: Mapping[str, Float[Tensor, " rows"]] = field(default_factory=dict)
    """Without graph; the reduction of each is in `Algorithm.reductions`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What an algorithm asks of rollout and policy; checked before a model is loaded."""

    log_probs: bool = True
    """The trained steps are stochastic. False: the sampler may be any, "ode" too."""
    means: bool = False
    """The rollout keeps the mean of every trained step."""
    reference: Reference | None = None
    """Each step is computed with the reference policy too, at its cost."""
    old_policy: OldPolicyDecay | None = None
    """Rollouts are those of a policy that follows the trained one at this pace, and each step is
    computed with it too."""
    sde_types: tuple[SdeType, ...] | None = None
    """The kinds of steps that it is for (None: all)."""
    max_trained_steps: int | None = None
    """At most so many steps an iteration are trained (None: any number)."""
    moving_window: bool = False
    """The window has to move in the course of the run."""
    samples_of_group: int | None = None
    """So many samples of each group are trained (None: all)."""
    named_steps: tuple[int, ...] = ()
    """Steps that its settings name, and that have to exist."""
    fraction: TrainedFraction = field(default_factory=TrainedFraction)
    """Which part of the window is trained."""


class Algorithm(ABC):
    """Turns rewards into advantages, and a trained step into a loss."""

    reductions: ClassVar[Mapping[str, str]]
    """Metric -> "mean" or "max" over all rows and steps of an update."""

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What the loop has to provide."""

    @abstractmethod
    def advantages(self, scores: Scores, group_ids: Int[Tensor, " samples"]) -> Advantages:
        """One advantage for each sample of an iteration; 0 for a masked (NaN) reward."""

    @abstractmethod
    def terms(self, step: TrainedStep) -> LossTerms:
        """The loss of one trained step."""
