"""The scope of a rollout: swap the schedulers in, watch the denoiser, put everything back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModularPipeline, SchedulerMixin
from torch import Tensor, nn

from miles_rollout.conditions import CallRecorder, check_repeatable
from miles_rollout.controller import (
    FlowRolloutController,
    OdeTransition,
    check_one_length,
    controller_for,
)
from miles_rollout.errors import RolloutParamsError, RolloutStateError
from miles_rollout.noise import check_seeds, keyed_generator
from miles_rollout.params import RolloutParams
from miles_rollout.pipelines import PipelineAdapter, adapter_for
from miles_rollout.pipelines.refusals import check_refused
from miles_rollout.replay_calls import Conditions
from miles_rollout.schedulers import Transition
from miles_rollout.scope import exclusive, observed_call, swapped_scheduler
from miles_rollout.shared_prefix import SharedPrefix
from miles_rollout.trajectory import RolloutTrajectory


class RolloutSession:
    """One pipeline call under rollout. Made by `rollout`; an `Observer` of its schedulers."""

    def __init__(
        self, pipe: Any, params: RolloutParams, seeds: Sequence[int], adapter: PipelineAdapter
    ) -> None:
        self.params = params
        self.seeds = check_seeds(seeds)
        self.generators = [keyed_generator("initial_noise", seed) for seed in self.seeds]
        """One generator a row for the initial noise: pass them as the call's ``generator``."""
        params.check_streams(adapter.streams)
        self._pipe = pipe
        self._adapter = adapter
        self._request: dict[str, Any] | None = None
        self._guidance: Mapping[str, float | bool] = {}
        self._recorder = CallRecorder()
        self._stream_names: dict[int, str] = {}
        self._schedulers: list[Any] = []
        self._controllers: dict[str, FlowRolloutController] = {}
        self._first_call = True
        self._idle: set[str] = set()
        self._trajectory: RolloutTrajectory | None = None

    @property
    def trajectory(self) -> RolloutTrajectory:
        """What the rollout left. Raises ``RolloutStateError`` before the scope has ended."""
        if self._trajectory is None:
            raise RolloutStateError(
                "rollout: the trajectory is made when the scope ends; got an open or failed one; "
                "read session.trajectory after the with block"
            )
        return self._trajectory

    # -- the pipeline call ------------------------------------------------------------------------

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """The pipeline is called: check its arguments before anything expensive runs."""
        if self._request is not None:
            raise RolloutStateError(
                "rollout: the pipeline was called twice in one scope; got a second call; open one "
                "scope a call"
            )
        if arguments.get("generator") is None and arguments.get("latents") is None:
            raise RolloutParamsError(
                "rollout: the initial noise would come from the global RNG; got generator None; "
                "pass generator=session.generators, or latents="
            )
        for name in self._adapter.denoisers:
            module = getattr(self._pipe, name, None)
            if isinstance(module, nn.Module):
                check_repeatable(name, module)
        check_refused(self._adapter.refused, self._pipe, arguments)
        self._adapter.check_request(self._pipe, arguments)
        self._request = self._adapter.resolve_request(self._pipe, arguments)
        self._guidance = self._adapter.guidance(self._request)

    # -- Observer of the schedulers ---------------------------------------------------------------

    def add_scheduler(self, scheduler: Any, component: str | None = None) -> None:
        """A scheduler component of the pipeline, or a copy: its own stream, or the next one."""
        names = self._adapter.request_streams(self._request or {})
        index = len(self._schedulers)
        name = self._adapter.scheduler_streams.get(component or "")
        if name is None and index < len(names):
            name = names[index]
        if name is None or name in self._stream_names.values():
            raise RolloutParamsError(
                f"rollout: more schedulers than this pipeline's streams {names}; got "
                f"{type(scheduler).__name__}; declare the streams in an adapter"
            )
        self._schedulers.append(scheduler)
        self._stream_names[id(scheduler)] = name

    def copied(self, original: Any, duplicate: Any) -> None:
        """The pipeline copied its scheduler: a further stream, with the schedule it has so far."""
        self.add_scheduler(duplicate)
        if self._stream_names[id(original)] in self._controllers:
            self.scheduled(duplicate)

    def scheduled(self, scheduler: Any) -> None:
        """The schedule is known: resolve the indices now, before the denoiser runs."""
        name = self._stream_names[id(scheduler)]
        held = self._controllers.get(name)
        if held is not None and held.next_step:
            raise RolloutStateError(
                f"rollout: the schedule of stream {name!r} was set again after step "
                f"{held.next_step}; got a second call or loop; open one scope a call"
            )
        controller = controller_for(scheduler, self.params, self.seeds, name)
        if controller.plan.sde_steps:
            self._adapter.check_stochastic(self._pipe, self._request or {})
        check_one_length({**self._controllers, name: controller})
        self._controllers[name] = controller

    def transition_of(self, scheduler: Any) -> Transition | None:
        """The stream's controller, which takes every step of the request."""
        name = self._stream_names[id(scheduler)]
        if name in self._idle:
            return None
        if name not in self._controllers:
            self.scheduled(scheduler)
        return functools.partial(self._packed if self._adapter.packed else self._transition, name)

    def _transition(self, name: str, velocity: Tensor, sample: Tensor, **how: Any) -> Tensor:
        controller = self._controllers[name]
        step = how["step"]
        if self._records(step):
            self._recorder.resolve_state(step, name, sample)
        emitted = controller.transition(velocity, sample, **how)
        if all(c.next_step > step for c in self._controllers.values()):
            self._recorder.end_step()
        if step + 1 in controller.recorded:
            self._recorder.expect_state(name, emitted)
        return emitted

    def _packed(
        self, name: str, velocity: Tensor, sample: Tensor, *, ode: OdeTransition, **how: Any
    ) -> Tensor:
        """The rows of one sample are a batch of one, but for the scheduler's own update."""

        batch, x = velocity[None], sample[None]

        def own(v: Tensor, state: Tensor) -> Tensor:
            rows = (velocity if v is batch else v[0], sample if state is x else state[0])
            return ode(*rows)[None]

        return self._transition(name, batch, x, ode=own, **how)[0]

    def _records(self, step: int) -> bool:
        """The calls of ``step`` are kept."""
        return any(step in c.recorded for c in self._controllers.values())

    # -- the denoisers ----------------------------------------------------------------------------

    def watch(self, name: str, module: nn.Module) -> Any:
        """Record the calls of a denoiser; returns the hook's handle."""

        @torch.compiler.disable
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._controllers:
                self._called(name, args, kwargs)

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def before_noise(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The step of a denoiser call, if it comes before the first stochastic one of all streams."""
        if not self._controllers:
            return None
        step = min(c.next_step for c in self._controllers.values())
        first = min(min(c.plan.sde_steps, default=step + 1) for c in self._controllers.values())
        if step >= first:
            return None
        self._check_call(name, args, kwargs, step)
        return step

    def _called(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = min(c.next_step for c in self._controllers.values())
        self._check_call(name, args, kwargs, step)
        if self._records(step):
            self._recorder.record(step, name, args, kwargs)

    def _check_call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], step: int
    ) -> None:
        if step >= min(c.plan.num_steps for c in self._controllers.values()):
            raise RolloutStateError(
                f"rollout: {name} was called after the last step; got a second denoising loop; "
                "open one scope a call"
            )
        rows = self._adapter.num_rows(args, kwargs, self._guidance)
        if rows is not None and rows != len(self.seeds):
            raise RolloutParamsError(
                f"rollout: one seed a row is needed; got {len(self.seeds)} seeds for {rows} rows; "
                f"pass {rows} seeds"
            )
        if self._first_call:
            self._first_call = False
            self._declare(self._adapter.masks(args, kwargs, self._request or {}))

    def _declare(self, masks: Mapping[str, Tensor]) -> None:
        """A stream of which nothing is live is none: it steps by itself, or not at all."""
        for stream, mask in masks.items():
            if mask.any():
                self._controllers[stream].declare_mask(mask)
            else:
                del self._controllers[stream]
                self._idle.add(stream)
        if not self._controllers:
            raise RolloutParamsError(
                "rollout: nothing of this request is denoised; got conditions for all of its "
                "latents; leave some of them free"
            )
        self.params.check_streams([n for n in self._stream_names.values() if n not in self._idle])

    # -- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Build the trajectory. Raises ``RolloutStateError`` if there is none to build."""
        if not any(c.next_step for c in self._controllers.values()):
            raise RolloutStateError(
                "rollout: no denoising step was taken in the scope; got "
                f"{'a pipeline call' if self._request is not None else 'no pipeline call'} without "
                "steps; call the pipeline inside the with block"
            )
        # In the adapter's order: a copy's schedule may be set before the original's.
        names = [n for n in self._adapter.streams if n in self._controllers]
        streams = {name: self._controllers[name].trajectory() for name in names}
        self.params.check_streams(streams)
        request = self._request or {}
        self._check_calls(self._guidance)
        self._trajectory = RolloutTrajectory(
            streams=streams,
            params=self.params,
            conditions=(
                Conditions(
                    num_samples=len(self.seeds),
                    steps=self._recorder.steps,
                    batch_axes=self._adapter.batch_axes,
                    blocks=self._adapter.blocks(self._guidance),
                    axis_orders=self._recorder.axis_orders,
                ),
            ),
            guidance=self._guidance,
            request={k: v for k, v in request.items() if isinstance(v, (bool, int, float, str))},
        )

    def _check_calls(self, guidance: Mapping[str, float | bool]) -> None:
        expected = self._adapter.calls_per_step(guidance)
        for step, calls in self._recorder.steps.items():
            if expected is not None and len(calls) != expected:
                raise RolloutStateError(
                    f"rollout: step {step} made {len(calls)} denoiser calls where {expected} were "
                    f"expected; got guidance {dict(guidance)}; use the pipeline's own loop"
                )


@contextlib.contextmanager
def rollout(
    pipe: Any,
    params: RolloutParams,
    seeds: Sequence[int],
    *,
    adapter: PipelineAdapter | None = None,
    prefix: SharedPrefix | None = None,
) -> Iterator[RolloutSession]:
    """Turn one call of ``pipe`` in the scope into a rollout of ``len(seeds)`` rows.

    Example::

        with rollout(pipe, RolloutParams(sde_step_indices=[3, 4]), seeds=[11, 12]) as session:
            pipe(["a cat", "a dog"], num_inference_steps=10, generator=session.generators)
        x, x_next = session.trajectory.pair("image", 3)

    ``prefix`` is shared among rollouts of the same rows from the same noise: the steps before the
    first stochastic one are then computed once.

    The schedulers are swapped for copies that take the transitions, and the very same objects come
    back, also after an exception; nothing else of the pipeline changes. Raises
    ``RolloutParamsError`` for what cannot be rolled out, before the denoiser runs, and
    ``RolloutStateError`` for a scope without steps, with two calls, or with an interrupted loop.
    """
    if not isinstance(pipe, (DiffusionPipeline, ModularPipeline)):
        raise RolloutParamsError(
            f"rollout: needs a diffusers pipeline; got {type(pipe).__name__}; for a loop of your "
            "own see miles_rollout.hooks"
        )
    adapter = adapter or adapter_for(pipe)
    session = RolloutSession(pipe, params, seeds, adapter)
    denoisers = {
        name: module
        for name in adapter.denoisers
        if isinstance(module := getattr(pipe, name, None), nn.Module)
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(exclusive({"the pipeline": pipe, **denoisers}))
        for name, component in dict(pipe.components).items():
            if isinstance(component, SchedulerMixin):
                plugged = stack.enter_context(swapped_scheduler(pipe, name, session))
                session.add_scheduler(plugged, name)
        for name, module in denoisers.items():
            stack.callback(session.watch(name, module).remove)
        if prefix is not None:
            stack.enter_context(prefix.over(denoisers, session.before_noise))
        stack.enter_context(observed_call(pipe, session.begin))
        yield session
        session.finish()
