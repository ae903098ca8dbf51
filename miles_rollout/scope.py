"""What a rollout changes on a pipeline for a while, each change with its way back."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from miles_rollout.call_signature import named_arguments
from miles_rollout.errors import RolloutStateError
from miles_rollout.schedulers import Observer, accept_transition

_ACTIVE: dict[int, object] = {}
"""Pipelines and denoisers that are in a rollout, by id."""
_LOCK = threading.Lock()


@contextlib.contextmanager
def exclusive(owned: Mapping[str, object]) -> Iterator[None]:
    """Refuse a pipeline or denoiser that another rollout holds, also one in another thread."""
    with _LOCK:
        for name, thing in owned.items():
            if id(thing) in _ACTIVE:
                raise RolloutStateError(
                    f"rollout: {name} is already in a rollout; got a second one; end the first "
                    "scope, or use a pipeline with a denoiser of its own"
                )
        _ACTIVE.update({id(thing): thing for thing in owned.values()})
    try:
        yield
    finally:
        with _LOCK:
            for thing in owned.values():
                _ACTIVE.pop(id(thing), None)


@contextlib.contextmanager
def swapped_scheduler(pipe: Any, name: str, observer: Observer) -> Iterator[Any]:
    """Swap a scheduler behind the pipeline's back: assigning it would rewrite ``pipe.config``."""
    original = vars(pipe)[name]
    plugged = vars(pipe)[name] = accept_transition(original, observer)
    try:
        yield plugged
    finally:
        vars(pipe)[name] = original


@contextlib.contextmanager
def observed_call(pipe: Any, observe: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Show ``observe`` the arguments of ``pipe(...)``, by a subclass that only looks at them."""
    original = type(pipe)
    vars(pipe)["_observe"] = observe
    pipe.__class__ = _observed(original)  # type: ignore[arg-type]
    try:
        yield
    finally:
        pipe.__class__ = original
        del vars(pipe)["_observe"]


@functools.cache
def _observed(original: Any) -> Any:
    """The subclass, once a class: making it and reading its signature cost more than a step."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self)["_observe"](named_arguments(original, args, kwargs))
        return original.__call__(self, *args, **kwargs)

    call.__signature__ = inspect.signature(original.__call__)  # type: ignore[attr-defined]
    names = {n: getattr(original, n) for n in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (original,), {**names, "__call__": call})
