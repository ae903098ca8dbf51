"""GRPO-Guard (arXiv 2510.22319): the ratio centred and scaled alike in every step.

The log-ratio of a step is biased below 0 and the wider the smaller the step's noise, so a clip range
that fits one step never acts in another. Here the bias is added back, sample by sample, from the mean
that the rollout kept, the scale is taken out, and the loss is divided by ``-dt``. It matters where
steps of very different noise are trained together. Clip ranges are smaller: 2e-6 to 4e-6 at 512 x 512.

Of several streams each has a ratio of its own; their losses are joined as log-probs are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from trainers.advantages import Advantages, Std
from trainers.algorithms.base import Algorithm, LossTerms, Needs
from trainers.algorithms.group_relative import group_relative
from trainers.algorithms.grpo import PolicyGradientConfig, kl_to_reference
from trainers.config_loader import STRICT
from trainers.losses import METRIC_REDUCTIONS, grpo_guard_loss_terms
from trainers.rewards.scoring import Scores
from trainers.trained_step import TrainedStep


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOGuardConfig(PolicyGradientConfig):
    """The published setting for pictures of 512 x 512."""

    __pydantic_config__ = STRICT

    type: Literal["grpo_guard"] = "grpo_guard"
    clip_range: float | tuple[float, float] = 2e-6
    """Of the normalised ratio, whose spread is that of the change in the mean."""
    advantage_std: Std = "group"
    """Over what the rewards' std is taken."""


@final
class GRPOGuard(Algorithm):
    """`GRPOGuardConfig`, at work."""

    reductions: ClassVar[Mapping[str, str]] = {**METRIC_REDUCTIONS, "kl": "mean"}

    def __init__(self, config: GRPOGuardConfig) -> None:
        self.config = config

    @property
    def needs(self) -> Needs:
        """The rollout's means, and log-probs that are a Gaussian's: those of cps are not."""
        shared = self.config.policy_gradient_needs()
        return replace(shared, means=True, sde_types=("sde", "dance_sde"))

    def advantages(self, scores: Scores, group_ids: Tensor) -> Advantages:
        """Reward minus the group's mean, over ``advantage_std``."""
        return group_relative(self.config, scores, group_ids)

    def terms(self, step: TrainedStep) -> LossTerms:
        """The guarded loss of every stream, joined, plus ``kl_beta`` times the KL of all."""
        config, replay = self.config, step.replay()
        losses: dict[str, Tensor] = {}
        told: list[Mapping[str, Tensor]] = []
        for name, now in replay.streams.items():
            held = step.trajectory.streams[name]
            root = step.sqrt_dt(name)
            losses[name], metrics = grpo_guard_loss_terms(
                now.log_prob,
                held.log_probs[:, step.index],
                step.advantages,
                mean=now.mean,
                old_mean=held.means[step.index],
                std_dev_t=now.std / root,
                sqrt_dt=root,
                clip_range=config.clip_range,
                adv_clip_max=config.adv_clip_max,
                mask=now.mask,
            )
            told.append(metrics)
        loss = step.trajectory.joint(losses, step.index)
        terms = {name: torch.stack([m[name] for m in told]) for name in told[0]}
        worst = {
            n: t.amax(0) if METRIC_REDUCTIONS[n] == "max" else t.mean(0) for n, t in terms.items()
        }
        if config.kl_beta:
            kl = kl_to_reference(config, step, replay)
            loss = loss + config.kl_beta * kl
            worst["kl"] = kl.detach()
        return LossTerms(loss=config.step_weight(step.index) * loss, metrics=worst)
