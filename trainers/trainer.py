"""The loop, written once: rollout, rewards, advantages, updates; logged, saved, resumable.

An iteration is a pure function of (weights, optimizer, config, iteration number): prompts, windows
and noise are keyed by the number, so a resumed run repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor
from tqdm import tqdm

from miles_rollout import RolloutBatch, RolloutEngine
from trainers.advantages import Advantages
from trainers.algorithms.base import Algorithm
from trainers.checkpoint import (
    checkpoint_folder,
    pack_optimizer,
    prune,
    save_checkpoint,
    unpack_optimizer,
)
from trainers.config import TrainConfig
from trainers.config_loader import to_tree
from trainers.data import PromptRecord
from trainers.drift import Drift
from trainers.ema import EMA
from trainers.evaluation import Evaluation, before_and_after, evaluate, first_latents
from trainers.iteration_metrics import Clock, log_prob_metrics, reward_metrics, update_metrics
from trainers.monitors import Monitors, diversity_metrics
from trainers.policy import Policy
from trainers.rewards.scoring import Scorer
from trainers.rollouts import Rollouts
from trainers.run_state import (
    evaluation_digest,
    prompt_digests,
    warn_of_changes,
    write_atomically,
)
from trainers.samples import Sample, samples_of, save_samples
from trainers.tracking import Tracker
from trainers.update import TrainChunk, TrainingError, run_update
from trainers.windows import AllSteps, FixedWindow

logger = logging.getLogger(__name__)


@final
class Trainer:
    """Owns the optimizer and the counters of one run; everything else is handed in."""

    def __init__(
        self,
        config: TrainConfig,
        engine: RolloutEngine,
        policy: Policy,
        algorithm: Algorithm,
        scorer: Scorer,
        train_prompts: Sequence[PromptRecord],
        eval_prompts: Sequence[PromptRecord],
        eval_scorer: Scorer | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.policy = policy
        self.algorithm = algorithm
        self.scorer = scorer
        self.rollouts = Rollouts(config, engine, policy, algorithm.needs, scorer, train_prompts)
        self.eval_prompts = list(eval_prompts)
        self.eval_scorer = eval_scorer or scorer
        self.monitors = Monitors(config.monitors, self.eval_scorer.untrained)
        count = config.monitors.drift_samples
        self.drift = Drift(
            lambda: first_latents(engine, self.eval_prompts, config.eval, config.rollout, count),
            policy.reference if policy.has_reference else None,
        )
        optim = config.optim
        self._settings: dict[str, Any] = {
            "lr": optim.lr,
            "betas": optim.betas,
            "eps": optim.eps,
            "weight_decay": optim.weight_decay,
        }
        self.optimizer = torch.optim.AdamW(policy.parameters.values(), **self._settings)
        self.ema = None if config.ema is None else EMA(config.ema, policy.parameters)
        self.iteration = 0
        self.num_updates = 0
        self.best: dict[str, float] = {}
        self._use_told = False
        self._clipping_told = False
        self.output_dir = Path(config.output_dir)
        self.checkpoints = self.output_dir / "checkpoints"

    # -- state ------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write the whole state as the checkpoint of the iterations that are done."""
        moments, optimizer = pack_optimizer(self.optimizer, list(self.policy.parameters))
        averaged = {} if self.ema is None else {"ema": self.ema.tensors()}
        folder = save_checkpoint(
            checkpoint_folder(self.checkpoints, self.iteration),
            {**self.policy.state(), **averaged, "optimizer": moments},
            {
                "ema_updates": None if self.ema is None else self.ema.num_updates,
                "iteration": self.iteration,
                "num_updates": self.num_updates,
                "best": self.best,
                "optimizer": optimizer,
                "config": to_tree(self.config),
                "prompts": self._prompts(),
                "monitors": self.monitors.state(),
            },
        )
        self.export(folder)
        best = self.best.get("iteration")
        protect = [] if best is None else [checkpoint_folder(self.checkpoints, int(best))]
        prune(self.checkpoints, self.config.checkpoint.keep, protect=protect)
        return folder

    def export(self, folder: Path) -> None:
        """Write a LoRA for stock diffusers: the average, where one is kept and wanted."""
        with self._averaged("export"):
            self.policy.export(folder)

    def _averaged(self, use: Literal["evaluate", "export"]) -> AbstractContextManager[None]:
        if self.ema is None or not getattr(self.ema.config, use):
            return nullcontext()
        return self.ema.applied(self.policy.parameters)

    def restore(
        self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
    ) -> None:
        """Continue from what `save` wrote; settings are those of the config of now."""
        self.policy.restore(tensors)
        self._restore_average(tensors, state)
        unpack_optimizer(
            self.optimizer, list(self.policy.parameters), tensors["optimizer"], state["optimizer"]
        )
        for group in self.optimizer.param_groups:
            group.update(self._settings)  # the config's, which may have changed since
        self.iteration = state["iteration"]
        self.num_updates = state["num_updates"]
        self.best = dict(state["best"])
        self.monitors.load(state.get("monitors", {}))
        warn_of_changes(
            state["config"] | {"prompts": state["prompts"]},
            to_tree(self.config) | {"prompts": self._prompts()},
        )

    def _restore_average(
        self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
    ) -> None:
        if self.ema is None:
            return
        if "ema" not in tensors:
            raise TrainingError(
                "resume: the checkpoint has no average of its weights; got ema in the config only; "
                "set ema null, as in the saved run"
            )
        self.ema.load(tensors["ema"], state["ema_updates"])

    def _prompts(self) -> dict[str, str]:
        return prompt_digests(self.rollouts.prompts, self.eval_prompts)

    # -- the loop ---------------------------------------------------------------------------------

    def run(self, tracker: Tracker) -> None:
        """Train to ``config.iterations``, with an evaluation before, between and after."""
        total = self.config.iterations
        with tqdm(total=total, initial=self.iteration, unit="it", dynamic_ncols=True) as bar:
            while self.iteration < total:
                self._one_iteration(tracker, bar)
                bar.update()
        # Saved first: an evaluation may fail.
        if not checkpoint_folder(self.checkpoints, self.iteration).exists():
            self.save()
        evaluation = self._evaluate()
        tracker.log(self.iteration, evaluation.metrics(), samples=self._eval_samples(evaluation))
        if self.policy.has_reference:
            self._show_before_and_after()

    def _one_iteration(self, tracker: Tracker, bar: tqdm[Any]) -> None:
        started = time.perf_counter()
        metrics: dict[str, Any] = {}
        samples: dict[str, list[Sample]] = {}
        every = self.config.eval.every
        clock = Clock()
        if self.iteration == 0 or (every and self.iteration % every == 0):
            with clock.time("eval_s"):
                evaluation = self._evaluate()
            metrics |= evaluation.metrics()
            samples |= self._eval_samples(evaluation)
        batches, scores = self.rollouts.collect(self.iteration, clock)
        group_ids = torch.cat([batch.group_ids for batch in batches])
        advantages = self.algorithm.advantages(scores, group_ids)
        metrics |= reward_metrics(scores, group_ids) | log_prob_metrics(batches)
        diversity = diversity_metrics([b.latents for b in batches], group_ids)
        self.monitors.watch_diversity(diversity)
        metrics |= diversity
        media = [m for b in batches for m in b.media or []]  # a recorded rollout has none
        if media and tracker.wants_media(self.iteration):
            prompts = [p for b in batches for p in b.prompts]
            samples["rollout/samples"] = samples_of(media, prompts, scores.total.tolist())
        del media
        with clock.time("train_s"):
            trained, histograms = self._train(batches, advantages, ~scores.masked)
        metrics |= trained
        clock.seconds["iteration_s"] = time.perf_counter() - started
        if self.algorithm.needs.old_policy is not None:
            decay = self.algorithm.needs.old_policy.of(self.iteration)
            self.policy.update_old(decay)
            metrics["train/old_policy_decay"] = decay
        metrics |= {f"perf/{name}": value for name, value in clock.seconds.items()}
        spent = clock.seconds["iteration_s"] - clock.seconds["eval_s"]
        metrics["perf/samples_per_s"] = len(group_ids) / spent
        histograms["train/advantages"] = advantages.values
        tracker.log(self.iteration, metrics, histograms=histograms, samples=samples)
        shown = {"reward": f"{metrics['rollout/reward/mean']:.3f}"}
        if "train/ratio_abs_minus_1" in metrics:
            shown["ratio_gap"] = f"{metrics['train/ratio_abs_minus_1']:.0e}"
        bar.set_postfix(shown)
        self.iteration += 1
        if self.iteration % self.config.checkpoint.every == 0:
            self.save()

    def _train(
        self, batches: Sequence[RolloutBatch], advantages: Advantages, live: Tensor
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """All updates of an iteration; the first is compared with the rollout."""
        chunks = self._chunks(batches, advantages, live)
        optim = self.config.optim
        per_update, left = divmod(len(chunks), optim.updates_per_iteration)
        if left:
            raise TrainingError(
                f"train: the chunks of this rollout do not split into equal updates; got "
                f"{len(chunks)} for optim.updates_per_iteration {optim.updates_per_iteration}; set "
                "a divisor"
            )
        gaps: dict[str, float] = {}
        records: list[dict[str, float]] = []
        histograms: dict[str, Tensor] = {}
        for update in range(optim.updates_per_iteration):
            part = chunks[update * per_update : (update + 1) * per_update]
            if not any(chunk.weights.any() for chunk in part):
                logger.warning(
                    "train: update %d of iteration %d has no sample to train, so no step is made; got "
                    "%d trained samples in all; set optim.updates_per_iteration lower",
                    update,
                    self.iteration,
                    sum(int(chunk.weights.sum()) for chunk in chunks),
                )
                continue
            lr = self._set_lr()
            metrics, grad_norm = run_update(
                self.engine,
                self.policy,
                self.algorithm,
                self.optimizer,
                part,
                micro_batch_size=optim.micro_batch_size,
                max_grad_norm=optim.max_grad_norm,
            )
            self.num_updates += 1
            if self.ema is not None:
                self.ema.update(self.policy.parameters)
            reduced = metrics.reduce()
            if not records:
                gaps = metrics.step_gaps()
                self._check_consistency(reduced, gaps)
                self._check_use()
            records.append(reduced | {"loss": metrics.loss, "grad_norm": grad_norm, "lr": lr})
            if metrics.ratios is not None:
                histograms[f"train/ratios/update_{update}"] = metrics.ratios
        told = {f"train/log_prob_abs_diff/{name}": gap for name, gap in gaps.items()}
        told["train/num_samples"] = sum(chunk.weights.sum().item() for chunk in chunks)
        return update_metrics(records) | told, histograms

    def _chunks(
        self, batches: Sequence[RolloutBatch], advantages: Advantages, live: Tensor
    ) -> list[TrainChunk]:
        sizes = [len(batch.group_ids) for batch in batches]
        trained = advantages.trained
        weights = live if trained is None else live & trained
        rows: list[list[int] | None] = [None] * len(batches)
        if trained is not None and not trained.all():
            rows = [part.nonzero()[:, 0].tolist() for part in trained.split(sizes)]
        parts = zip(
            batches, advantages.values.split(sizes), weights.split(sizes), rows, strict=True
        )
        key = (self.config.seed, self.iteration)
        return [
            TrainChunk(batch=batch, advantages=value, weights=weight.to(value), rows=row, key=key)
            for batch, value, weight, row in parts
        ]

    def _set_lr(self) -> float:
        warmup = self.config.optim.warmup_updates
        lr = self.config.optim.lr * min(1.0, (self.num_updates + 1) / max(warmup, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _check_consistency(self, metrics: Mapping[str, float], steps: Mapping[str, float]) -> None:
        bound = self.config.checks.max_ratio_abs_minus_1
        # An algorithm may scale its ratio down; a log-prob's gap is that of the plain ratio.
        gap = max(metrics.get("ratio_abs_minus_1", 0.0), *steps.values(), 0.0)
        clipped = metrics.get("clipfrac", 0.0)
        if clipped and not self._clipping_told:
            self._clipping_told = True
            logger.warning(
                "train: ratios of the first update are clipped, where the policy is the one that "
                "sampled; got clipfrac %.3g and |ratio - 1| %.3g; raise algorithm.clip_range above "
                "that, or see why replay differs (optim.micro_batch_size, model.dtype)",
                clipped,
                metrics["ratio_abs_minus_1"],
            )
        if gap <= bound:
            return
        worst = max(steps, key=lambda name: steps[name])
        advice = "set optim.micro_batch_size null, or compare dtype and threads with the rollout's"
        if self.config.debug.load_rollouts:
            advice = "a recorded rollout fits the weights that sampled it: load those, record anew"
        raise TrainingError(
            f"train: replay is not the rollout, so the ratio of the first update is not 1; got "
            f"|ratio - 1| {gap:.3g} above {bound:.3g}, largest at {worst} (log-prob gap "
            f"{steps[worst]:.3g}); {advice}, or raise checks.max_ratio_abs_minus_1"
        )

    def _check_use(self) -> None:
        """Say once which denoisers have no part in any update: those of a window that stays."""
        stays = isinstance(self.config.rollout.window, AllSteps | FixedWindow)
        if self._use_told or not stays:
            return
        self._use_told = True
        unused = self.policy.without_gradient()
        if unused:
            logger.warning(
                "no step of this update used %s; got model.denoisers %s; name there those that "
                "rollout.window reaches",
                ", ".join(unused),
                f"[{', '.join(self.policy.modules)}]",
            )

    # -- evaluation -------------------------------------------------------------------------------

    def _evaluate(self) -> Evaluation:
        count = self.config.monitors.drift_samples
        with self._averaged("evaluate"):
            evaluation = evaluate(
                self.engine,
                self.eval_prompts,
                self.eval_scorer,
                self.config.eval,
                self.config.rollout,
                keep_latents=count,
            )
        digest = evaluation_digest(self._prompts()["eval"], self.config.eval)
        self.monitors.watch_evaluation(evaluation.scores, digest)
        if count:
            evaluation.drift.update(self.drift.metrics(evaluation.latents, self.iteration))
        if evaluation.mean > self.best.get("reward", -float("inf")):
            self.best = {"iteration": self.iteration, "reward": evaluation.mean}
            if self.iteration:
                self.save()
        self._point_to_best()
        return evaluation

    def _point_to_best(self) -> None:
        """Keep ``best.json`` true, also after a kill at any moment."""
        folder = checkpoint_folder(self.checkpoints, int(self.best["iteration"]))
        pointer = self.checkpoints / "best.json"
        if folder.exists():
            write_atomically(pointer, {**self.best, "folder": folder.name})
        else:
            pointer.unlink(missing_ok=True)

    def _eval_samples(self, evaluation: Evaluation) -> dict[str, list[Sample]]:
        wanted = self.config.tracking.media_every > 0
        return {"eval/samples": evaluation.samples()} if wanted else {}

    def _show_before_and_after(self) -> None:
        with self._averaged("evaluate"):
            pair = before_and_after(
                self.engine,
                self.eval_prompts,
                self.config.eval,
                self.config.rollout,
                self.policy.reference(),
                self.scorer,
                count=min(self.config.tracking.num_media, 8),
            )
        samples = [s for both in zip(*(e.samples() for e in pair), strict=True) for s in both]
        captions = [
            f"{'before' if i % 2 == 0 else 'after'}: {s.caption}" for i, s in enumerate(samples)
        ]
        save_samples(self.output_dir / "samples", "before_after", samples, captions)
