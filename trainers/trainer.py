"""The loop, written once: rollout, rewards, advantages, updates; logged, saved, resumable.

An iteration is a pure function of (weights, optimizer, config, iteration number): prompts, windows
and noise are keyed by the number, so a resumed run repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from tqdm import tqdm

from miles_rollout import RolloutBatch, RolloutEngine
from trainers import recorded
from trainers.advantages import zero_std_groups
from trainers.algorithm import Algorithm
from trainers.checkpoint import (
    checkpoint_folder,
    pack_optimizer,
    prune,
    save_checkpoint,
    unpack_optimizer,
)
from trainers.config import TrainConfig
from trainers.config_loader import to_tree
from trainers.data import PromptRecord, PromptSampler
from trainers.evaluation import Evaluation, before_and_after, evaluate
from trainers.image_grid import SampleImage, save_grid
from trainers.policy import Policy
from trainers.rewards.scoring import Scorer, Scores
from trainers.tracking import Tracker
from trainers.update import TrainChunk, TrainingError, run_update

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
    ) -> None:
        self.config = config
        self.engine = engine
        self.policy = policy
        self.algorithm = algorithm
        self.scorer = scorer
        self.train_prompts = list(train_prompts)
        self.eval_prompts = list(eval_prompts)
        self.sampler = PromptSampler(
            len(self.train_prompts), config.rollout.num_prompts, config.seed
        )
        optim = config.optim
        self._settings: dict[str, Any] = {
            "lr": optim.lr,
            "betas": optim.betas,
            "eps": optim.eps,
            "weight_decay": optim.weight_decay,
        }
        self.optimizer = torch.optim.AdamW(policy.parameters.values(), **self._settings)
        self.iteration = 0
        self.num_updates = 0
        self.best: dict[str, float] = {}
        self.output_dir = Path(config.output_dir)
        self.checkpoints = self.output_dir / "checkpoints"

    # -- state ------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write the whole state as the checkpoint of the iterations that are done."""
        moments, optimizer = pack_optimizer(self.optimizer, list(self.policy.parameters))
        folder = save_checkpoint(
            checkpoint_folder(self.checkpoints, self.iteration),
            {"policy": self.policy.tensors(), "optimizer": moments},
            {
                "iteration": self.iteration,
                "num_updates": self.num_updates,
                "best": self.best,
                "optimizer": optimizer,
                "config": to_tree(self.config),
                "prompts": self._prompts(),
            },
        )
        self.policy.export(folder)
        best = self.best.get("iteration")
        protect = [] if best is None else [checkpoint_folder(self.checkpoints, int(best))]
        prune(self.checkpoints, self.config.checkpoint.keep, protect=protect)
        return folder

    def restore(
        self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
    ) -> None:
        """Continue from what `save` wrote; settings are those of the config of now."""
        self.policy.load(tensors["policy"])
        unpack_optimizer(
            self.optimizer, list(self.policy.parameters), tensors["optimizer"], state["optimizer"]
        )
        for group in self.optimizer.param_groups:
            group.update(self._settings)  # the config's, which may have changed since
        self.iteration = state["iteration"]
        self.num_updates = state["num_updates"]
        self.best = dict(state["best"])
        _warn_of_changes(
            state["config"] | {"prompts": state["prompts"]},
            to_tree(self.config) | {"prompts": self._prompts()},
        )

    def _prompts(self) -> dict[str, str]:
        """What the files held, by digest: their names in the config may stay and their lines not."""
        return {"train": _digest(self.train_prompts), "eval": _digest(self.eval_prompts)}

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
        tracker.log(self.iteration, evaluation.metrics(), images=self._eval_images(evaluation))
        if self.policy.has_reference:
            self._show_before_and_after()

    def _one_iteration(self, tracker: Tracker, bar: tqdm[Any]) -> None:
        started = time.perf_counter()
        metrics: dict[str, Any] = {}
        images: dict[str, list[SampleImage]] = {}
        every = self.config.eval.every
        clock = _Clock()
        if self.iteration == 0 or (every and self.iteration % every == 0):
            with clock.time("eval_s"):
                evaluation = self._evaluate()
            metrics |= evaluation.metrics()
            images |= self._eval_images(evaluation)
        batches, scores = self._rollout(clock)
        group_ids = torch.cat([batch.group_ids for batch in batches])
        advantages = self.algorithm.advantages(scores.total, group_ids)
        metrics |= _reward_metrics(scores, group_ids) | _log_prob_metrics(batches)
        if tracker.wants_media(self.iteration):
            images["rollout/samples"] = _batch_images(batches, scores)
        with clock.time("train_s"):
            trained, histograms = self._train(batches, advantages, ~scores.masked)
        metrics |= trained
        clock.seconds["iteration_s"] = time.perf_counter() - started
        metrics |= {f"perf/{name}": value for name, value in clock.seconds.items()}
        spent = clock.seconds["iteration_s"] - clock.seconds["eval_s"]
        metrics["perf/samples_per_s"] = len(group_ids) / spent
        histograms["train/advantages"] = advantages
        tracker.log(self.iteration, metrics, histograms=histograms, images=images)
        bar.set_postfix(
            reward=f"{metrics['rollout/reward/mean']:.3f}",
            ratio_gap=f"{metrics['train/ratio_abs_minus_1']:.0e}",
        )
        self.iteration += 1
        if self.iteration % self.config.checkpoint.every == 0:
            self.save()

    def _rollout(self, clock: _Clock) -> tuple[list[RolloutBatch], Scores]:
        """Sample, decode and score an iteration; or read one that was recorded."""
        if self.config.debug.load_rollouts:
            with clock.time("rollout_s"):
                return recorded.load_rollout(Path(self.config.debug.load_rollouts), self.iteration)
        batches = []
        chunks = self._chunks()
        while True:
            with clock.time("rollout_s"):
                batch = next(chunks, None)
            if batch is None:
                break
            with clock.time("decode_s"):
                batches.append(recorded.with_media(batch, self.engine))
        with clock.time("reward_s"):
            scores = self.scorer.score(
                [m for b in batches for m in b.media or []],
                [p for b in batches for p in b.prompts],
                [m for b in batches for m in b.metadata],
            )
        for cause in scores.errors[:3]:
            logger.warning("reward failed, sample masked: %s", cause)
        if self.config.debug.save_rollouts:
            recorded.save_rollout(self.output_dir / "rollouts", self.iteration, batches, scores)
        return batches, scores

    def _chunks(self) -> Iterator[RolloutBatch]:
        rollout = self.config.rollout
        window = rollout.window.choose(
            self.iteration, rollout.num_inference_steps, self.config.seed
        )
        records = [self.train_prompts[i] for i in self.sampler.indices(self.iteration)]
        yield from self.engine.generate(
            [record.prompt for record in records],
            rollout.group_size,
            rollout.params(window),
            seed=self.config.seed,
            iteration=self.iteration,
            metadata=[record.metadata for record in records],
            negative_prompt=rollout.negative_prompt,
            chunk_size=rollout.rows,
            same_noise=rollout.same_noise,
            decode=False,
            **rollout.sampling(),
        )

    def _train(
        self, batches: Sequence[RolloutBatch], advantages: Tensor, live: Tensor
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """All updates of an iteration; the first is compared with the rollout."""
        sizes = [len(batch.group_ids) for batch in batches]
        chunks = [
            TrainChunk(batch=batch, advantages=part, weights=weights.to(part))
            for batch, part, weights in zip(
                batches, advantages.split(sizes), live.split(sizes), strict=True
            )
        ]
        optim = self.config.optim
        per_update, left = divmod(len(chunks), optim.updates_per_iteration)
        if left:
            raise TrainingError(
                f"train: the chunks of this rollout do not split into equal updates; got "
                f"{len(chunks)} for optim.updates_per_iteration {optim.updates_per_iteration}; set "
                "a divisor"
            )
        result: dict[str, float] = {}
        records: list[dict[str, float]] = []
        histograms: dict[str, Tensor] = {}
        for update in range(optim.updates_per_iteration):
            lr = self._set_lr()
            metrics, grad_norm = run_update(
                self.engine,
                self.policy,
                self.algorithm,
                self.optimizer,
                chunks[update * per_update : (update + 1) * per_update],
                micro_batch_size=optim.micro_batch_size,
                max_grad_norm=optim.max_grad_norm,
            )
            self.num_updates += 1
            reduced = metrics.reduce() | {"loss": metrics.loss, "grad_norm": grad_norm, "lr": lr}
            records.append(reduced)
            if update == 0:
                gaps = metrics.step_gaps()
                result |= {f"train/log_prob_abs_diff/{name}": gap for name, gap in gaps.items()}
                self._check_consistency(reduced["ratio_abs_minus_1"], gaps)
            histograms[f"train/ratios/update_{update}"] = metrics.ratios
            for name in ("ratio_abs_minus_1", "clipfrac", "loss", "grad_norm"):
                result[f"train/{name}/update_{update}"] = reduced[name]
        return _over_updates(records) | result, histograms

    def _set_lr(self) -> float:
        warmup = self.config.optim.warmup_updates
        lr = self.config.optim.lr * min(1.0, (self.num_updates + 1) / max(warmup, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _check_consistency(self, gap: float, steps: Mapping[str, float]) -> None:
        bound = self.config.checks.max_ratio_abs_minus_1
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

    # -- evaluation -------------------------------------------------------------------------------

    def _evaluate(self) -> Evaluation:
        evaluation = evaluate(
            self.engine, self.eval_prompts, self.scorer, self.config.eval, self.config.rollout
        )
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
            _write_atomically(pointer, {**self.best, "folder": folder.name})
        else:
            pointer.unlink(missing_ok=True)

    def _eval_images(self, evaluation: Evaluation) -> dict[str, list[SampleImage]]:
        wanted = self.config.tracking.media_every > 0
        return {"eval/samples": _sample_images(evaluation)} if wanted else {}

    def _show_before_and_after(self) -> None:
        pair = before_and_after(
            self.engine,
            self.eval_prompts,
            self.config.eval,
            self.config.rollout,
            self.policy.reference(),
            self.scorer,
        )
        rows = [[*_sample_images(e)] for e in pair]
        samples = [s for both in zip(*rows, strict=True) for s in both]
        captions = [
            f"{'before' if i % 2 == 0 else 'after'}: {s.caption}" for i, s in enumerate(samples)
        ]
        save_grid(
            self.output_dir / "samples" / "before_after.png", [s.image for s in samples], captions
        )


class _Clock:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(
            ("eval_s", "rollout_s", "decode_s", "reward_s", "train_s"), 0.0
        )

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started


_FIRST_UPDATE = ("ratio_abs_minus_1", "log_prob_mean_abs_diff", "log_prob_max_abs_diff")
"""There the policy is the one that sampled, so these are pure error; later they are the training."""


def _over_updates(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """``train/*`` of an iteration: the mean over its updates, except for what tells of errors."""
    means = {name: sum(r[name] for r in records) / len(records) for name in records[0]}
    means |= {name: records[0][name] for name in _FIRST_UPDATE if name in means}
    means["lr"] = records[-1]["lr"]
    return {f"train/{name}": value for name, value in means.items()}


def _reward_metrics(scores: Scores, group_ids: Tensor) -> dict[str, float]:
    live = scores.total[~scores.masked]
    metrics = {
        "rollout/reward/mean": live.mean().item(),
        "rollout/reward/std": live.std().item() if len(live) > 1 else 0.0,
        "rollout/reward/zero_std_groups": zero_std_groups(scores.total, group_ids),
        "rollout/reward/masked": int(scores.masked.sum()),
    }
    means = scores.component_means()
    return metrics | {f"rollout/reward/{name}": value for name, value in means.items()}


def _log_prob_metrics(batches: Sequence[RolloutBatch]) -> dict[str, float]:
    first = batches[0].trajectory
    joint = torch.cat([b.trajectory.log_probs for b in batches])
    metrics = {"rollout/log_prob/mean": joint[:, list(first.replayable_steps)].mean().item()}
    for name, stream in first.streams.items():
        log_probs = torch.cat([b.trajectory.streams[name].log_probs for b in batches])
        for step in stream.sde_step_indices:
            metrics[f"rollout/log_prob/{name}/step_{step}"] = log_probs[:, step].mean().item()
    return metrics


def _batch_images(batches: Sequence[RolloutBatch], scores: Scores) -> list[SampleImage]:
    media = [m for b in batches for m in b.media or []]
    prompts = [p for b in batches for p in b.prompts]
    return [
        SampleImage(image=m.image, prompt=p, reward=r)
        for m, p, r in zip(media, prompts, scores.total.tolist(), strict=False)
        if m.image is not None
    ]


def _sample_images(evaluation: Evaluation) -> list[SampleImage]:
    rewards = evaluation.scores.total.tolist()
    return [
        SampleImage(image=m.image, prompt=p, reward=r)
        for m, p, r in zip(evaluation.media, evaluation.prompts, rewards, strict=True)
        if m.image is not None
    ]


def _warn_of_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Say which settings of a resumed run are not those of the run that it continues."""
    ours = ("iterations", "resume", "output_dir", "tracking", "debug")
    before, now = (
        _leaves({key: value for key, value in tree.items() if key not in ours})
        for tree in (saved, current)
    )
    changed = [
        f"{key} {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if changed:
        logger.warning("resume: settings differ from the saved run's: %s", "; ".join(changed))


def _digest(records: Sequence[PromptRecord]) -> str:
    content = repr([(record.prompt, dict(record.metadata)) for record in records])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        inner = _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {}
        leaves |= inner or {f"{prefix}{key}": value}
    return leaves


def _write_atomically(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(dict(content), indent=1) + "\n")
    os.replace(partial, path)
