"""The algorithms that a config can choose by ``type``. A new one: its own file, and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainers.algorithm import Algorithm
from trainers.grpo import GRPO, GRPOConfig

AlgorithmConfig = GRPOConfig
"""A second one makes it ``Annotated[GRPOConfig | OtherConfig, Field(discriminator="type")]``."""

ALGORITHMS: dict[type, Callable[[Any], Algorithm]] = {GRPOConfig: GRPO}


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that belongs to its config."""
    return ALGORITHMS[type(config)](config)
