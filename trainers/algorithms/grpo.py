"""Flow-GRPO (arXiv 2505.05470): a clipped policy gradient on the steps of the sampler.

1. Every prompt gets a group of samples; a sample's advantage is its reward minus its group's mean.
2. A stochastic step has a density, so its log-prob under the weights of now is differentiable.
3. The loss pushes each step's log-prob up or down by the advantage, within a clipped ratio.
4. Optionally a KL to the reference policy holds the steps' means together.

What differs from the paper, as in the public code: log-probs are means over latent elements, the
std is the batch's by default, and there is no KL by default. The KL's std contains sqrt(-dt), as in
the paper; the published code leaves dt out, and so does ``kl: mean_without_dt``.

Its relatives differ in their defaults and in what they ask of the rollout: their configs derive from
`PolicyGradientConfig`, and `GRPO` trains them all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

from torch import Tensor

from miles_rollout import Replay, StreamReplay
from trainers.advantages import Advantages
from trainers.algorithms.base import Algorithm, LossTerms, Needs, Reference
from trainers.algorithms.group_relative import GroupRelativeConfig, group_relative
from trainers.config_loader import STRICT
from trainers.losses import METRIC_REDUCTIONS, grpo_loss_terms, mean_kl, velocity_mse
from trainers.rewards.scoring import Scores
from trainers.trained_step import TrainedStep
from trainers.windows import TrainedFraction

KL = Literal["mean", "mean_without_dt", "velocity"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradientConfig(GroupRelativeConfig):
    """Clipping, KL, and which steps are trained. Not an algorithm by itself."""

    __pydantic_config__ = STRICT

    clip_range: float | tuple[float, float] = 1e-4
    """The ratio is clipped to 1 - low .. 1 + high; log-probs are means, so ratios are near 1."""
    kl_beta: float = 0.0
    """Weight of the KL to the reference; above 0 every trained step is replayed twice."""
    kl: KL = "mean"
    """Between the steps' means, over 2 std^2 with the step's full std or with its std over sqrt(-dt);
    or the MSE of velocities."""
    reference: Reference = "base"
    """Of the KL: the model without its LoRA, or with the one that ``model.lora.start`` names."""
    timestep_fraction: float = 1.0
    """So much of the window is trained, rounded down: 0.99 leaves one step out."""
    timestep_order: Literal["first", "random"] = "first"
    """The earliest steps of the window, or random ones, drawn anew for every chunk."""

    def __post_init__(self) -> None:
        GroupRelativeConfig.__post_init__(self)
        bounds = self.clip_range if isinstance(self.clip_range, tuple) else (self.clip_range,)
        if not all(0 < bound < math.inf for bound in bounds):
            raise ValueError(f"clip_range must be positive and finite; got {self.clip_range}")
        if not 0 <= self.kl_beta < math.inf:
            raise ValueError(f"kl_beta must be finite and >= 0; got {self.kl_beta}")
        if self.reference != "base" and not self.kl_beta:
            raise ValueError(
                f"reference has no effect at kl_beta 0; got {self.reference!r}; set kl_beta above 0"
            )
        if self.kl != "mean" and not self.kl_beta:
            raise ValueError(
                f"kl has no effect at kl_beta 0; got {self.kl!r}; set kl_beta above 0, or leave it out"
            )
        if not 0 < self.timestep_fraction <= 1:
            raise ValueError(
                f"timestep_fraction must be within 0..1, 0 excluded; got {self.timestep_fraction}"
            )

    def policy_gradient_needs(self) -> Needs:
        """What follows of the settings above."""
        return replace(
            self.group_needs(),
            reference=self.reference if self.kl_beta else None,
            fraction=TrainedFraction(fraction=self.timestep_fraction, order=self.timestep_order),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig(PolicyGradientConfig):
    """Flow-GRPO's setting."""

    __pydantic_config__ = STRICT

    type: Literal["grpo"] = "grpo"


@final
class GRPO(Algorithm):
    """Any `PolicyGradientConfig`, at work; ``needs`` says what is peculiar to a relative."""

    reductions: ClassVar[Mapping[str, str]] = {**METRIC_REDUCTIONS, "kl": "mean"}

    def __init__(self, config: PolicyGradientConfig, **needs: Any) -> None:
        self.config = config
        self._needs = needs

    @property
    def needs(self) -> Needs:
        """A reference only for the KL."""
        return replace(self.config.policy_gradient_needs(), **self._needs)

    def advantages(self, scores: Scores, group_ids: Tensor) -> Advantages:
        """Reward minus the group's mean, over ``advantage_std``."""
        return group_relative(self.config, scores, group_ids)

    def terms(self, step: TrainedStep) -> LossTerms:
        """The clipped loss on the joint log-prob, plus ``kl_beta`` times the KL of all streams."""
        config, replay = self.config, step.replay()
        loss, metrics = grpo_loss_terms(
            replay.log_prob,
            step.old_log_probs,
            step.advantages,
            clip_range=config.clip_range,
            adv_clip_max=config.adv_clip_max,
        )
        if config.kl_beta:
            kl = kl_to_reference(config, step, replay)
            loss = loss + config.kl_beta * kl
            metrics = {**metrics, "kl": kl.detach()}
        return LossTerms(loss=config.step_weight(step.index) * loss, metrics=metrics)


def kl_to_reference(config: PolicyGradientConfig, step: TrainedStep, replay: Replay) -> Tensor:
    """[R]: the configured distance to the reference, joined over the streams as log-probs are."""
    reference = step.replay(config.reference)
    distances = {
        name: distance(config.kl, now, reference.streams[name], step.sqrt_dt(name))
        for name, now in replay.streams.items()
    }
    return step.trajectory.joint(distances, step.index)


def distance(kind: KL, now: StreamReplay, reference: StreamReplay, sqrt_dt: float) -> Tensor:
    """[R]: how far a step of one stream is from the reference's, over its live elements."""
    if kind == "velocity":
        return velocity_mse(now.velocity, reference.velocity, mask=now.mask)
    std = now.std / sqrt_dt if kind == "mean_without_dt" else now.std
    return mean_kl(now.mean, reference.mean, std, mask=now.mask)
