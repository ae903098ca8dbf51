"""Which denoising steps of an iteration are stochastic and trained: the SDE window.

A window is a pure function of (seed, iteration): the same on every rank and after a resume,
whatever else draws random numbers. Steps and iterations count from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from miles_rollout.noise import derive_seed
from trainers.config_loader import STRICT, ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class AllSteps:
    """Every step."""

    __pydantic_config__ = STRICT

    type: Literal["all"] = "all"
    exclude_last: bool = False
    """Leave out the last step: it ends at sigma 0, where ``cps`` has no density."""

    def choose(self, iteration: int, num_steps: int, seed: int) -> tuple[int, ...]:
        """The steps that ``iteration`` trains, of ``num_steps``."""
        steps = tuple(range(num_steps - self.exclude_last))
        if not steps:
            raise ConfigError(
                f"window: leaves no step to train; got {num_steps} steps and exclude_last "
                f"{self.exclude_last}; set more steps"
            )
        return steps


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedWindow:
    """The same steps in every iteration."""

    __pydantic_config__ = STRICT

    type: Literal["fixed"] = "fixed"
    steps: tuple[int, ...]
    """Which steps, counted from 0."""

    def __post_init__(self) -> None:
        if not self.steps or len(set(self.steps)) < len(self.steps) or min(self.steps) < 0:
            raise ConfigError(
                f"steps: must be one or more different steps, counted from 0; got {self.steps}; "
                "set for example [1, 2]"
            )

    def choose(self, iteration: int, num_steps: int, seed: int) -> tuple[int, ...]:
        """The steps that ``iteration`` trains, of ``num_steps``."""
        if max(self.steps) >= num_steps:
            raise ConfigError(
                f"window.steps: step {max(self.steps)} does not exist; got {num_steps} steps; set "
                f"steps within 0..{num_steps - 1}"
            )
        return self.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomWindow:
    """Consecutive steps; where they start is drawn anew for every iteration."""

    __pydantic_config__ = STRICT

    type: Literal["random"] = "random"
    size: int
    """How many steps."""
    start_min: int = 0
    """The first step at which the window may start."""
    start_max: int | None = None
    """The last step at which it may start; None: where it still fits."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size: must be positive; got {self.size}; set size >= 1")
        if self.start_min < 0:
            raise ConfigError(
                f"start_min: must not be negative; got {self.start_min}; set start_min >= 0"
            )
        if self.start_max is not None and self.start_max < self.start_min:
            raise ConfigError(
                f"start_max: must not be below start_min; got {self.start_max} and "
                f"{self.start_min}; set start_max >= {self.start_min}"
            )

    def choose(self, iteration: int, num_steps: int, seed: int) -> tuple[int, ...]:
        """The steps that ``iteration`` trains, of ``num_steps``."""
        last = num_steps - self.size
        start_max = last if self.start_max is None else self.start_max
        if not self.start_min <= start_max <= last:
            raise ConfigError(
                f"window: {self.size} steps from step {max(start_max, self.start_min)} on do not "
                f"fit; got {num_steps} steps; set starts within 0..{last} or a smaller size"
            )
        draw = derive_seed("sde_window", seed, iteration)
        start = self.start_min + draw % (start_max - self.start_min + 1)
        return tuple(range(start, start + self.size))


Window = Annotated[AllSteps | FixedWindow | RandomWindow, Field(discriminator="type")]
"""A config field of this type is chosen by ``type``."""
