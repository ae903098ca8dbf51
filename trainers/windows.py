"""Which denoising steps of an iteration are stochastic and trained: the SDE window.

A window is a pure function of (seed, iteration): the same on every rank and after a resume,
whatever else draws random numbers. Steps and iterations count from 0.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
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

    def earliest_end(self, num_steps: int) -> int:
        """The last step of the iteration whose window ends first."""
        return self.reach(num_steps)

    def reach(self, num_steps: int) -> int:
        """The last step that any iteration trains."""
        return max(self.choose(0, num_steps, 0))


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

    def earliest_end(self, num_steps: int) -> int:
        """The last step of the iteration whose window ends first."""
        return self.reach(num_steps)

    def reach(self, num_steps: int) -> int:
        """The last step that any iteration trains."""
        return max(self.choose(0, num_steps, 0))


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

    def earliest_end(self, num_steps: int) -> int:
        """The last step of the iteration whose window ends first."""
        return self.start_min + self.size - 1

    def reach(self, num_steps: int) -> int:
        """The last step that any iteration trains."""
        last = num_steps - self.size
        return (last if self.start_max is None else self.start_max) + self.size - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressiveWindow:
    """Consecutive steps that move on along the schedule as the run goes (arXiv 2507.21802, sec. 3).

    The window stays at each of its places for ``iterations`` iterations, or for a number that falls
    from place to place: early steps, which decide most, are trained longest. Place p begins at
    ``start_min + p shift``.
    """

    __pydantic_config__ = STRICT

    type: Literal["progressive"] = "progressive"
    size: int = 4
    """How many steps."""
    shift: int | None = 1
    """Steps from one place to the next; below ``size`` places overlap (null: ``size``)."""
    iterations: int = 25
    """Iterations at a place; with a decay, at the first."""
    decay: Literal["none", "linear", "exponential"] = "none"
    """"linear": falls to ``min_iterations`` at the last place. "exponential": iterations times
    exp(-decay_rate max(0, step - decay_start)) at a place that begins at step, rounded up."""
    min_iterations: int = 1
    """Of a linear decay."""
    decay_rate: float = 0.1
    """Of an exponential decay."""
    decay_start: int = 13
    """Of an exponential decay: the step up to which nothing decays."""
    start_min: int = 0
    """The step at which the first place begins."""
    start_max: int | None = None
    """The last step at which a place may begin (null: where it still fits)."""
    roll_back: bool = True
    """After the last place it begins anew at the first; false: it stays at the last."""

    def __post_init__(self) -> None:
        if self.size < 1 or (self.shift is not None and self.shift < 1):
            raise ConfigError(
                f"size and shift: must be positive; got {self.size}, {self.shift}; set >= 1"
            )
        if not 1 <= self.min_iterations <= self.iterations:
            raise ConfigError(
                f"iterations: must be at least min_iterations, and that at least 1; got "
                f"{self.iterations} and {self.min_iterations}; set for example 25 and 1"
            )
        unused = {
            "linear": self.min_iterations != 1,
            "exponential": self.decay_rate != 0.1 or self.decay_start != 13,
        }
        for kind, given in unused.items():
            if given and self.decay != kind:
                raise ConfigError(
                    f"decay: settings of a {kind} one have no effect; got decay {self.decay}; set decay "
                    f"{kind}, or leave them out"
                )
        if self.decay_rate < 0 or self.decay_start < 0 or self.start_min < 0:
            raise ConfigError(
                "decay_rate, decay_start and start_min: must not be negative; got "
                f"{self.decay_rate}, {self.decay_start}, {self.start_min}; set >= 0"
            )
        if self.start_max is not None and self.start_max < self.start_min:
            raise ConfigError(
                f"start_max: must not be below start_min; got {self.start_max} and "
                f"{self.start_min}; set start_max >= {self.start_min}"
            )

    def choose(self, iteration: int, num_steps: int, seed: int) -> tuple[int, ...]:
        """The steps that ``iteration`` trains, of ``num_steps``."""
        places = self._places(num_steps)
        stays = [self._stay(place, len(places), start) for place, start in enumerate(places)]
        if self.roll_back:
            iteration %= sum(stays)
        start = places[-1]
        for place, stay in zip(places, stays, strict=True):
            if iteration < stay:
                start = place
                break
            iteration -= stay
        return tuple(range(start, start + self.size))

    def earliest_end(self, num_steps: int) -> int:
        """The last step of the iteration whose window ends first."""
        return self.start_min + self.size - 1

    def reach(self, num_steps: int) -> int:
        """The last step that any iteration trains."""
        return self._places(num_steps)[-1] + self.size - 1

    def _places(self, num_steps: int) -> list[int]:
        last = num_steps - self.size
        start_max = last if self.start_max is None else self.start_max
        if not self.start_min <= start_max <= last:
            raise ConfigError(
                f"window: {self.size} steps from step {max(start_max, self.start_min)} on do not "
                f"fit; got {num_steps} steps; set starts within 0..{last} or a smaller size"
            )
        return list(range(self.start_min, start_max + 1, self.shift or self.size))

    def _stay(self, place: int, num_places: int, start: int) -> int:
        """Iterations at a place."""
        if self.decay == "linear":
            fall = (self.iterations - self.min_iterations) * place / max(num_places - 1, 1)
            return round(self.iterations - fall)
        if self.decay == "exponential":
            factor = math.exp(-self.decay_rate * max(0, start - self.decay_start))
            return math.ceil(self.iterations * factor)
        return self.iterations


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedFraction:
    """Which of a window's n steps are trained: ``int(fraction n)`` of them."""

    fraction: float = 1.0
    order: Literal["first", "random"] = "first"
    """The earliest ones, or some that are drawn anew for every chunk."""

    def choose(self, steps: Sequence[int], *key: int | str) -> list[int]:
        """The trained ones of ``steps``, ascending; ``key`` keys the draw."""
        count = int(self.fraction * len(steps) + 1e-9)  # 0.29 * 100 is 28.999...
        if not count:
            raise ConfigError(
                f"timestep_fraction: leaves no step to train; got {self.fraction} of {len(steps)} "
                "steps; set it higher, or rollout.window larger"
            )
        chosen = sorted(steps)
        if self.order == "random":
            random.Random(derive_seed("trained_steps", *key)).shuffle(chosen)
        return sorted(chosen[:count])


Window = Annotated[
    AllSteps | FixedWindow | RandomWindow | ProgressiveWindow, Field(discriminator="type")
]
"""A config field of this type is chosen by ``type``."""
