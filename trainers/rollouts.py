"""An iteration's samples with their scores: sampled, decoded and scored, or read from a record."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from miles_rollout import RolloutBatch, RolloutEngine, RolloutParams
from trainers import recorded
from trainers.algorithms.base import Needs
from trainers.config import TrainConfig
from trainers.data import PromptRecord
from trainers.iteration_metrics import Clock
from trainers.policy import Policy
from trainers.prompt_inputs import inputs_of
from trainers.prompt_sampler import PromptSampler
from trainers.rewards.scoring import Scorer, Scores
from trainers.short_schedule import shortened, steps_in_all

logger = logging.getLogger(__name__)


@final
class Rollouts:
    """Prompts, window and noise are functions of (seed, iteration); the weights are those of now, or
    of the old policy where an algorithm asks for one."""

    def __init__(
        self,
        config: TrainConfig,
        engine: RolloutEngine,
        policy: Policy,
        needs: Needs,
        scorer: Scorer,
        prompts: Sequence[PromptRecord],
    ) -> None:
        self.config = config
        self.engine = engine
        self.policy = policy
        self.needs = needs
        self.scorer = scorer
        self.prompts = list(prompts)
        self.sampler = PromptSampler(len(self.prompts), config.rollout.num_prompts, config.seed)

    def collect(self, iteration: int, clock: Clock) -> tuple[list[RolloutBatch], Scores]:
        """Sample, decode and score an iteration; or read one that was recorded."""
        debug = self.config.debug
        if debug.load_rollouts:
            with clock.time("rollout_s"):
                batches, scores = recorded.load_rollout(Path(debug.load_rollouts), iteration)
                return [self._on_device(batch) for batch in batches], scores
        batches = []
        chunks = self.chunks(iteration)
        with self.scorer.start(self.config.rollout.num_samples) as scoring:
            while True:
                with clock.time("rollout_s"), self._sampling_policy():
                    batch = next(chunks, None)
                if batch is None:
                    break
                with clock.time("decode_s"):
                    batches.append(with_media(batch, self.engine))
                scoring.add(batches[-1].media or [], batch.prompts, batch.metadata)
            with clock.time("reward_wait_s"):
                scores = scoring.result()
        clock.seconds["reward_s"] += scoring.seconds
        for cause in scores.errors[:3]:
            logger.warning("reward failed, sample masked: %s", cause)
        if debug.save_rollouts:
            folder = Path(self.config.output_dir) / "rollouts"
            recorded.save_rollout(folder, iteration, batches, scores)
        return batches, scores

    def _on_device(self, batch: RolloutBatch) -> RolloutBatch:
        device = next(iter(self.policy.parameters.values())).device
        latents = {name: tensor.to(device) for name, tensor in batch.latents.items()}
        return replace(batch, trajectory=batch.trajectory.to(device), latents=latents)

    def _sampling_policy(self) -> Any:
        return nullcontext() if self.needs.old_policy is None else self.policy.old()

    def _params(self, window: tuple[int, ...], num_steps: int) -> RolloutParams:
        """What the algorithm needs of the window's steps."""
        params = self.config.rollout.params(window)
        if self.needs.log_probs:
            return replace(params, return_means=self.needs.means)
        # Of an iteration without log-probs the finished samples are kept, and how the denoiser was
        # called; where the sampler is stochastic nevertheless, it is so in the window.
        return replace(params, return_step_indices=(num_steps,), call_step_indices=window)

    def _schedule(self, window: tuple[int, ...]) -> dict[str, Any]:
        """The argument by which fewer steps follow the window, where that is asked for."""
        rollout = self.config.rollout
        base = self.engine.adapter.base_sigmas(rollout.num_inference_steps)
        if rollout.steps_after_window is None or base is None:
            return {}
        return {"sigmas": shortened(base, window, rollout.steps_after_window)}

    def chunks(self, iteration: int) -> Iterator[RolloutBatch]:
        """The rollout of an iteration, chunk by chunk, not decoded."""
        rollout = self.config.rollout
        steps = self.engine.adapter.num_steps(rollout.num_inference_steps)
        window = rollout.window.choose(iteration, steps, self.config.seed)
        records = [self.prompts[i] for i in self.sampler.indices(iteration)]
        yield from self.engine.generate(
            [record.prompt for record in records],
            rollout.group_size,
            self._params(window, steps_in_all(window, steps, rollout.steps_after_window)),
            seed=self.config.seed,
            iteration=iteration,
            metadata=[record.metadata for record in records],
            inputs=inputs_of(records),
            negative_prompt=rollout.negative_prompt,
            chunk_size=rollout.rows,
            same_noise=rollout.same_noise,
            share_prefix=rollout.share_prefix,
            decode=False,
            **rollout.arguments(),
            **self._schedule(window),
        )


def with_media(batch: RolloutBatch, engine: RolloutEngine) -> RolloutBatch:
    """Decode a batch that was generated without; a video leaves the device, where it is too large."""
    media = engine.decode(batch.latents, **batch.trajectory.request)
    return replace(batch, media=[m if m.video is None else m.to("cpu") for m in media])
