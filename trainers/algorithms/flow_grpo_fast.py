"""Flow-GRPO-Fast: GRPO that trains one to three steps an iteration.

Few stochastic steps make most of an iteration's backward passes unnecessary; two trained steps are
published to match ten. With ``rollout.same_noise`` and ``rollout.share_prefix`` the steps before the
window are computed once a prompt as well. The clip range is smaller than GRPO's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainers.algorithms.grpo import GRPO, PolicyGradientConfig
from trainers.config_loader import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowGRPOFastConfig(PolicyGradientConfig):
    """The published setting."""

    __pydantic_config__ = STRICT

    type: Literal["flow_grpo_fast"] = "flow_grpo_fast"
    clip_range: float | tuple[float, float] = 1e-5
    """The ratio is clipped to 1 - low .. 1 + high."""


def flow_grpo_fast(config: FlowGRPOFastConfig) -> GRPO:
    """`FlowGRPOFastConfig`, at work: a window of at most three steps."""
    return GRPO(config, max_trained_steps=3)
