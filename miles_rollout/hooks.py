"""The hooks for loops that are not diffusers pipelines.

A denoising loop of your own calls them around its steps; with no rollout on the request each is a
no-op, and the loop computes what it computed without them::

    prepare_rollout_if_enabled(request, params, seeds, schedulers={"image": scheduler})
    init_rollout_env_if_enabled(request, {"prompt_embeds": embeds})
    for t in scheduler.timesteps:
        velocity = model(x, t, embeds)
        x = scheduler.step(velocity, t, x, **rollout_step_kwargs(request, stream="image"))[0]
    trajectory = finalize_rollout_if_enabled(request)

``scheduler`` accepts ``transition`` once `accept_transition` has made a copy of it. A loop without a
scheduler passes ``build_controller`` and, as ``ode_transition``, its own update. Where an exception
ends the loop, `abort_rollout_if_enabled` frees the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from miles_rollout.conditions import CallRecorder
from miles_rollout.controller import FlowRolloutController, check_one_length
from miles_rollout.errors import RolloutParamsError, RolloutStateError
from miles_rollout.loop_streams import LoopStream, OdeStep, Sharding, built, driven
from miles_rollout.noise import check_seeds
from miles_rollout.params import RolloutParams
from miles_rollout.replay_calls import Conditions
from miles_rollout.schedulers import accept_transition
from miles_rollout.trajectory import RolloutTrajectory

__all__ = [
    "Sharding",
    "abort_rollout_if_enabled",
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
        self, params: RolloutParams, seeds: tuple[int, ...], streams: Mapping[str, LoopStream]
    ) -> None:
        self.params = params
        self.seeds = seeds
        self.streams = dict(streams)
        self.recorder = CallRecorder()
        self.batch_axes: dict[str, int | None] | None = None


def prepare_rollout_if_enabled(
    request: Any,
    params: RolloutParams | None,
    seeds: Sequence[int] = (),
    *,
    schedulers: Mapping[str, Any] | None = None,
    build_controller: BuildController | None = None,
    ode_transition: OdeStep | Mapping[str, OdeStep] | None = None,
    sharding: Mapping[str, Sharding] | None = None,
) -> None:
    """Start the rollout of ``request`` (any object or dict); ``params`` None: there is none.

    ``schedulers`` maps stream names to schedulers whose timesteps are set. A loop that has none
    gives ``build_controller``, ``(params, seeds) -> {stream: FlowRolloutController}``, and
    ``ode_transition``, its own deterministic update ``(velocity, sample, step) -> next sample``, one
    for all streams or one a stream. ``sharding`` tells, by stream, how a rank's part of a sample
    becomes the whole one and back; without it, what is stepped is taken for the whole sample.

    Raises ``RolloutParamsError`` for what cannot be rolled out, and ``RolloutStateError`` for a
    request that is already in a rollout or cannot hold one; the request is then as it was.
    """
    if params is None:
        return
    where = "prepare_rollout_if_enabled"
    if not isinstance(params, RolloutParams):
        raise RolloutParamsError(
            f"{where}: params are RolloutParams, or None for no rollout; got a "
            f"{type(params).__name__}; build RolloutParams from it"
        )
    if _get(request) is not None:
        raise RolloutStateError(
            f"{where}: the request is already in a rollout; got a second call; call "
            "finalize_rollout_if_enabled first, or abort_rollout_if_enabled after an exception"
        )
    if (schedulers is None) == (build_controller is None):
        raise RolloutStateError(
            f"{where}: needs schedulers or build_controller; got "
            f"{'both' if schedulers is not None else 'neither'}; pass exactly one"
        )
    rows = check_seeds(seeds)
    if schedulers is not None:
        streams = driven(schedulers, params, rows)
    else:
        assert build_controller is not None
        streams = built(build_controller(params, rows), params, rows)
    _check_names("ode_transition", ode_transition, streams)
    _check_names("sharding", sharding, streams)
    params.check_streams(streams)
    check_one_length({name: stream.controller for name, stream in streams.items()})
    for name, stream in streams.items():
        per_stream = isinstance(ode_transition, Mapping)
        stream.ode = ode_transition.get(name) if per_stream else ode_transition  # type: ignore[union-attr,assignment]
        stream.sharding = (sharding or {}).get(name)
    _set(request, _LoopRollout(params, rows, streams))


def init_rollout_env_if_enabled(
    request: Any,
    conditions: Mapping[str, Any],
    *,
    batch_axes: Mapping[str, int | None] | None = None,
) -> None:
    """Keep a copy of what the denoiser is conditioned on, for replay by the caller.

    The batch axis of tensors, and of lists, is 0; ``batch_axes`` names those for which it is another
    one, or None where all rows share the value. Raises ``RolloutParamsError`` for an axis that does
    not hold one entry a row, and ``RolloutStateError`` for a second call.
    """
    held = _get(request)
    if held is None:
        return
    if held.batch_axes is not None:
        raise RolloutStateError(
            "init_rollout_env_if_enabled: the conditions are already kept; got a second call; pass "
            "all of them in one"
        )
    axes = dict.fromkeys(conditions, 0) | dict(batch_axes or {})
    _check_axes(conditions, axes, len(held.seeds))
    for step in sorted(set().union(*(s.controller.recorded for s in held.streams.values()))):
        held.recorder.record(step, "", (), conditions)
    held.batch_axes = axes


def rollout_step_kwargs(request: Any, *, stream: str) -> dict[str, Any]:
    """``{}``, or ``{"transition": ...}``, which takes the steps of ``stream``, one a call.

    A loop without a scheduler calls it with (velocity, sample), both with a batch axis, and
    ``step=`` and ``ode=`` (velocity, sample) where no ``ode_transition`` was given.
    """
    held = _get(request)
    if held is None:
        return {}
    if stream not in held.streams:
        raise RolloutStateError(
            f"rollout_step_kwargs: no such stream; got {stream!r}; choose among "
            f"{', '.join(held.streams)}"
        )
    return {"transition": held.streams[stream]}


def finalize_rollout_if_enabled(request: Any) -> RolloutTrajectory | None:
    """End the rollout and return its trajectory; None if there is none.

    Raises ``RolloutStateError`` for an interrupted loop; the request is free again in any case.
    """
    held = _get(request)
    if held is None:
        return None
    _set(request, None)
    streams = {name: stream.controller.trajectory() for name, stream in held.streams.items()}
    conditions = Conditions(
        num_samples=len(held.seeds), steps=held.recorder.steps, batch_axes=held.batch_axes or {}
    )
    return RolloutTrajectory(streams=streams, params=held.params, conditions=(conditions,))


def abort_rollout_if_enabled(request: Any) -> None:
    """Drop the rollout of ``request``, if it has one: for the ``finally`` around a loop."""
    if _get(request) is not None:
        _set(request, None)


def _check_names(argument: str, given: Any, streams: Mapping[str, Any]) -> None:
    for name in given if isinstance(given, Mapping) else ():
        if name not in streams:
            raise RolloutParamsError(
                f"prepare_rollout_if_enabled: {argument} names no stream; got {name!r}; choose "
                f"among {', '.join(streams)}"
            )


def _check_axes(
    conditions: Mapping[str, Any], axes: Mapping[str, int | None], num_rows: int
) -> None:
    where = "init_rollout_env_if_enabled"
    for name in axes:
        if name not in conditions:
            raise RolloutParamsError(
                f"{where}: batch_axes names no condition; got {name!r}; choose among "
                f"{', '.join(conditions)}"
            )
    for name, value in conditions.items():
        axis = axes[name]
        if axis is None or not isinstance(value, (Tensor, list)):
            continue
        shape = tuple(value.shape) if isinstance(value, Tensor) else (len(value),)
        if axis >= len(shape) or shape[axis] not in (1, num_rows):
            raise RolloutParamsError(
                f"{where}: axis {axis} of {name!r} should hold {num_rows} rows; got shape {shape}; "
                f"pass batch_axes={{{name!r}: axis}}, or None where all rows share it"
            )


def _get(request: Any) -> _LoopRollout | None:
    """The rollout of a request; what else stands under that name is not ours."""
    found = request.get(_KEY) if isinstance(request, Mapping) else getattr(request, _KEY, None)
    return found if isinstance(found, _LoopRollout) else None


def _set(request: Any, held: _LoopRollout | None) -> None:
    is_dict = isinstance(request, MutableMapping)
    if held is None:
        if is_dict:
            del request[_KEY]
        else:
            delattr(request, _KEY)
        return
    if _KEY in (request if is_dict else getattr(request, "__dict__", ())):
        raise RolloutStateError(
            f"prepare_rollout_if_enabled: the request uses the name {_KEY!r} for something else; "
            f"got a {type(request).__name__}; rename it there"
        )
    try:
        if is_dict:
            request[_KEY] = held
        else:
            setattr(request, _KEY, held)
    except (AttributeError, TypeError, ValueError) as error:
        raise RolloutStateError(
            f"prepare_rollout_if_enabled: the request must hold its rollout, and a "
            f"{type(request).__name__} takes no attribute; got {error}; pass a dict or a plain object"
        ) from error
