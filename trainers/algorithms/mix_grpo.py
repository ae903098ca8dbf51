"""MixGRPO (arXiv 2507.21802): GRPO in a window that moves over the schedule during the run.

Steps outside of the window are deterministic, so only the window's are trained, and with
``rollout.share_prefix`` those before it are computed once a prompt, with ``rollout.steps_after_window``
those after it are fewer and larger, of first order. How the window moves is ``rollout.window`` of type
``progressive`` (or ``random``). Advantages go by the group's std, and those of several rewards are
added after each was scaled by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainers.advantages import Std
from trainers.algorithms.grpo import GRPO, PolicyGradientConfig
from trainers.config_loader import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class MixGRPOConfig(PolicyGradientConfig):
    """The published setting."""

    __pydantic_config__ = STRICT

    type: Literal["mix_grpo"] = "mix_grpo"
    advantage_std: Std = "group"
    """Over what the rewards' std is taken."""
    advantage_epsilon: float = 1e-8
    """Added to that std."""
    multi_reward: Literal["sum", "gdpo"] = "gdpo"
    """Of several rewards: the advantage of their weighted sum, or the weighted sum of the advantages
    that each has by itself."""


def mix_grpo(config: MixGRPOConfig) -> GRPO:
    """`MixGRPOConfig`, at work: the window has to move."""
    return GRPO(config, moving_window=True)
