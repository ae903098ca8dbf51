"""What a rollout is asked to do: which steps are stochastic, and what is kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from torch import Tensor

from miles_rollout.errors import RolloutParamsError
from miles_rollout.transitions import SDE_TYPES, SdeType

LatentDtype = Literal["pipeline", "float32"]


class StepPlan(NamedTuple):
    """`RolloutParams` resolved for one stream's schedule of T evaluations."""

    num_steps: int
    sde_steps: tuple[int, ...]
    """The stochastic steps, ascending, in 0..T-1."""
    boundaries: tuple[int, ...]
    """The kept states, ascending, in 0..T; T is the final latent."""
    call_steps: tuple[int, ...] = ()
    """Steps whose denoiser calls are kept although nothing may be stochastic there."""

    @property
    def replayable(self) -> tuple[int, ...]:
        """The stochastic steps of which both states are kept."""
        kept = set(self.boundaries)
        return tuple(s for s in self.sde_steps if {s, s + 1} <= kept)

    @property
    def recorded(self) -> tuple[int, ...]:
        """The steps whose denoiser calls are kept."""
        return tuple(sorted({*self.replayable, *self.call_steps}))


@dataclass(frozen=True, kw_only=True)
class RolloutParams:
    """How the denoising steps of a request are taken and what of them is kept.

    Indices count the denoiser evaluations of the whole request from 0. Raises
    ``RolloutParamsError`` here for what is wrong in itself, and for an index out of range as soon
    as the number of steps is known, before the denoiser runs.
    """

    sde_type: SdeType = "sde"
    """The kind of the stochastic steps; "ode": there are none."""
    noise_level: float | int = 0.7
    """eta of the papers."""
    sde_step_indices: Sequence[int] | None = None
    """None: every step that has a density. Empty: none."""
    sde_streams: Sequence[str] | None = None
    """The streams that are stochastic; None: all. The others take their deterministic update."""
    return_step_indices: Sequence[int] | None = None
    """The boundaries 0..T whose latents are kept; None: all."""
    call_step_indices: Sequence[int] = ()
    """Steps whose denoiser calls are kept besides those of the stochastic ones, whatever their
    latents: to call the denoiser again on other states, as `RolloutEngine.velocities` does."""
    return_means: bool = False
    """Keep the mean of every stochastic step whose states are kept, too."""
    stream_weights: Literal["element"] | Mapping[str, float | int] = "element"
    """The joint log-prob: a mean over all elements, or this weighted sum of the streams' means."""
    latent_dtype: LatentDtype = "pipeline"
    """"pipeline": the state is the rounded sample that the pipeline holds. "float32": the state is
    kept in float32 and the pipeline gets its cast."""
    debug: bool = False
    """Keep velocity, mean, std and noise of every step, too."""

    def __post_init__(self) -> None:
        if self.sde_type not in SDE_TYPES:
            _refuse("sde_type", "unknown kind", self.sde_type, f"one of {', '.join(SDE_TYPES)}")
        if self.latent_dtype not in get_args(LatentDtype):
            _refuse("latent_dtype", "unknown", self.latent_dtype, '"pipeline" or "float32"')
        for field in ("sde_step_indices", "return_step_indices", "sde_streams"):
            object.__setattr__(self, field, _as_tuple(field, getattr(self, field)))
        calls = _as_tuple("call_step_indices", self.call_step_indices)
        object.__setattr__(self, "call_step_indices", calls or ())
        if not isinstance(self.stream_weights, str):
            object.__setattr__(self, "stream_weights", dict(self.stream_weights))
        for field in ("sde_step_indices", "return_step_indices", "call_step_indices"):
            _check_indices(field, getattr(self, field))
        self._check_noise_level()
        self._check_streams()
        if self.sde_type == "ode" and (self.sde_step_indices or self.sde_streams):
            _refuse(
                "sde_type",
                "an ode rollout has no stochastic step",
                f"sde_step_indices {self.sde_step_indices} and sde_streams {self.sde_streams}",
                "neither, or another sde_type",
            )

    def _check_noise_level(self) -> None:
        level = self.noise_level
        if isinstance(level, bool) or not isinstance(level, (int, float)):
            _refuse("noise_level", "must be a number", level, "a number >= 0")
        if not (math.isfinite(level) and level >= 0):
            _refuse("noise_level", "must be finite and >= 0", level, "a number >= 0")
        if level == 0 and not self.is_deterministic:
            _refuse(
                "noise_level",
                "a stochastic step without noise has no density to train",
                level,
                "noise_level > 0, or sde_step_indices=() for a deterministic rollout",
            )
        if self.sde_type == "cps" and level > 1:
            _refuse(
                "noise_level", "cps keeps the coefficients only up to 1", level, "0 < level <= 1"
            )

    def _check_streams(self) -> None:
        weights = self.stream_weights
        if isinstance(weights, str):
            if weights != "element":
                _refuse("stream_weights", "unknown", weights, '"element" or {stream: weight}')
            return
        if not weights:
            _refuse("stream_weights", "no weights", weights, '"element" or {stream: weight}')
        for name, weight in weights.items():
            if not isinstance(weight, (int, float)) or not math.isfinite(weight):
                _refuse(
                    "stream_weights",
                    f"weight of {name!r} is not a finite number",
                    weight,
                    "a number",
                )

    @property
    def is_deterministic(self) -> bool:
        """No stochastic step is asked for, whatever the schedule."""
        no_steps = self.sde_step_indices is not None and not len(self.sde_step_indices)
        no_streams = self.sde_streams is not None and not len(self.sde_streams)
        return self.sde_type == "ode" or no_steps or no_streams

    def check_streams(self, streams: Collection[str]) -> None:
        """Refuse names that match none of ``streams``: they would turn a stream's training off."""
        weights = self.stream_weights
        named = {
            "sde_streams": self.sde_streams or (),
            "stream_weights": () if isinstance(weights, str) else weights,
        }
        for field, names in named.items():
            for name in names:
                if name not in streams:
                    raise RolloutParamsError(
                        f"RolloutParams.{field}: no such stream; got {name!r}; choose among "
                        f"{', '.join(streams)}"
                    )

    def plan(self, sigmas: Tensor, stream: str) -> StepPlan:
        """Resolve the indices for a stream whose full schedule is ``sigmas`` [T + 1]."""
        values = sigmas.double().tolist()
        num_steps = len(values) - 1
        boundaries = _resolve("return_step_indices", self.return_step_indices, num_steps + 1)
        calls = _resolve("call_step_indices", self.call_step_indices, num_steps)
        if self.is_deterministic or (
            self.sde_streams is not None and stream not in self.sde_streams
        ):
            return StepPlan(num_steps, (), boundaries, calls)
        flaws = {i: self._flaw(i, *values[i : i + 2]) for i in range(num_steps)}
        if self.sde_step_indices is None:
            if all(flaws.values()):
                _refuse(
                    "sde_step_indices",
                    f"no step of stream {stream!r} has a density: {flaws[0]}",
                    f"{num_steps} steps",
                    "more steps, or sde_step_indices=() for a deterministic rollout",
                )
            dense = tuple(i for i in flaws if not flaws[i])
            return StepPlan(num_steps, dense, boundaries, calls)
        steps = _resolve("sde_step_indices", self.sde_step_indices, num_steps)
        for i in steps:
            if flaws[i]:
                _refuse(
                    "sde_step_indices",
                    f"step {i} of {num_steps} of stream {stream!r} has no density: {flaws[i]}",
                    list(steps),
                    f"steps among {[j for j in flaws if not flaws[j]]}",
                )
        return StepPlan(num_steps, steps, boundaries, calls)

    def _flaw(self, step: int, s: float, n: float) -> str | None:
        """Why the step from sigma s to n has no density, if it has none."""
        if not s > n:
            return f"sigma does not fall ({s:g} to {n:g})"
        if self.sde_type == "sde" and s >= 1 and step > 0:
            return "sde has an infinite std at sigma 1 after the first step"
        if self.sde_type == "cps" and n == 0:
            return "cps has std 0 onto the terminal sigma 0"
        return None


def _as_tuple(field: str, values: Any) -> tuple[Any, ...] | None:
    if isinstance(values, str) or not isinstance(values, Iterable | None):
        _refuse(field, "must be a list", values, "[..], () for none, or None for all")
    return None if values is None else tuple(values)


def _check_indices(field: str, indices: Sequence[Any] | None) -> None:
    for i, index in enumerate(indices or ()):
        if isinstance(index, bool) or not isinstance(index, int):
            _refuse(field, f"index {index!r} is not an int", indices, "ints, 0-based")
        if index in (indices or ())[:i]:
            _refuse(field, f"index {index} is given twice", indices, "each index once")


def _resolve(field: str, indices: Sequence[int] | None, count: int) -> tuple[int, ...]:
    for index in indices or ():
        if not 0 <= index < count:
            what = "boundaries" if field == "return_step_indices" else "steps"
            _refuse(
                field,
                f"index {index} is out of range: this request has {count} {what}",
                list(indices or ()),
                f"indices in 0..{count - 1}",
            )
    return tuple(range(count)) if indices is None else tuple(sorted(indices))


def _refuse(field: str, problem: str, value: object, advice: str) -> NoReturn:
    raise RolloutParamsError(f"RolloutParams.{field}: {problem}; got {value!r}; set {advice}")
