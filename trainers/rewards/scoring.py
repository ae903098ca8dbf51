"""Scores samples with several rewards, and leaves out those that a reward failed on.

A sample that a reward could not score is **masked**: its total is NaN, so it has no advantage and
enters no mean. It is never scored 0, which would be a judgement. The rules:

1. The total is the weighted sum of the rewards. Weight 0: logged, not trained.
2. A sample is masked when a reward with a weight gave it None, NaN or infinity, raised or ran out of
   time. A part of the sum is never taken for the whole.
3. A reward is called once for the batch. If that fails, once for each sample; those that fail again
   are masked. It stops as soon as more have failed than may be masked.
4. More masked samples than ``max_masked_fraction`` allows, or no sample left, is ``RewardFailure``.
5. Logs take the mean of what is there, component by component.

A call that runs out of time is left behind in a daemon thread: Python cannot end it. It keeps its
memory, and shares the reward's state with later calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from miles_rollout.media import Media
from miles_rollout.shapes import Bool, Float
from trainers.config_loader import STRICT, ConfigError
from trainers.rewards import Reward, resolve_reward
from trainers.rewards.reward_call import TOTAL, RewardCall, RewardFailure

_MAX_ERRORS_TOLD = 3


__all__ = ["RewardConfig", "RewardFailure", "Scorer", "Scores"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """One reward of the sum."""

    __pydantic_config__ = STRICT

    name: str
    """A known reward, or ``module:attribute``."""
    weight: float = 1.0
    """Its factor in the total; 0: only logged."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the reward."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ConfigError(f"weight: must be finite; got {self.weight}; set a number")

    @property
    def label(self) -> str:
        """What logs call it: the name, or the last part of the path."""
        return self.name.rpartition(":")[2]


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


class Scorer:
    """Calls the rewards of a recipe."""

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        *,
        timeout_s: float | int,
        max_masked_fraction: float | int,
    ) -> None:
        labels = [config.label for config in configs]
        if len(set(labels)) < len(labels):
            raise ConfigError(f"rewards: a name is given twice; got {labels}; name each once")
        if not any(config.weight for config in configs):
            raise ConfigError(
                f"rewards: none has a weight, so nothing is trained; got {labels}; set a weight"
            )
        if not 0 < timeout_s <= 1e6:
            raise ConfigError(f"timeout_s: must be within 0..1e6; got {timeout_s}; set seconds")
        if not 0 <= max_masked_fraction <= 1:
            raise ConfigError(
                f"max_masked_fraction: must be within 0..1; got {max_masked_fraction}; set 0.1"
            )
        self.configs = tuple(configs)
        self.timeout_s = timeout_s
        self.max_masked_fraction = max_masked_fraction
        # All are checked before the first loads a model.
        builders = [resolve_reward(config.name, config.kwargs) for config in configs]
        self.rewards: list[Reward] = [build() for build in builders]

    def score(
        self,
        media: Sequence[Media],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> Scores:
        """The scores of ``media``, each with its prompt and metadata."""
        if not len(media) == len(prompts) == len(metadata) > 0:
            raise RewardFailure(
                f"Scorer: needs one prompt and metadata a sample; got {len(media)} media, "
                f"{len(prompts)} prompts, {len(metadata)} metadata; pass lists of one length"
            )
        total = torch.zeros(len(media), dtype=torch.float64)
        components: dict[str, Tensor] = {}
        errors: list[str] = []
        for config, reward in zip(self.configs, self.rewards, strict=True):
            call = RewardCall(
                label=config.label,
                reward=reward,
                media=media,
                prompts=prompts,
                metadata=metadata,
                timeout_s=self.timeout_s,
            )
            columns = call.scores(self._may_be_masked(len(media)))
            errors += call.errors
            components[config.label] = columns.pop(TOTAL)
            components |= {f"{config.label}/{name}": c for name, c in columns.items()}
            if config.weight:
                total += config.weight * components[config.label]
                self._check(total.isnan(), errors)
        return Scores(
            total=total,
            components=components,
            masked=total.isnan(),
            errors=tuple(errors),
            weights={c.label: c.weight for c in self.configs if c.weight},
        )

    def _may_be_masked(self, samples: int) -> int:
        return int(self.max_masked_fraction * samples + 1e-9)  # 0.29 * 100 is 28.999...

    def _check(self, masked: Bool[Tensor, " samples"], errors: Sequence[str]) -> None:
        count, total = int(masked.sum()), len(masked)
        if count > self._may_be_masked(total) or count == total:
            causes = "; ".join(errors[:_MAX_ERRORS_TOLD])
            raise RewardFailure(
                f"rewards: {count} of {total} samples have no score; got {causes}; repair the "
                f"reward or raise max_masked_fraction (now {self.max_masked_fraction})"
            )
