"""The steps before the first stochastic one, computed once for all samples of a group.

Samples that start from one noise are one sample until noise enters. The first rollout of some rows
stores what its denoisers returned there; the rollouts of the same rows after it are answered from
memory, so that P prompts of G samples cost P w + P G (T - w) denoiser samples, with the window at w.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from miles_rollout.conditions import map_tree
from miles_rollout.errors import RolloutStateError

Ask = Callable[[str, tuple[Any, ...], dict[str, Any]], int | None]
"""(denoiser, args, kwargs) -> the step, if it comes before the first stochastic one."""


@final
class SharedPrefix:
    """What the denoisers of some rows returned in the steps before the first stochastic one.

    Hand one object to every `rollout` of the same prompts, initial noise and schedule. The first
    fills it. Raises ``RolloutStateError`` where a later one starts otherwise.
    """

    def __init__(self) -> None:
        self._answers: dict[int, list[tuple[str, Any]]] = {}
        self._first: list[Tensor] = []
        self.complete = False
        """A whole rollout has filled it."""

    @property
    def nbytes(self) -> int:
        """Of the answers held."""
        outputs = [output for calls in self._answers.values() for _, output in calls]
        return sum(t.nbytes for output in outputs for t in _tensors(output))

    @contextlib.contextmanager
    def over(self, denoisers: Mapping[str, nn.Module], ask: Ask) -> Iterator[None]:
        """Let ``denoisers`` answer from memory, or fill it; their classes come back at the end."""
        asked: dict[int, int] = {}
        if not self.complete:
            self._answers = {}

        def call(
            name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            original = _call_of(module)
            step = ask(name, args, kwargs)
            if step is None:
                return original(*args, **kwargs)
            index = asked[step] = asked.get(step, -1) + 1
            first = step == index == 0
            if self.complete:
                if first:
                    self._check_start(args, kwargs)
                return self._answer(step, index, name)
            if first:
                self._first = [t.clone() for t in _tensors((args, kwargs))]
            output = original(*args, **kwargs)
            self._answers.setdefault(step, []).append((name, _copy(output)))
            return output

        with contextlib.ExitStack() as stack:
            for name, module in denoisers.items():
                stack.enter_context(_intercepted(module, functools.partial(call, name, module)))
            yield
        self.complete = True

    def _check_start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now = _tensors((args, kwargs))
        if len(now) != len(self._first) or not all(map(torch.equal, now, self._first)):
            raise RolloutStateError(
                "rollout: these rows do not start as those that filled the shared prefix; got other "
                "arguments in the first denoiser call; share it among rollouts of the same prompts "
                "from the same initial noise"
            )

    def _answer(self, step: int, index: int, name: str) -> Any:
        calls = self._answers.get(step, [])
        if index >= len(calls) or calls[index][0] != name:
            raise RolloutStateError(
                f"rollout: step {step} makes other denoiser calls than the rollout that filled the "
                f"shared prefix; got call {index} of {name}; share it among requests with the same "
                "schedule, guidance and stochastic steps"
            )
        return _copy(calls[index][1])


@functools.cache
def _intercepting(base: Any) -> Any:
    """A subclass whose calls go to the instance's ``_intercept``: once a class, for compiled code."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_intercept"](args, kwargs)

    names = {n: getattr(base, n) for n in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (base,), {**names, "__call__": call, "_answered": base})


def _call_of(module: nn.Module) -> Callable[..., Any]:
    base: Any = type(module)._answered  # type: ignore[attr-defined]
    return functools.partial(base.__call__, module)


@contextlib.contextmanager
def _intercepted(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """By a class of its own: neither ``forward``, which pipelines inspect, nor a hook changes."""
    original: Any = type(module)
    vars(module)["_intercept"] = call
    module.__class__ = _intercepting(original)
    try:
        yield
    finally:
        module.__class__ = original
        del vars(module)["_intercept"]


def _copy(output: Any) -> Any:
    """A tree, or diffusers' ordered output, with tensors of its own: pipelines may write into them."""
    if hasattr(output, "to_tuple"):
        return type(output)(**{name: _copy(value) for name, value in output.items()})
    return map_tree(lambda _, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, output, "")


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tree(lambda _, leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, tree, "")
    return found
