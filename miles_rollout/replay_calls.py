"""The denoiser calls to replay: of some rows, with a batch axis for each argument.

Rows are cut out of the recorded arguments by declared axes, never by a size that happens to fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from miles_rollout.conditions import (
    AxisOrders,
    DenoiserCall,
    StepCalls,
    StreamState,
    in_axis_order,
    map_calls,
    map_tree,
)
from miles_rollout.errors import RolloutParamsError


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The denoiser calls of ``num_samples`` consecutive rows: one rollout, or a part of one."""

    num_samples: int
    steps: StepCalls
    batch_axes: Mapping[str, int | None]
    """Argument name -> its batch axis (None: shared by all rows). What is not named cannot be cut.

    Axis 0 of a list is the list itself: one entry a row, and nothing of the entries is cut."""
    blocks: Mapping[str, int] = field(default_factory=dict)
    """Argument name -> how often its batch axis holds all rows at most, block after block; 1 if not
    named. A call of a step without guidance may hold fewer."""
    axis_orders: AxisOrders = field(default_factory=dict)
    """The memory layout of the states, where they were not contiguous."""

    def states(self, step: int, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The streams' states before a step, laid out in memory as they were."""
        orders = self.axis_orders.get(step, {})
        return {name: in_axis_order(state, orders.get(name)) for name, state in states.items()}

    def calls(self, step: int, states: Mapping[str, Tensor]) -> list[DenoiserCall]:
        """The calls of a step, with the streams' states filled in."""

        def fill(_: str, leaf: Any) -> Any:
            return leaf.of(states) if isinstance(leaf, StreamState) else leaf

        return [call.map(fill) for call in self.steps[step]]

    def streams_of(self, step: int) -> set[str]:
        """The streams whose state itself is an argument of the calls of ``step``."""
        found: set[str] = set()

        def visit(_: str, leaf: Any) -> Any:
            if isinstance(leaf, StreamState):
                found.add(leaf.stream)
            return leaf

        for call in self.steps[step]:
            call.map(visit)
        return found

    def select(self, rows: Sequence[int]) -> Conditions:
        """The calls of some rows only."""
        if list(rows) == list(range(self.num_samples)):
            return self

        entries: set[int] = set()  # ids of what stands in lists of rows

        def cut_list(name: str, value: Any) -> Any:
            if not isinstance(value, list) or self.batch_axes.get(name) != 0:
                return value
            chosen = [value[at] for at in self._places(name, len(value), rows)]
            map_tree(lambda _, leaf: entries.add(id(leaf)), chosen, name)
            return chosen

        def cut_lists(call: DenoiserCall) -> DenoiserCall:
            args = tuple(cut_list(str(i), arg) for i, arg in enumerate(call.args))
            kwargs = {name: cut_list(name, value) for name, value in call.kwargs.items()}
            return replace(call, args=args, kwargs=kwargs)

        def cut(name: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or id(leaf) in entries:
                return leaf
            axis = self._axis(name)
            if axis is None or leaf.shape[axis] == 1 < self.num_samples:  # one row for all
                return leaf
            chosen = self._places(name, leaf.shape[axis], rows)
            return leaf.index_select(axis, _index(chosen, leaf))

        steps = {s: [cut_lists(c) for c in calls] for s, calls in self.steps.items()}
        return replace(self, num_samples=len(rows), steps=map_calls(cut, steps))

    def _places(self, name: str, size: int, rows: Sequence[int]) -> list[int]:
        """Where the rows stand on a batch axis of this size: once in each block."""
        blocks, rest = divmod(size, self.num_samples)
        most = self.blocks.get(name, 1)
        if rest or not 1 <= blocks <= most:
            raise RolloutParamsError(
                f"trajectory: the denoiser's argument {name!r} should hold {most} x "
                f"{self.num_samples} rows; got {size}; declare its batch axis and blocks in the "
                "adapter"
            )
        return [block * self.num_samples + row for block in range(blocks) for row in rows]

    def _axis(self, name: str) -> int | None:
        if name not in self.batch_axes:
            raise RolloutParamsError(
                f"trajectory: no adapter declares the batch axis of the denoiser's argument "
                f"{name!r}; got declared {sorted(self.batch_axes)}; declare it in batch_axes"
            )
        return self.batch_axes[name]

    def map(self, fn: Any) -> Conditions:
        """Apply ``fn`` to every tensor."""
        return replace(
            self,
            steps=map_calls(lambda _, t: fn(t) if isinstance(t, Tensor) else t, self.steps),
        )


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.long, device=like.device)
