"""Flow-CPS (arXiv 2509.05952): GRPO on the coefficients-preserving sampler.

Its steps keep the noise level that the schedule has at their end, so samples stay clean, and have no
singularity at sigma 1. The published log-prob is minus the squared distance without the Gaussian's
scale, so ratios, and the clip range with them, are not comparable with those of Flow-SDE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainers.algorithms.grpo import GRPO, PolicyGradientConfig
from trainers.config_loader import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class CPSConfig(PolicyGradientConfig):
    """The published setting."""

    __pydantic_config__ = STRICT

    type: Literal["cps"] = "cps"
    clip_range: float | tuple[float, float] = 1e-5
    """The ratio is clipped to 1 - low .. 1 + high."""


def cps(config: CPSConfig) -> GRPO:
    """`CPSConfig`, at work: for steps of its own sampler."""
    return GRPO(config, sde_types=("cps",))
