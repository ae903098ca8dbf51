"""The numbers of an iteration: of its rewards, its log-probs, its updates, and its seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from miles_rollout import RolloutBatch
from trainers.advantages import zero_std_groups
from trainers.rewards.scoring import Scores

_FIRST_UPDATE = ("ratio_abs_minus_1", "log_prob_mean_abs_diff", "log_prob_max_abs_diff")
"""There the policy is the one that sampled, so these are pure error; later they are the training."""

_EACH_UPDATE = ("ratio_abs_minus_1", "clipfrac", "loss", "grad_norm")
"""Told for every update of an iteration as well, where an algorithm has them."""


class Clock:
    """Seconds by name; of ``reward_s``, what the rest of the iteration did not hide is
    ``reward_wait_s``."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(
            ("eval_s", "rollout_s", "decode_s", "reward_s", "reward_wait_s", "train_s"), 0.0
        )

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add what the block takes to ``name``."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started


def reward_metrics(scores: Scores, group_ids: Tensor) -> dict[str, float]:
    """``rollout/reward/*``, over the samples whose reward did not fail."""
    live = scores.total[~scores.masked]
    metrics = {
        "rollout/reward/mean": live.mean().item(),
        "rollout/reward/std": live.std().item() if len(live) > 1 else 0.0,
        "rollout/reward/zero_std_groups": zero_std_groups(scores.total, group_ids),
        "rollout/reward/masked": int(scores.masked.sum()),
    }
    means = scores.component_means()
    return metrics | {f"rollout/reward/{name}": value for name, value in means.items()}


def log_prob_metrics(batches: Sequence[RolloutBatch]) -> dict[str, float]:
    """``rollout/log_prob/mean`` of the joint, and ``rollout/log_prob/<stream>/step_<i>``."""
    first = batches[0].trajectory
    steps = list(first.replayable_steps)
    metrics: dict[str, float] = {}
    if steps:
        joint = torch.cat([b.trajectory.log_probs for b in batches])
        metrics["rollout/log_prob/mean"] = joint[:, steps].mean().item()
    for name, stream in first.streams.items():
        log_probs = torch.cat([b.trajectory.streams[name].log_probs for b in batches])
        for step in stream.sde_step_indices:
            metrics[f"rollout/log_prob/{name}/step_{step}"] = log_probs[:, step].mean().item()
    return metrics


def update_metrics(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """``train/*`` of an iteration from those of its updates, in order.

    The mean over the updates, except for what tells of errors, which is that of the first, and the
    learning rate, which is that of the last. Empty where no update had a sample to train.
    """
    if not records:
        return {}
    means = {name: sum(r[name] for r in records) / len(records) for name in records[0]}
    means |= {n: records[0][n] for n in means if n.partition("/")[0] in _FIRST_UPDATE}
    means["lr"] = records[-1]["lr"]
    result = {f"train/{name}": value for name, value in means.items()}
    for update, record in enumerate(records):
        told = {n: record[n] for n in _EACH_UPDATE if n in record}
        result |= {f"train/{name}/update_{update}": value for name, value in told.items()}
    return result
