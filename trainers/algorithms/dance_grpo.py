"""DanceGRPO (arXiv 2505.07818): GRPO on random steps of a sampler with constant noise.

The SDE's noise does not go by sigma, advantages go by the group's std, and of the window only a random
part is trained: 60 percent of the steps. The rollout's part of the published setting is set there:
``sde_type: dance_sde``, ``noise_level`` 0.3 for pictures and 0.25 for videos, ``same_noise: true``,
``window: {type: all, exclude_last: true}``.

The public code draws these steps anew for each sample. Here the rows of a chunk share the draw, since
they are replayed together, as they were sampled; with ``rollout.chunk_size: 1`` it is each sample's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainers.advantages import Std
from trainers.algorithms.grpo import GRPO, PolicyGradientConfig
from trainers.config_loader import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class DanceGRPOConfig(PolicyGradientConfig):
    """The published setting for pictures."""

    __pydantic_config__ = STRICT

    type: Literal["dance_grpo"] = "dance_grpo"
    advantage_std: Std = "group"
    """Over what the rewards' std is taken."""
    advantage_epsilon: float = 1e-8
    """Added to that std."""
    timestep_fraction: float = 0.6
    """So much of the window is trained, rounded down."""
    timestep_order: Literal["first", "random"] = "random"
    """The earliest steps of the window, or random ones, drawn anew for every chunk."""


def dance_grpo(config: DanceGRPOConfig) -> GRPO:
    """`DanceGRPOConfig`, at work: for steps of its own SDE."""
    return GRPO(config, sde_types=("dance_sde",))
