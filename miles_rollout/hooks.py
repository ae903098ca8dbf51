"""The four hooks for loops that are not diffusers pipelines.

A denoising loop of your own calls them around its steps; with no rollout on the request each is a
no-op, and the loop computes what it computed without them::

    prepare_rollout_if_enabled(request, params, seeds, schedulers={"image": scheduler})
    init_rollout_env_if_enabled(request, {"prompt_embeds": embeds})
    for t in scheduler.timesteps:
        velocity = model(x, t, embeds)
        x = scheduler.step(velocity, t, x, **rollout_step_kwargs(request, stream="image"))[0]
    trajectory = finalize_rollout_if_enabled(request)

``scheduler`` accepts ``transition`` once `accept_transition` has made a copy of it. A loop without a
scheduler builds its controllers itself and calls the transition with its own update as ``ode``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from miles_rollout.conditions import CallRecorder
from miles_rollout.controller import FlowRolloutController, controller_for
from miles_rollout.errors import RolloutStateError
from miles_rollout.params import RolloutParams
from miles_rollout.replay_calls import Conditions
from miles_rollout.schedulers import accept_transition
from miles_rollout.trajectory import RolloutTrajectory

__all__ = [
    "accept_transition",
    "finalize_rollout_if_enabled",
    "init_rollout_env_if_enabled",
    "prepare_rollout_if_enabled",
    "rollout_step_kwargs",
]

_KEY = "miles_rollout"
"""Where a request keeps its rollout: an attribute, or a key of a dict."""

BuildController = Callable[[RolloutParams, Sequence[int]], Mapping[str, FlowRolloutController]]


class _LoopRollout:
    """The rollout of one request of somebody else's loop."""

    def __init__(
        self, params: RolloutParams, seeds: Sequence[int], streams: Mapping[str, Any]
    ) -> None:
        self.params = params
        self.seeds = tuple(seeds)
        self.controllers: dict[str, FlowRolloutController] = dict(streams)
        self.recorder = CallRecorder()


def prepare_rollout_if_enabled(
    request: Any,
    params: RolloutParams | None,
    seeds: Sequence[int] = (),
    *,
    schedulers: Mapping[str, Any] | None = None,
    build_controller: BuildController | None = None,
) -> None:
    """Start the rollout of ``request`` (any object or dict); ``params`` None: there is none.

    ``schedulers`` maps stream names to schedulers whose timesteps are set; or ``build_controller``
    makes the controllers of a loop that has no scheduler. Call it before a shard of the latents:
    noise is drawn at the full shape. Raises ``RolloutParamsError`` for indices that do not fit, and
    ``RolloutStateError`` for a request that is already in a rollout.
    """
    if params is None:
        return
    if _get(request) is not None:
        raise RolloutStateError(
            "prepare_rollout_if_enabled: the request is already in a rollout; got a second call; "
            "call finalize_rollout_if_enabled first"
        )
    if (schedulers is None) == (build_controller is None):
        raise RolloutStateError(
            "prepare_rollout_if_enabled: needs schedulers or build_controller; got "
            f"{'both' if schedulers is not None else 'neither'}; pass exactly one"
        )
    if build_controller is not None:
        controllers = build_controller(params, seeds)
    else:
        controllers = {
            name: controller_for(scheduler, params, seeds, name)
            for name, scheduler in (schedulers or {}).items()
        }
    _set(request, _LoopRollout(params, seeds, controllers))


def init_rollout_env_if_enabled(request: Any, conditions: Mapping[str, Any]) -> None:
    """Keep a copy of what the denoiser is conditioned on, for replay by the caller."""
    held = _get(request)
    if held is not None:
        steps = sorted(set().union(*(c.replayable for c in held.controllers.values())))
        for step in steps:
            held.recorder.record(step, "", (), conditions)


def rollout_step_kwargs(request: Any, *, stream: str) -> dict[str, Any]:
    """``{}``, or ``{"transition": ...}`` for the next step of ``stream``."""
    held = _get(request)
    if held is None:
        return {}
    if stream not in held.controllers:
        raise RolloutStateError(
            f"rollout_step_kwargs: no such stream; got {stream!r}; choose among "
            f"{', '.join(held.controllers)}"
        )
    return {"transition": held.controllers[stream].transition}


def finalize_rollout_if_enabled(request: Any) -> RolloutTrajectory | None:
    """End the rollout and return its trajectory; None if there is none."""
    held = _get(request)
    if held is None:
        return None
    _set(request, None)
    streams = {name: c.trajectory() for name, c in held.controllers.items()}
    axes: dict[str, int | None] = {}
    for calls in held.recorder.steps.values():
        axes |= dict.fromkeys(calls[0].kwargs, 0)
    conditions = Conditions(num_samples=len(held.seeds), steps=held.recorder.steps, batch_axes=axes)
    return RolloutTrajectory(streams=streams, params=held.params, conditions=(conditions,))


def _get(request: Any) -> _LoopRollout | None:
    if isinstance(request, Mapping):
        return request.get(_KEY)
    return getattr(request, _KEY, None)


def _set(request: Any, held: _LoopRollout | None) -> None:
    if isinstance(request, MutableMapping):
        if held is None:
            del request[_KEY]
        else:
            request[_KEY] = held
    elif held is None:
        delattr(request, _KEY)
    else:
        setattr(request, _KEY, held)
