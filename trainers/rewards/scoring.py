"""Scores samples with several rewards, and leaves out those that a reward failed on.

A sample that a reward could not score is **masked**: its total is NaN, so it has no advantage and
enters no mean. It is never scored 0, which would be a judgement. The rules:

1. The total is the weighted sum of the rewards. Weight 0: logged, not trained.
2. A sample is masked when a reward with a weight gave it None, NaN or infinity, raised or ran out of
   time. A part of the sum is never taken for the whole.
3. A reward is called once for the batch, or, where batches come one after the other (`Scorer.start`
   with ``overlap``), once for each of them. If that fails, once for each sample; those that fail again
   are masked. If it raises ``RewardUnavailable``, they are masked without another call. It stops as
   soon as more have failed than may be masked, counted over all batches.
4. More masked samples than ``max_masked_fraction`` allows, or no sample left, is ``RewardFailure``.
5. Logs take the mean of what is there, component by component.

A call that runs out of time is left behind in a daemon thread: Python cannot end it. It keeps its
memory, and shares the reward's state with later calls.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from miles_rollout.media import Media
from trainers.config_loader import STRICT, ConfigError
from trainers.rewards import Reward, RewardSource, resolve_reward
from trainers.rewards.overlap import Scoring
from trainers.rewards.reward_call import RewardCall, RewardFailure
from trainers.rewards.scores import Column, ScoredParts, Scores

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


class Scorer:
    """Calls the rewards of a recipe."""

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        *,
        timeout_s: float | int,
        max_masked_fraction: float | int,
        overlap: bool = False,
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
        self.overlap = overlap
        self._sources = [resolve_reward(config.name, config.kwargs) for config in configs]

    def watching(self, configs: Sequence[RewardConfig]) -> Scorer:
        """Another scorer with these rewards too, which are only logged; it shares those of this one."""
        labels = [config.label for config in (*self.configs, *configs)]
        if len(set(labels)) < len(labels):
            raise ConfigError(
                f"eval.rewards: a name is given twice, or is one of rewards; got {labels}; name each "
                "once: what rewards has is scored in evaluations, too"
            )
        scorer = copy.copy(self)
        scorer.configs = self.configs + tuple(replace(config, weight=0.0) for config in configs)
        scorer._sources = self._sources + [resolve_reward(c.name, c.kwargs) for c in configs]
        return scorer

    @property
    def sources(self) -> dict[str, RewardSource]:
        """By what logs call the rewards; nothing is loaded."""
        return {c.label: s for c, s in zip(self.configs, self._sources, strict=True)}

    @property
    def rewards(self) -> list[Reward]:
        """All of them, loaded."""
        return [source.get() for source in self._sources]

    def load(self) -> None:
        """Build the rewards now, models and all, instead of when they are first called."""
        _ = self.rewards

    @property
    def untrained(self) -> list[str]:
        """What logs call the rewards of weight 0."""
        return [config.label for config in self.configs if not config.weight]

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
        parts = ScoredParts(len(media), self._may_be_masked(len(media)))
        self.score_part(parts, media, prompts, metadata)
        return parts.scores()

    def start(self, num_samples: int) -> Scoring:
        """Score ``num_samples`` that come in batches: beside their making, if ``overlap``."""
        parts = ScoredParts(num_samples, self._may_be_masked(num_samples))
        return Scoring(self.score_part, parts, overlap=self.overlap)

    def score_part(
        self,
        parts: ScoredParts,
        media: Sequence[Media],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> None:
        """Add the scores of ``media`` to ``parts``, whose next samples they are."""
        if not parts.columns:
            parts.columns += [Column(config.label, config.weight) for config in self.configs]
        for number, (column, reward) in enumerate(zip(parts.columns, self.rewards, strict=True), 1):
            call = RewardCall(
                label=column.label,
                reward=reward,
                media=media,
                prompts=prompts,
                metadata=metadata,
                timeout_s=self.timeout_s,
                first=parts.rows,
            )
            if column.gave_up:
                column.add(call.nothing())
            else:
                column.add(call.scores(parts.max_masked - column.failures))
                column.errors += call.errors
                column.failures += call.failures
                column.gave_up = column.failures > parts.max_masked
            if column.weight:
                parts.check(
                    number,
                    "repair the reward or raise max_masked_fraction (now "
                    f"{self.max_masked_fraction})",
                )
        parts.rows += len(media)

    def _may_be_masked(self, samples: int) -> int:
        return int(self.max_masked_fraction * samples + 1e-9)  # 0.29 * 100 is 28.999...
