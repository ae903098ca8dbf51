"""The streams of a loop of one's own: a controller each, and what stands between loop and controller.

A stream steps with a scheduler that it was prepared with, or with the loop's own update. Under
sequence parallelism a rank holds a part of each sample: it is made whole before the step and cut
again after it, so that noise, states and log-probs are those of the whole sample on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_rollout.controller import FlowRolloutController, OdeTransition, controller_for
from miles_rollout.errors import RolloutParamsError, RolloutStateError
from miles_rollout.params import RolloutParams

OdeStep = Callable[[Tensor, Tensor, int], Tensor]
"""(velocity as predicted, sample, step) -> next sample: the deterministic update of a loop."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the ranks of a sequence-parallel group share a stream's samples."""

    gather: Callable[[Tensor], Tensor]
    """This rank's part [B, ...] -> the whole [B, ...], the same on every rank, padding cut off."""
    shard: Callable[[Tensor], Tensor]
    """The whole [B, ...] -> this rank's part [B, ...], padded as the loop pads it."""


class LoopStream:
    """Takes the steps of one stream, as the ``transition`` of its scheduler or of a loop."""

    def __init__(self, controller: FlowRolloutController, scheduler: Any = None) -> None:
        self.controller = controller
        self.ode: OdeStep | None = None
        self.sharding: Sharding | None = None
        if scheduler is not None:
            self.scheduler = scheduler
            """Where it may be passed; absent for a loop without a scheduler."""
            self._sigmas = scheduler.sigmas

    def __call__(
        self,
        velocity: Tensor,
        sample: Tensor,
        *,
        step: int | None = None,
        ode: OdeTransition | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The sample after ``step`` (None: the next one); ``ode`` is the deterministic update."""
        self._check_schedule()
        taken = self.controller.next_step if step is None else step
        if ode is None:
            ode = self._own_update(taken)
        if self.sharding is None:
            return self.controller.transition(
                velocity, sample, step=taken, ode=ode, out_dtype=out_dtype
            )
        whole = self.controller.transition(
            self.sharding.gather(velocity),
            self.sharding.gather(sample),
            step=taken,
            ode=ode,
            out_dtype=out_dtype,
        )
        part = self.sharding.shard(whole)
        if part.shape != sample.shape:
            raise RolloutStateError(
                f"rollout: sharding of stream {self.controller.stream!r} does not give back the part "
                f"that it took; got {tuple(part.shape)} for {tuple(sample.shape)}; make shard the "
                "inverse of gather"
            )
        return part

    def _own_update(self, step: int) -> OdeTransition:
        own = self.ode
        if own is None:
            raise RolloutStateError(
                f"rollout: stream {self.controller.stream!r} has no deterministic update; got neither "
                "ode= nor ode_transition; pass one of them"
            )
        return lambda velocity, sample: own(velocity, sample, step)

    def _check_schedule(self) -> None:
        """The scheduler must still have the schedule that the indices were resolved against."""
        scheduler = getattr(self, "scheduler", None)
        if scheduler is None or scheduler.sigmas is self._sigmas:
            return
        if not torch.equal(scheduler.sigmas.cpu(), self._sigmas.cpu()):
            raise RolloutStateError(
                f"rollout: the schedule of stream {self.controller.stream!r} was set again after "
                f"prepare_rollout_if_enabled; got {scheduler.sigmas.tolist()}; set the timesteps "
                "first, and give each request a scheduler of its own"
            )
        self._sigmas = scheduler.sigmas


def driven(schedulers: Any, params: RolloutParams, seeds: tuple[int, ...]) -> dict[str, LoopStream]:
    """A stream for each scheduler. Raises ``RolloutParamsError`` for one that cannot drive one."""
    if not isinstance(schedulers, Mapping) or not schedulers:
        _refuse("schedulers maps stream names to schedulers", schedulers, '{"image": scheduler}')
    known: dict[int, str] = {}
    streams = {}
    for name, scheduler in schedulers.items():
        kind = type(scheduler).__name__
        if "transition" not in inspect.signature(scheduler.step).parameters:
            _refuse(
                f"the scheduler of stream {name!r} does not accept a transition",
                kind,
                "accept_transition(scheduler), and step with that one",
            )
        if id(scheduler) in known:
            _refuse(
                f"streams {known[id(scheduler)]!r} and {name!r} would step one scheduler twice",
                kind,
                "a scheduler of its own for each stream",
            )
        known[id(scheduler)] = name
        sigmas, timesteps = scheduler.sigmas, scheduler.timesteps
        if sigmas is None or timesteps is None or len(sigmas) != len(timesteps) + 1:
            _refuse(
                f"the scheduler of stream {name!r} has no schedule of T timesteps, T + 1 sigmas",
                kind,
                "it after its set_timesteps",
            )
        begin = getattr(scheduler, "begin_index", None)
        if begin:
            _refuse(
                f"the scheduler of stream {name!r} would start within its schedule",
                f"begin_index {begin}",
                "a scheduler that takes all of its steps",
            )
        streams[name] = LoopStream(controller_for(scheduler, params, seeds, name), scheduler)
    return streams


def built(controllers: Any, params: RolloutParams, seeds: tuple[int, ...]) -> dict[str, LoopStream]:
    """A stream for each controller. Raises ``RolloutParamsError`` for one of another request."""
    if not isinstance(controllers, Mapping) or not controllers:
        _refuse(
            "build_controller returns {stream: FlowRolloutController}",
            type(controllers).__name__,
            "one controller a stream",
        )
    for name, controller in controllers.items():
        if controller.stream != name:
            _refuse(
                "a controller draws the noise of the stream that it is named for",
                f"{controller.stream!r} under {name!r}",
                "it under its own name",
            )
        if controller.params != params or controller.seeds != seeds or controller.next_step:
            _refuse(
                f"the controller of stream {name!r} is not one of this request",
                f"seeds {controller.seeds}, {controller.params}, {controller.next_step} steps taken",
                "a new one, built with the params and seeds that build_controller gets",
            )
    return {name: LoopStream(controller) for name, controller in controllers.items()}


def _refuse(problem: str, value: object, advice: str) -> None:
    raise RolloutParamsError(f"prepare_rollout_if_enabled: {problem}; got {value}; pass {advice}")
