"""The plug-in of ``scheduler.step``: ``step(..., transition=None)`` over any diffusers scheduler.

`accept_transition` makes an instance of a subclass, made on the fly, of the scheduler's own class:
``isinstance``, ``from_config`` and the signatures that pipelines inspect stay as they were. Without
a transition, ``step`` is the scheduler's own, bit for bit.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from diffusers.configuration_utils import FrozenDict
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

from miles_rollout.errors import RolloutParamsError, RolloutStateError

SchedulerT = TypeVar("SchedulerT")


@runtime_checkable
class Transition(Protocol):
    """What takes a step in the scheduler's place: `FlowRolloutController.transition`, or yours."""

    def __call__(
        self,
        velocity: Tensor,
        sample: Tensor,
        *,
        step: int,
        ode: Callable[[Tensor, Tensor], Tensor],
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Return the sample after ``step``; ``ode`` is the scheduler's own update."""
        ...


@runtime_checkable
class Observer(Protocol):
    """Learns what happens to a scheduler in a rollout; `rollout` has one."""

    def scheduled(self, scheduler: Any) -> None:
        """``set_timesteps`` was called."""

    def copied(self, original: Any, duplicate: Any) -> None:
        """The pipeline copied its scheduler: a further stream."""

    def transition_of(self, scheduler: Any) -> Transition | None:
        """What takes the next step when the caller gave no transition."""


@dataclass(frozen=True, kw_only=True)
class Convention:
    """What differs between the flow-matching schedulers, declared and never guessed."""

    velocity_sign: float = 1.0
    terminal_timestep: float = 0.0
    emits_velocity_dtype: bool = True
    """The next sample has the velocity's dtype; otherwise the sample's."""
    has_memory: bool = False
    """A step depends on earlier ones, so that it cannot follow a stochastic one."""


def _is_minimax_h3(scheduler_class: Any) -> bool:
    """By name: a diffusers that is too old for MiniMax H3 must still run the other models."""
    return any(cls.__name__ == "MiniMaxH3Scheduler" for cls in scheduler_class.__mro__)


def convention_of(scheduler: Any) -> Convention:
    """The convention of a scheduler's class."""
    return _convention_of_class(type(scheduler))  # type: ignore[arg-type]


@functools.cache
def _convention_of_class(scheduler_class: Any) -> Convention:
    if _is_minimax_h3(scheduler_class):  # predicts x0 - noise, and its clock is 1 - sigma
        return Convention(velocity_sign=-1.0, terminal_timestep=1.0, emits_velocity_dtype=False)
    if issubclass(scheduler_class, (DPMSolverMultistepScheduler, UniPCMultistepScheduler)):
        casts = issubclass(scheduler_class, DPMSolverMultistepScheduler)
        return Convention(emits_velocity_dtype=casts, has_memory=True)
    casts = issubclass(scheduler_class, FlowMatchEulerDiscreteScheduler)
    return Convention(emits_velocity_dtype=casts)


def check_stochastic(scheduler: Any) -> None:
    """Refuse, by name, a scheduler whose steps the transitions do not describe.

    Solvers with memory pass if they integrate the flow: a stochastic request takes none of their own
    steps, but Euler steps over the same sigmas.
    """
    name, config = type(scheduler).__name__, scheduler.config
    if convention_of(scheduler).has_memory:
        if config.get("prediction_type") != "flow_prediction" or not config.get("use_flow_sigmas"):
            _refuse(
                f"{name} does not integrate a flow without prediction_type='flow_prediction' and "
                "use_flow_sigmas=True",
                f"{config.get('prediction_type')!r}, {config.get('use_flow_sigmas')}",
            )
        if str(config.get("algorithm_type", "")).startswith("sde"):
            _refuse(f"{name} adds noise of its own", f"algorithm_type={config.algorithm_type!r}")
    elif not isinstance(scheduler, FlowMatchEulerDiscreteScheduler) and not _is_minimax_h3(
        type(scheduler)
    ):
        _refuse(f"{name} has no Markov step with a density", name)
    for option in ("stochastic_sampling", "invert_sigmas"):
        if config.get(option):
            _refuse(f"{name} has {option} on, which is another process", f"{option}=True")
    sigmas = scheduler.sigmas.tolist()
    if not all(1 >= s >= n >= 0 for s, n in itertools.pairwise(sigmas)):
        _refuse(f"{name}'s sigmas do not fall within 1..0, so this is not flow matching", sigmas)


def _refuse(problem: str, value: object) -> None:
    raise RolloutParamsError(
        f"rollout: a stochastic step is not defined here: {problem}; got {value}; use a "
        "FlowMatchEulerDiscreteScheduler, or sde_step_indices=() for a deterministic rollout"
    )


def accept_transition(scheduler: SchedulerT, observer: Observer | None = None) -> SchedulerT:
    """A copy of ``scheduler`` whose ``step`` accepts ``transition=``; the original is untouched.

    A scheduler that accepts one already is copied as it is.
    """
    base: Any = type(scheduler)
    plugged = base if "_rollout_observer" in vars(scheduler) else _plugged(base)
    duplicate: Any = object.__new__(plugged)
    vars(duplicate).update({name: _copied(value) for name, value in vars(scheduler).items()})
    vars(duplicate)["_rollout_observer"] = observer
    return duplicate


def _copied(value: Any) -> Any:
    """A deep copy, without its detours for what a scheduler mostly holds: a config is never changed."""
    if value is None or isinstance(value, (bool, int, float, str, FrozenDict)):
        return value
    if type(value) is Tensor and not value.requires_grad:
        return value.clone()
    return copy.deepcopy(value)


@functools.cache
def _plugged(base: Any) -> type:
    """The subclass of a scheduler class; it keeps the name, so that a config names the stock one."""
    own_step, own_schedule = base.step, base.set_timesteps
    step_signature = inspect.signature(own_step)
    named = _named_arguments(step_signature)

    def step(self: Any, *args: Any, transition: Transition | None = None, **kwargs: Any) -> Any:
        observer = vars(self).get("_rollout_observer")
        if transition is None and observer is not None:
            transition = observer.transition_of(self)
        if transition is None:
            return own_step(self, *args, **kwargs)
        arguments = named((self, *args), kwargs)
        next_sample = _take(self, own_step, arguments, transition)
        if not arguments["return_dict"]:
            return (next_sample,)
        return SchedulerOutput(prev_sample=next_sample)

    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = own_schedule(self, *args, **kwargs)
        observer = vars(self).get("_rollout_observer")
        if observer is not None:
            observer.scheduled(self)
        return result

    def duplicate(self: Any, memo: dict[int, Any] | None = None) -> Any:
        other = object.__new__(type(self))
        state = {k: v for k, v in vars(self).items() if k != "_rollout_observer"}
        vars(other).update(copy.deepcopy(state, memo))
        observer = vars(other)["_rollout_observer"] = vars(self).get("_rollout_observer")
        if observer is not None:
            observer.copied(self, other)
        return other

    parameters = list(step_signature.parameters.values())
    keyword = inspect.Parameter("transition", inspect.Parameter.KEYWORD_ONLY, default=None)
    at = len(parameters) - any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    step.__signature__ = step_signature.replace(  # type: ignore[attr-defined]
        parameters=[*parameters[:at], keyword, *parameters[at:]]
    )
    set_timesteps.__signature__ = inspect.signature(own_schedule)  # type: ignore[attr-defined]
    return type(
        base.__name__,
        (base,),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "step": step,
            "set_timesteps": set_timesteps,
            "__deepcopy__": duplicate,
            "__copy__": duplicate,
        },
    )


def _named_arguments(
    signature: inspect.Signature,
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]]:
    """What makes (args, kwargs) into a value for each name, with the defaults.

    ``Signature.bind`` costs as much as a step of a small sample, so it only gets the calls that are
    not plainly right: it then raises, or knows better.
    """
    parameters = signature.parameters
    names = tuple(parameters)
    empty = inspect.Parameter.empty
    defaults = {name: p.default for name, p in parameters.items() if p.default is not empty}
    rest = [name for name, p in parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD]

    def named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        twice = not kwargs.keys().isdisjoint(names[: len(args)])
        if rest or twice or len(args) > len(names) or len(arguments) != len(names):
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            arguments = dict(call.arguments)
            for name in rest:
                arguments.update(arguments.pop(name))
        return arguments

    return named


def _index_of(scheduler: Any, timestep: Any) -> int:
    """The step that a scheduler is about to take."""
    if scheduler.step_index is None and hasattr(scheduler, "_init_step_index"):
        scheduler._init_step_index(timestep)
    index: int | None = scheduler.step_index
    if index is not None:
        return index
    begin = scheduler.begin_index
    return scheduler.index_for_timestep(timestep) if begin is None else begin


def _take(
    scheduler: Any, own_step: Any, arguments: Mapping[str, Any], transition: Transition
) -> Tensor:
    """Take one step by ``transition`` and leave the scheduler's counter one further."""
    timestep, sample = arguments["timestep"], arguments["sample"]
    velocity = arguments["model_output"]
    if arguments.get("per_token_timesteps") is not None:
        _refuse("every token has a timestep of its own", "per_token_timesteps")
    if getattr(transition, "scheduler", scheduler) is not scheduler:
        raise RolloutStateError(
            "scheduler.step: this transition belongs to another scheduler, so it would take the "
            f"steps of another schedule; got it in {type(scheduler).__name__}; pass each stream's "
            "transition to the scheduler that its rollout was prepared with"
        )
    index = _index_of(scheduler, timestep)

    def ode(velocity: Tensor, sample: Tensor) -> Tensor:
        given = {"model_output": velocity, "sample": sample, "return_dict": False}
        return own_step(**{**arguments, **given})[0]

    emits_velocity_dtype = convention_of(scheduler).emits_velocity_dtype
    next_sample = transition(
        velocity,
        sample,
        step=index,
        ode=ode,
        out_dtype=velocity.dtype if emits_velocity_dtype else sample.dtype,
    )
    scheduler._step_index = index + 1
    return next_sample
