"""What the denoiser was called with, so that replay can call it with the same again.

A call is a module name and a tree of arguments. Tensors in it are snapshots (own storage, no
graph); a tensor that recurs from step to step is stored once, and one that is a stream's state is
not stored at all: a `StreamState` stands for it and is filled in from the trajectory's latents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from miles_rollout.errors import RolloutParamsError, RolloutStateError

FnT = TypeVar("FnT", bound=Callable[..., Any])
Tree = Any
"""Tensors, scalars, strings, None and StreamState in tuples, lists and dicts."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """Stands in a call for the state of ``stream`` before the call's step, cast to ``dtype``."""

    stream: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None
    """The shape in which the denoiser sees the state of a single sample, if it is another one."""
    front: Tensor | None = field(default=None, compare=False, repr=False)
    """[1, tokens, ...]: what stands before the state of a single sample, such as its conditions."""

    def of(self, states: Mapping[str, Tensor]) -> Tensor:
        """The argument that this stands for."""
        state = states[self.stream].to(self.dtype)
        if self.front is not None:
            return torch.cat([self.front, state], 1)
        return state if self.shape is None else state.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class DenoiserCall:
    """One call of a denoiser: ``module`` is the pipeline component's name."""

    module: str
    args: tuple[Tree, ...]
    kwargs: Mapping[str, Tree]
    autocast: torch.dtype | None = None
    """The dtype of the autocast scope it ran in, if it ran in one."""

    def map(self, fn: Callable[[str, Any], Any]) -> DenoiserCall:
        """Apply ``fn(name, leaf)`` to every leaf; a positional argument is named by its index."""
        args = tuple(map_tree(fn, arg, str(i)) for i, arg in enumerate(self.args))
        kwargs = {name: map_tree(fn, value, name) for name, value in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs)

    def autocast_scope(self) -> torch.autocast:
        """The autocast state that the call ran in, whatever the state of now."""
        device = tensors_of({0: [self]})[0].device.type
        return torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None)


StepCalls = Mapping[int, Sequence[DenoiserCall]]
"""The calls of each replayable step."""
AxisOrders = Mapping[int, Mapping[str, tuple[int, ...]]]
"""Step -> stream -> the axes of its state from the outermost in memory to the innermost, where that
is not their own order."""


def map_tree(fn: Callable[[str, Any], Any], tree: Tree, name: str) -> Tree:
    """Rebuild ``tree`` with ``fn(name, leaf)`` for its leaves, under one name."""
    if isinstance(tree, Mapping):
        return {key: map_tree(fn, value, name) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tree(fn, value, name) for value in tree)
    return fn(name, tree)


def map_calls(fn: Callable[[str, Any], Any], steps: StepCalls) -> dict[int, list[DenoiserCall]]:
    """Apply ``fn(name, leaf)`` to every leaf; a tensor that stands twice is mapped once."""
    done: dict[tuple[str, int], Any] = {}

    def once(name: str, leaf: Any) -> Any:
        if isinstance(leaf, StreamState) and leaf.front is not None:
            leaf = replace(leaf, front=once(name, leaf.front))
        if not isinstance(leaf, Tensor):
            return fn(name, leaf)
        key = (name, id(leaf))
        if key not in done:
            done[key] = fn(name, leaf)
        return done[key]

    return {step: [call.map(once) for call in calls] for step, calls in steps.items()}


def tensors_of(steps: StepCalls) -> list[Tensor]:
    """Every distinct tensor of the calls, in order of appearance."""
    found: dict[int, Tensor] = {}

    def visit(_: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.setdefault(id(leaf), leaf)
        return leaf

    map_calls(visit, steps)
    return list(found.values())


def without_graph(fn: FnT) -> FnT:
    """Run ``fn`` without a graph, and outside of inference mode: its tensors could never be trained on.

    In a pipeline that is so anyway, and entering the modes would cost more than a step's bookkeeping.
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return fn(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


class CallRecorder:
    """Records the denoiser calls of a request's kept steps."""

    def __init__(self) -> None:
        self.steps: dict[int, list[DenoiserCall]] = {}
        self.axis_orders: dict[int, dict[str, tuple[int, ...]]] = {}
        # id -> (the tensor, its version, its snapshot); holding the tensor keeps its id its own.
        self._snapshots: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._touched: set[int] = set()
        # id -> (an emitted sample, its version, its stream): the next step's state, if it is used.
        self._expected: dict[int, tuple[Tensor, int, StreamState]] = {}
        # Argument name -> (a container without tensors, its repr, its copy); and the ids of all such
        # copies, which the recorded calls keep alive.
        self._plain: dict[str, tuple[Any, str, Any]] = {}
        self._plain_ids: set[int] = set()
        # Stream -> what stood before its state; the same in every step, as a rule.
        self._fronts: dict[str, Tensor] = {}
        self._saw_tensor = False

    @without_graph
    def record(self, step: int, module: str, args: tuple[Tree, ...], kwargs: Tree) -> None:
        """Snapshot one call of ``step``."""
        call = DenoiserCall(
            module,
            tuple(self._value(str(i), arg) for i, arg in enumerate(args)),
            {name: self._value(name, value) for name, value in kwargs.items()},
            _autocast_dtype([*args, *kwargs.values()]),
        )
        self.steps.setdefault(step, []).append(call)

    def expect_state(self, stream: str, emitted: Tensor) -> None:
        """``emitted`` will be the state of ``stream``: where a call holds it, nothing is copied.

        Whoever takes the step must refuse a state that was changed after the call.
        """
        if version_of(emitted) >= 0 and emitted.is_contiguous():
            state = StreamState(stream, emitted.dtype)
            self._expected[id(emitted)] = (emitted, emitted._version, state)

    def resolve_state(self, step: int, stream: str, sample: Tensor) -> None:
        """``sample`` is the state of ``stream`` before ``step``: its snapshots are not needed.

        The trajectory's states are contiguous, and a kernel may round otherwise for another layout:
        the order of the axes in memory is noted. A sample with gaps keeps its snapshots.
        """
        if not sample.is_contiguous():
            order = axis_order(sample)
            if order is None:
                return
            self.axis_orders.setdefault(step, {})[stream] = order
        known = self._snapshots.get(id(sample))
        if known is None or known[0] is not sample:
            # A pipeline may step one view of its state and show the denoiser another.
            views = (_same_memory, _ends_with)
            found = (k for k in self._snapshots.values() if any(v(k[0], sample) for v in views))
            known = next(found, None)
        if known is None:
            return
        version = version_of(sample)
        snapshot = known[2]
        if known[1] != version or (version < 0 and not torch.equal(_end(snapshot, sample), sample)):
            return
        state = self._stand_in(stream, snapshot, sample)

        def swap(value: Any) -> Any:
            if isinstance(value, Tensor):
                return state if value is snapshot else value
            if id(value) in self._plain_ids:
                return value
            return map_tree(lambda _, leaf: state if leaf is snapshot else leaf, value, "")

        self.steps[step] = [
            replace(
                call,
                args=tuple(swap(arg) for arg in call.args),
                kwargs={name: swap(value) for name, value in call.kwargs.items()},
            )
            for call in self.steps.get(step, [])
        ]
        del self._snapshots[id(known[0])]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _stand_in(self, stream: str, snapshot: Tensor, sample: Tensor) -> StreamState:
        if snapshot.numel() == sample.numel():
            shape = None if snapshot.shape == sample.shape else tuple(snapshot.shape)
            return StreamState(stream, sample.dtype, shape)
        front = snapshot[:, : snapshot.shape[1] - sample.shape[1]]
        if not torch.equal(front, self._fronts.get(stream, front[:0])):
            self._fronts[stream] = front.clone()
        return StreamState(stream, sample.dtype, front=self._fronts[stream])

    def end_step(self) -> None:
        """Forget the originals that this step's calls did not use, so that they can be freed.

        A step without recorded calls forgets nothing: the next one may use the same prompt.
        """
        self._expected = {}
        if not self._touched:
            return
        self._snapshots = {k: v for k, v in self._snapshots.items() if k in self._touched}
        self._touched = set()

    def _value(self, name: str, value: Any) -> Any:
        """The snapshot of one argument; a container without tensors that recurs is copied once."""
        if not isinstance(value, (Mapping, tuple, list)):
            return self._leaf(name, value)
        known = self._plain.get(name)
        # By repr: 1, 1.0 and True are equal, and a denoiser may tell them apart.
        if known is not None and known[0] is value and known[1] == repr(value):
            return known[2]
        self._saw_tensor = False
        copied = map_tree(self._leaf, value, name)
        if not self._saw_tensor:
            self._plain[name] = (value, repr(value), copied)
            self._plain_ids.add(id(copied))
        return copied

    def _leaf(self, name: str, leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype)):
            return leaf
        if not isinstance(leaf, Tensor):
            raise RolloutParamsError(
                f"rollout: the denoiser's argument {name!r} cannot be recorded for replay; got a "
                f"{type(leaf).__name__}; pass tensors, numbers, strings or containers of them"
            )
        self._saw_tensor = True
        version = version_of(leaf)
        expected = self._expected.get(id(leaf))
        if expected is not None and expected[0] is leaf and expected[1] == version:
            return expected[2]
        known = self._snapshots.get(id(leaf))
        if version < 0 or known is None or known[0] is not leaf or known[1] != version:
            known = (leaf, version, _snapshot(leaf))
            self._snapshots[id(leaf)] = known
        self._touched.add(id(leaf))
        return known[2]


def check_repeatable(name: str, module: nn.Module) -> None:
    """Refuse a denoiser whose second call would not be the first one again.

    That is one that draws dropout masks, or one whose blocks remember earlier calls, as diffusers'
    caches do, whether they were enabled on the denoiser or applied to it.
    """
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0:
            raise RolloutStateError(
                f"rollout: {name} draws dropout masks, so that its replay would differ; got "
                f"p={part.p} in training mode; set the dropout to 0, or call {name}.eval()"
            )
        registry = getattr(part, "_diffusers_hook", None)
        hooks = {} if registry is None else registry.hooks
        memory = sorted(key for key, hook in hooks.items() if hook._is_stateful)
        config = getattr(part, "_cache_config", None)
        if memory or config is not None:
            found = memory[0] if config is None else type(config).__name__
            raise RolloutParamsError(
                f"rollout: a cache changes what {name} computes from step to step, so replay would "
                f"differ; got {found}; call {name}.disable_cache() first, or load it again"
            )


def check_reachable(name: str, module: nn.Module) -> None:
    """Refuse a denoiser whose trained weights are copied in for a call: a copy gets the gradient."""
    for parameter in module.parameters():
        if parameter.is_meta and parameter.requires_grad:
            raise RolloutStateError(
                f"rollout: trained weights of {name} are offloaded between its calls, so that no "
                "gradient would reach them; got weights on the meta device; replay under "
                f"torch.no_grad(), or load {name} without sequential offload"
            )


def version_of(tensor: Tensor) -> int:
    """The in-place counter; -1 for an inference tensor, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def axis_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The axes from the outermost in memory to the innermost; None where memory has gaps."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda axis: -strides[axis]))
    return order if tensor.permute(order).is_contiguous() else None


def in_axis_order(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """The same values, laid out in this order of axes, or contiguous."""
    if order is None:
        return tensor.contiguous()
    back = tuple(order.index(axis) for axis in range(tensor.ndim))
    return tensor.permute(order).contiguous().permute(back)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Two views of all the same elements, which change together; of another shape for one row."""
    if (a.data_ptr(), a.dtype, a.device, a.numel()) != (
        b.data_ptr(),
        b.dtype,
        b.device,
        b.numel(),
    ):
        return False
    same = (a.shape, a.stride()) == (b.shape, b.stride())
    return same or (len(b) == 1 and a.is_contiguous() and b.is_contiguous())


def _ends_with(whole: Tensor, sample: Tensor) -> bool:
    """The sample is a view of the last tokens of a whole of one row, [1, tokens, ...]."""
    if (whole.dtype, whole.device, whole.ndim) != (sample.dtype, sample.device, sample.ndim):
        return False
    if whole.ndim < 2 or len(whole) != 1 or len(sample) != 1 or whole.shape[2:] != sample.shape[2:]:
        return False
    if not (whole.is_contiguous() and sample.is_contiguous()):
        return False
    before = (whole.numel() - sample.numel()) * whole.element_size()
    return before > 0 and whole.data_ptr() + before == sample.data_ptr()


def _end(whole: Tensor, sample: Tensor) -> Tensor:
    """The part of a snapshot that is where the sample is in what it was taken of."""
    if whole.numel() == sample.numel():
        return whole
    return whole[:, whole.shape[1] - sample.shape[1] :]


def _autocast_dtype(values: Sequence[Any]) -> torch.dtype | None:
    """The dtype of the autocast scope that the first tensor's device is in, if it is in one."""
    for value in values:
        if isinstance(value, Tensor):
            device = value.device.type
            enabled = torch.is_autocast_enabled(device)
            return torch.get_autocast_dtype(device) if enabled else None
    return None


def _snapshot(tensor: Tensor) -> Tensor:
    """A copy in storage of its own, with the same strides unless rows share memory."""
    if 0 in tensor.stride():
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor)
