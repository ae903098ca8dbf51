"""Deterministic samples of held-out prompts, scored: the same prompts and seeds each time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from miles_rollout import Media, RolloutBatch, RolloutEngine, RolloutParams
from trainers.config import EvalConfig, RolloutConfig
from trainers.data import PromptRecord
from trainers.drift import first_rows
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
    latents: Mapping[str, Tensor] = field(default_factory=dict)
    """Stream -> final latents of the first samples, as many as were to be kept."""
    drift: dict[str, float] = field(default_factory=dict)
    """``eval/drift/*``, where it is measured."""

    @property
    def mean(self) -> float:
        """Over the samples whose reward did not fail."""
        return self.scores.total[~self.scores.masked].mean().item()

    def samples(self) -> list[Sample]:
        """Each with its prompt and its score, to look at."""
        return samples_of(self.media, self.prompts, self.scores.total.tolist())

    def metrics(self) -> dict[str, float]:
        """``eval/reward/*`` and ``eval/drift/*``."""
        live = self.scores.total[~self.scores.masked]
        metrics = {
            "eval/reward/mean": self.mean,
            "eval/reward/std": live.std().item() if len(live) > 1 else 0.0,
            "eval/reward/masked": int(self.scores.masked.sum()),
        }
        means = self.scores.component_means()
        metrics |= {f"eval/reward/{name}": value for name, value in means.items()}
        return metrics | self.drift


def evaluate(
    engine: RolloutEngine,
    records: Sequence[PromptRecord],
    scorer: Scorer,
    config: EvalConfig,
    rollout: RolloutConfig,
    keep_latents: int = 0,
) -> Evaluation:
    """Sample ``samples_per_prompt`` of each record by the deterministic sampler and score them.

    ``keep_latents``: of so many samples the final latents are kept, on the CPU.
    """
    records = records[: config.num_prompts]
    media: list[Media] = []
    prompts: list[str] = []
    latents: list[Mapping[str, Tensor]] = []
    with scorer.start(len(records) * config.samples_per_prompt) as scoring:
        for batch in _batches(engine, records, config, rollout):
            if len(prompts) < keep_latents:
                latents.append(batch.latents)
            decoded = with_media(batch, engine).media or []
            scoring.add(decoded, batch.prompts, batch.metadata)
            media += decoded
            prompts += batch.prompts
        scores = scoring.result()
    kept = first_rows(latents, keep_latents)
    return Evaluation(scores=scores, media=media, prompts=prompts, latents=kept)


def first_latents(
    engine: RolloutEngine,
    records: Sequence[PromptRecord],
    config: EvalConfig,
    rollout: RolloutConfig,
    count: int,
) -> dict[str, Tensor]:
    """The final latents that `evaluate` keeps, alone: no more chunks are sampled than hold them."""
    latents: list[Mapping[str, Tensor]] = []
    for batch in _batches(engine, records[: config.num_prompts], config, rollout):
        latents.append(batch.latents)
        count_now = sum(len(next(iter(held.values()))) for held in latents)
        if count_now >= count:
            break
    return first_rows(latents, count)


def _batches(
    engine: RolloutEngine,
    records: Sequence[PromptRecord],
    config: EvalConfig,
    rollout: RolloutConfig,
) -> Iterator[RolloutBatch]:
    """The samples of an evaluation, chunk by chunk, not decoded."""
    return engine.generate(
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
        **rollout.arguments(config.num_inference_steps),
    )


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
