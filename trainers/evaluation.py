"""Deterministic samples of held-out prompts, scored: the same prompts and seeds each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from miles_rollout import Media, RolloutEngine, RolloutParams
from trainers.config import EvalConfig, RolloutConfig
from trainers.data import PromptRecord
from trainers.prompt_inputs import inputs_of
from trainers.rewards.scoring import Scorer, Scores
from trainers.rollouts import with_media
from trainers.samples import Sample, samples_of

DETERMINISTIC = RolloutParams(sde_type="ode", return_step_indices=())


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Scores in a fixed order, so that two evaluations can be compared sample by sample."""

    scores: Scores
    media: list[Media]
    prompts: list[str]

    @property
    def mean(self) -> float:
        """Over the samples whose reward did not fail."""
        return self.scores.total[~self.scores.masked].mean().item()

    def samples(self) -> list[Sample]:
        """Each with its prompt and its score, to look at."""
        return samples_of(self.media, self.prompts, self.scores.total.tolist())

    def metrics(self) -> dict[str, float]:
        """``eval/reward/*``."""
        live = self.scores.total[~self.scores.masked]
        metrics = {
            "eval/reward/mean": self.mean,
            "eval/reward/std": live.std().item() if len(live) > 1 else 0.0,
            "eval/reward/masked": int(self.scores.masked.sum()),
        }
        means = self.scores.component_means()
        return metrics | {f"eval/reward/{name}": value for name, value in means.items()}


def evaluate(
    engine: RolloutEngine,
    records: Sequence[PromptRecord],
    scorer: Scorer,
    config: EvalConfig,
    rollout: RolloutConfig,
) -> Evaluation:
    """Sample ``samples_per_prompt`` of each record by the deterministic sampler and score them."""
    records = records[: config.num_prompts]
    sampling = rollout.arguments(config.num_inference_steps)
    batches = engine.generate(
        [r.prompt for r in records],
        config.samples_per_prompt,
        DETERMINISTIC,
        seed=config.seed,
        iteration=-1,  # no iteration of a run with this seed has this noise
        metadata=[r.metadata for r in records],
        inputs=inputs_of(records),
        negative_prompt=rollout.negative_prompt,
        chunk_size=config.rows,
        decode=False,
        **sampling,
    )
    media: list[Media] = []
    prompts: list[str] = []
    metadata: list[Any] = []
    for batch in batches:
        media += with_media(batch, engine).media or []
        prompts += batch.prompts
        metadata += batch.metadata
    return Evaluation(scores=scorer.score(media, prompts, metadata), media=media, prompts=prompts)


def before_and_after(
    engine: RolloutEngine,
    records: Sequence[PromptRecord],
    config: EvalConfig,
    rollout: RolloutConfig,
    reference: Any,
    scorer: Scorer,
    count: int = 8,
) -> list[Evaluation]:
    """The same ``count`` samples, of prompts from all over the list, before and after training."""
    few = replace(config, num_prompts=None, samples_per_prompt=1)
    records = records[:: max(1, len(records) // count)][:count]
    with reference:
        before = evaluate(engine, records, scorer, few, rollout)
    return [before, evaluate(engine, records, scorer, few, rollout)]
