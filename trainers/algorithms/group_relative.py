"""What the algorithms on group-relative advantages share: their settings, and what follows of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from miles_rollout.shapes import Int
from trainers.advantages import Advantages, Std, best_and_worst, gdpo_advantages, group_advantages
from trainers.algorithms.base import Needs
from trainers.config_loader import STRICT
from trainers.rewards.scoring import Scores


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRelativeConfig:
    """From scores to advantages. Not an algorithm by itself."""

    __pydantic_config__ = STRICT

    adv_clip_max: float = 5.0
    """Advantages are clamped to +- this."""
    advantage_std: Std = "batch"
    """Over what the rewards' std is taken; "none" is Dr.GRPO's choice."""
    advantage_epsilon: float = 1e-4
    """Added to that std."""
    multi_reward: Literal["sum", "gdpo"] = "sum"
    """Of several rewards: the advantage of their weighted sum, or the weighted sum of the advantages
    that each has by itself, as in GDPO: none drowns in the spread of another."""
    best_of_group: int = 0
    """With ``worst_of_group``: only so many best and worst samples of a group are trained, and the
    others are not replayed (0 and 0: all are)."""
    worst_of_group: int = 0
    """See ``best_of_group``."""
    skip_zero_advantages: bool = False
    """Samples without an advantage are not replayed, and the loss is the mean over the others."""
    step_weights: Mapping[int, float] = field(default_factory=dict)
    """Factor of the loss of some steps, such as {"0": 0.5}; the others have 1."""

    def __post_init__(self) -> None:
        if not 0 < self.adv_clip_max < math.inf:
            raise ValueError(f"adv_clip_max must be positive and finite; got {self.adv_clip_max}")
        if not 0 <= self.advantage_epsilon < math.inf:
            raise ValueError(
                f"advantage_epsilon must be finite and >= 0; got {self.advantage_epsilon}"
            )
        if self.best_of_group < 0 or self.worst_of_group < 0:
            raise ValueError(
                f"best_of_group and worst_of_group must be >= 0; got {self.best_of_group}, "
                f"{self.worst_of_group}"
            )
        bad = {s: w for s, w in self.step_weights.items() if s < 0 or not 0 <= w < math.inf}
        if bad:
            raise ValueError(
                f"step_weights: steps and weights must be >= 0 and finite; got {bad}; set for "
                'example {"0": 0.5}'
            )

    def group_needs(self) -> Needs:
        """What follows of the settings above."""
        return Needs(
            samples_of_group=(self.best_of_group + self.worst_of_group) or None,
            named_steps=tuple(self.step_weights),
        )

    def step_weight(self, step: int) -> float:
        """The factor of a step's loss."""
        return self.step_weights.get(step, 1.0)


def group_relative(
    config: GroupRelativeConfig, scores: Scores, group_ids: Int[Tensor, " samples"]
) -> Advantages:
    """The advantages of an iteration, and which samples are trained."""
    std, epsilon = config.advantage_std, config.advantage_epsilon
    if config.multi_reward == "gdpo":
        parts = {name: scores.components[name] for name in scores.weights}
        live = {name: part.where(~scores.masked, math.nan) for name, part in parts.items()}
        values = gdpo_advantages(live, scores.weights, group_ids, std=std, epsilon=epsilon)
    else:
        values = group_advantages(scores.total, group_ids, std=std, epsilon=epsilon)
    trained = best_and_worst(
        scores.total, group_ids, best=config.best_of_group, worst=config.worst_of_group
    )
    if config.skip_zero_advantages:
        trained = trained & (values != 0)
    return Advantages(values=values, trained=trained)
