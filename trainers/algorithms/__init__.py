"""The algorithms that a config can choose by ``type``. A new one: its own file, and two lines here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from trainers.algorithms.base import Algorithm
from trainers.algorithms.cps import CPSConfig, cps
from trainers.algorithms.dance_grpo import DanceGRPOConfig, dance_grpo
from trainers.algorithms.diffusion_nft import DiffusionNFT, DiffusionNFTConfig
from trainers.algorithms.flow_grpo_fast import FlowGRPOFastConfig, flow_grpo_fast
from trainers.algorithms.grpo import GRPO, GRPOConfig
from trainers.algorithms.grpo_guard import GRPOGuard, GRPOGuardConfig
from trainers.algorithms.mix_grpo import MixGRPOConfig, mix_grpo

AlgorithmConfig = Annotated[
    GRPOConfig
    | GRPOGuardConfig
    | DanceGRPOConfig
    | MixGRPOConfig
    | FlowGRPOFastConfig
    | CPSConfig
    | DiffusionNFTConfig,
    Field(discriminator="type"),
]
"""A config field of this type is chosen by ``type``."""

ALGORITHMS: dict[type, Callable[[Any], Algorithm]] = {
    GRPOConfig: GRPO,
    GRPOGuardConfig: GRPOGuard,
    DanceGRPOConfig: dance_grpo,
    MixGRPOConfig: mix_grpo,
    FlowGRPOFastConfig: flow_grpo_fast,
    CPSConfig: cps,
    DiffusionNFTConfig: DiffusionNFT,
}


def build_algorithm(config: Any) -> Algorithm:
    """The algorithm that belongs to its config."""
    return ALGORITHMS[type(config)](config)
