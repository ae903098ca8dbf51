"""One step of a batch, part by part: the same numbers whatever the batch, and little fresh memory.

What a step is comes from `transitions`; here is how it runs. A sample's numbers do not depend on the
batch it stands in: sums run over one row. No multiplication is fused with an addition: that rounds
once where the formula as written rounds twice, and moves a fifth of the elements.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles_rollout.conditions import version_of
from miles_rollout.errors import RolloutStateError
from miles_rollout.shapes import Float

_PART_ELEMENTS = 1 << 18
"""How much of a batch is worked on at a time: what stays in a core's cache."""
_ALONE_ELEMENTS = 1 << 15
"""From here up torch may split one row's sum among threads, but only if it stands alone."""


class Step(NamedTuple):
    """``next = mean(x, v) + std noise`` for one row."""

    mean: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    """Of (x, v, out, scratch): where to write the result and what lies between, or None."""
    std: float


@dataclass(frozen=True, eq=False)
class FlowStep:
    """What one step did to a batch."""

    next_sample: Float[Tensor, "batch ..."]
    """The emitted sample, in ``out_dtype``."""
    std: Float[Tensor, "batch ..."]
    """The full standard deviation, [B, 1, ..., 1]."""
    log_prob: Float[Tensor, " batch"]
    """Mean over the unmasked non-batch elements; 0 for a step without noise."""
    _means: Callable[[], Tensor]

    @functools.cached_property
    def mean(self) -> Float[Tensor, "batch ..."]:
        """float32 (float64 for float64 input).

        Without a graph it is computed when it is first asked for: a rollout never asks, and the
        memory for it would cost a fifth of the step. Raises ``RolloutStateError`` if the inputs
        were changed in place by then.
        """
        return self._means()

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.next_sample, self.mean, self.std, self.log_prob))


def step_rows(
    steps: Sequence[tuple[Step, Step]],
    sample: Tensor,
    velocity: Tensor,
    *,
    noise: Tensor | None,
    next_sample: Tensor | None,
    mask: Tensor | None,
    out_dtype: torch.dtype | None,
    normalised: bool,
) -> FlowStep:
    """Take or score one step of each row.

    ``steps`` has a row's step and the step of its masked elements; rows that take the same step have
    the same objects. ``normalised``: the log-prob is the Gaussian's, else the bare -(residual)^2.
    """
    dtype = torch.promote_types(torch.promote_types(sample.dtype, velocity.dtype), torch.float32)
    out_dtype = out_dtype or (dtype if next_sample is None else next_sample.dtype)
    mask = None if mask is None else torch.broadcast_to(mask, sample.shape)
    inputs = [t for t in (sample, velocity, noise) if t is not None]
    keep_graph = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    most = min(len(sample), _rows_of_a_part(sample))
    parts = [(rows, *steps[rows.start]) for rows in _cut(steps, most)]

    def mean_of(rows: slice, step: Step, masked: Step, spare: _Spare) -> Tensor:
        x, v = sample[rows].to(dtype).contiguous(), velocity[rows].to(dtype).contiguous()
        mean = step.mean(x, v, spare.take(0, x), spare.take(1, x))
        if mask is None:
            return mean
        return torch.where(mask[rows], mean, masked.mean(x, v, None, None))

    spare = _Spare(
        None
        if keep_graph
        else torch.empty(2, most, *sample.shape[1:], dtype=dtype, device=sample.device)
    )
    nexts = _Parts(sample.shape, out_dtype, sample.device, keep_graph)
    means: list[Tensor] = []
    log_probs, stds = [], []
    with _without_autocast(sample.device.type):
        for rows, step, masked in parts:
            stds += [step.std] * (rows.stop - rows.start)
            mean = mean_of(rows, step, masked, spare)
            live = None if mask is None else mask[rows]
            if next_sample is not None:
                emitted = next_sample[rows]
            elif noise is None or step.std == 0:
                emitted = nexts.put(rows, mean)
            else:
                eps = noise[rows] if live is None else noise[rows].masked_fill(~live, 0)
                slot = nexts.slot(rows) if out_dtype == dtype else None
                emitted = torch.mul(eps.to(mean), step.std, out=slot).add_(mean)
                emitted = emitted if slot is not None else nexts.put(rows, emitted)
            if keep_graph:
                means.append(mean)
            scratch = spare.take(1, mean)
            log_probs.append(_log_probs(emitted, mean, step.std, live, normalised, scratch))
    std = torch.tensor(stds, dtype=dtype, device=sample.device)
    versions = [version_of(t) for t in (sample, velocity)]

    def all_means() -> Tensor:
        if means:
            return torch.cat(means)
        if versions != [version_of(t) for t in (sample, velocity)]:
            raise RolloutStateError(
                "flow_step: the inputs were changed in place before the mean was asked for; got "
                "another sample or velocity; read .mean at once"
            )
        with torch.no_grad(), _without_autocast(sample.device.type):
            none = _Spare(None)
            return torch.cat([mean_of(rows, step, masked, none) for rows, step, masked in parts])

    return FlowStep(
        next_sample=nexts.batch() if next_sample is None else next_sample,
        std=std.view(-1, *[1] * (sample.ndim - 1)),
        log_prob=torch.cat(log_probs),
        _means=all_means,
    )


class _Spare:
    """Memory for what lies between: fresh memory costs more than the arithmetic on it."""

    def __init__(self, memory: Tensor | None) -> None:
        self._memory = memory

    def take(self, which: int, like: Tensor) -> Tensor | None:
        """Room for a tensor with so many rows; None where a graph would keep it."""
        return None if self._memory is None else self._memory[which, : len(like)]


def _without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _rows_of_a_part(sample: Tensor) -> int:
    """Large rows stand alone: torch splits a sum among threads by the shape of the whole tensor."""
    row = max(sample[0].numel(), 1)
    return _PART_ELEMENTS // row if row < _ALONE_ELEMENTS else 1


def _cut(steps: Sequence[tuple[Step, Step]], most: int) -> Iterator[slice]:
    """Runs of at most so many rows that take the same step.

    How rows are cut is a matter of speed alone: no operation on a part looks across its rows.
    """
    start = 0
    for i in range(1, len(steps) + 1):
        if i == len(steps) or steps[i] is not steps[start] or i - start == most:
            yield slice(start, i)
            start = i


class _Parts:
    """The parts of a batch: written to their place, or gathered where a graph is kept."""

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, keep_graph: bool
    ) -> None:
        self._dtype = dtype
        self._parts: list[Tensor] = []
        self._batch = None if keep_graph else torch.empty(shape, dtype=dtype, device=device)

    def slot(self, rows: slice) -> Tensor | None:
        """Where the part belongs; None where it has to be gathered."""
        return None if self._batch is None else self._batch[rows]

    def put(self, rows: slice, part: Tensor) -> Tensor:
        """The part, cast and in its place or gathered."""
        if self._batch is not None:
            return self._batch[rows].copy_(part)
        self._parts.append(part.to(self._dtype))
        return self._parts[-1]

    def batch(self) -> Tensor:
        return torch.cat(self._parts) if self._batch is None else self._batch


def _log_probs(
    emitted: Tensor,
    mean: Tensor,
    std: float,
    mask: Tensor | None,
    normalised: bool,
    scratch: Tensor | None,
) -> Tensor:
    """Of each row: the mean of the Gaussian log density, or of the bare -(residual)^2 (Flow-CPS)."""
    if std == 0 and normalised:
        return mean.new_zeros(len(mean))
    residual = torch.sub(emitted.to(mean.dtype).contiguous(), mean, out=scratch)
    square = residual * residual if scratch is None else residual.mul_(residual)
    count: float | Tensor = max(square[0].numel(), 1)
    if mask is not None:
        square = square.masked_fill(~mask, 0)
        count = mask.reshape(len(mask), -1).sum(1).clamp(min=1)
    mean_square = square.reshape(len(square), -1).sum(1) / count
    if not normalised:
        return -mean_square
    return mean_square * (-0.5 / std**2) - (math.log(std) + 0.5 * math.log(2 * math.pi))
