"""Flow-GRPO (arXiv 2505.05470): a clipped policy gradient on the steps of the sampler.

1. Every prompt gets a group of samples; a sample's advantage is its reward minus its group's mean.
2. A stochastic step has a density, so its log-prob under the weights of now is differentiable.
3. The loss pushes each step's log-prob up or down by the advantage, within a clipped ratio.
4. Optionally a KL to the reference policy holds the steps' means together.

What differs from the paper, as in the public code: log-probs are means over latent elements, the
std is the batch's by default, and there is no KL by default. The KL's std contains sqrt(-dt), as in
the paper; the published code leaves dt out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from miles_rollout import Replay
from trainers.advantages import group_advantages
from trainers.algorithm import Algorithm, LossTerms
from trainers.config_loader import STRICT
from trainers.losses import METRIC_REDUCTIONS, grpo_loss_terms, mean_kl, velocity_mse


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig:
    """Clipping, advantages and KL."""

    __pydantic_config__ = STRICT

    type: Literal["grpo"] = "grpo"
    clip_range: float | tuple[float, float] = 1e-4
    """The ratio is clipped to 1 - low .. 1 + high; log-probs are means, so ratios are near 1."""
    adv_clip_max: float = 5.0
    """Advantages are clamped to +- this."""
    advantage_std: Literal["batch", "group", "none"] = "batch"
    """Over what the rewards' std is taken; "none" is Dr.GRPO's choice."""
    kl_beta: float = 0.0
    """Weight of the KL to the base model; above 0 every trained step is replayed twice."""
    kl: Literal["mean", "velocity"] = "mean"
    """Between the steps' means, over 2 std^2 with the step's full std; or the MSE of velocities."""

    def __post_init__(self) -> None:
        bounds = self.clip_range if isinstance(self.clip_range, tuple) else (self.clip_range,)
        if not all(0 < bound < math.inf for bound in bounds):
            raise ValueError(f"clip_range must be positive and finite; got {self.clip_range}")
        if not 0 < self.adv_clip_max < math.inf:
            raise ValueError(f"adv_clip_max must be positive and finite; got {self.adv_clip_max}")
        if not 0 <= self.kl_beta < math.inf:
            raise ValueError(f"kl_beta must be finite and >= 0; got {self.kl_beta}")


@final
class GRPO(Algorithm):
    """`GRPOConfig`, at work."""

    reductions: ClassVar[Mapping[str, str]] = {**METRIC_REDUCTIONS, "kl": "mean"}

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config

    @property
    def needs_reference(self) -> bool:
        """Only for the KL."""
        return self.config.kl_beta > 0

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Reward minus the group's mean, over ``advantage_std``."""
        return group_advantages(rewards, group_ids, std=self.config.advantage_std)

    def terms(
        self,
        replay: Replay,
        old_log_probs: Tensor,
        advantages: Tensor,
        reference: Replay | None,
    ) -> LossTerms:
        """The clipped loss on the joint log-prob, plus ``kl_beta`` times the KL of all streams."""
        loss, metrics = grpo_loss_terms(
            replay.log_prob,
            old_log_probs,
            advantages,
            clip_range=self.config.clip_range,
            adv_clip_max=self.config.adv_clip_max,
        )
        if reference is not None:
            kl = torch.stack([self._kl(replay, reference, n) for n in replay.streams]).sum(0)
            loss = loss + self.config.kl_beta * kl
            metrics = {**metrics, "kl": kl.detach()}
        return LossTerms(loss=loss, metrics=metrics)

    def _kl(self, replay: Replay, reference: Replay, stream: str) -> Tensor:
        now, ref = replay.streams[stream], reference.streams[stream]
        if self.config.kl == "velocity":
            return velocity_mse(now.velocity, ref.velocity, mask=now.mask)
        return mean_kl(now.mean, ref.mean, now.std, mask=now.mask)
