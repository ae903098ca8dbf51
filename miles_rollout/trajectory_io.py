"""Trajectories on disk: one safetensors file and one JSON file in a folder, no pickle."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_rollout.conditions import DenoiserCall, StreamState
from miles_rollout.errors import RolloutStateError
from miles_rollout.params import RolloutParams
from miles_rollout.replay_calls import Conditions
from miles_rollout.stream_trajectory import StreamTrajectory

SCHEMA = 2
"""Raised when what is written changes; other versions are refused."""

_STREAM_TENSORS = (
    "latents",
    "latent_step_indices",
    "timesteps",
    "sigmas",
    "log_probs",
    "num_elements",
    "mask",
)


def write_folder(
    folder: Path,
    *,
    streams: Mapping[str, StreamTrajectory],
    params: RolloutParams,
    conditions: Sequence[Conditions],
    guidance: Mapping[str, float | bool],
    request: Mapping[str, Any],
) -> None:
    """Write a trajectory's fields: ``trajectory.safetensors`` and ``trajectory.json``."""
    table = _TensorTable()
    document = {
        "schema": SCHEMA,
        "params": dataclasses.asdict(params),
        "guidance": dict(guidance),
        "request": dict(request),
        "streams": {name: _stream(table, s) for name, s in streams.items()},
        "conditions": [_conditions(table, c) for c in conditions],
    }
    folder.mkdir(parents=True, exist_ok=True)
    document["strides"] = table.strides
    # Written last and removed first: a crash in between leaves nothing that could be loaded.
    (folder / "trajectory.json").unlink(missing_ok=True)
    save_file(table.tensors, folder / "trajectory.safetensors")
    (folder / "trajectory.json").write_text(json.dumps(document, indent=1))


def read_folder(folder: Path) -> dict[str, Any]:
    """The fields that `write_folder` wrote, with the memory layout that the tensors had.

    Raises ``RolloutStateError`` for a folder that is incomplete, damaged or of another schema.
    """
    for name in ("trajectory.json", "trajectory.safetensors"):
        if not (folder / name).is_file():
            raise RolloutStateError(
                f"trajectory: {name} is missing; got folder {str(folder)!r}; give a folder that "
                "RolloutTrajectory.save wrote"
            )
    try:
        document = json.loads((folder / "trajectory.json").read_text())
        schema = document.get("schema")
        if schema == SCHEMA:
            return _read(document, load_file(folder / "trajectory.safetensors"))
    except (AttributeError, LookupError, TypeError, ValueError, SafetensorError) as error:
        raise RolloutStateError(
            f"trajectory: {str(folder)!r} is damaged; got {error!r}; save it again"
        ) from error
    raise RolloutStateError(
        f"trajectory: {str(folder)!r} has another schema; got {schema!r}; this version reads "
        f"{SCHEMA}"
    )


def _read(document: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    for name, (size, stride) in document["strides"].items():
        tensors[name] = torch.empty_strided(size, stride, dtype=tensors[name].dtype).copy_(
            tensors[name].view(size)
        )
    return {
        "streams": {name: _read_stream(tensors, s) for name, s in document["streams"].items()},
        "params": RolloutParams(**document["params"]),
        "conditions": tuple(_read_conditions(tensors, c) for c in document["conditions"]),
        "guidance": document["guidance"],
        "request": document["request"],
    }


class _TensorTable:
    """Distinct tensors under short names; a name stands for its tensor in the JSON."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.strides: dict[str, tuple[list[int], list[int]]] = {}
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []

    def add(self, tensor: Tensor) -> str:
        if id(tensor) not in self._names:
            name = f"t{len(self._names)}"
            self._names[id(tensor)] = name
            self._kept.append(tensor)
            # safetensors refuses tensors that share storage, and forgets strides.
            self.tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            if not tensor.is_contiguous():
                self.strides[name] = (list(tensor.shape), list(tensor.stride()))
        return self._names[id(tensor)]


def _stream(table: _TensorTable, stream: StreamTrajectory) -> dict[str, Any]:
    tensors = {name: getattr(stream, name) for name in _STREAM_TENSORS}
    return {
        "tensors": {name: table.add(t) for name, t in tensors.items() if t is not None},
        "means": {str(step): table.add(t) for step, t in stream.means.items()},
        "debug": {name: table.add(t) for name, t in stream.debug.items()},
        "sde_step_indices": list(stream.sde_step_indices),
        "velocity_sign": stream.velocity_sign,
    }


def _read_stream(tensors: dict[str, Tensor], document: dict[str, Any]) -> StreamTrajectory:
    return StreamTrajectory(
        **{name: tensors[ref] for name, ref in document["tensors"].items()},
        means={int(step): tensors[ref] for step, ref in document["means"].items()},
        debug={name: tensors[ref] for name, ref in document["debug"].items()},
        sde_step_indices=tuple(document["sde_step_indices"]),
        velocity_sign=document["velocity_sign"],
    )


def _conditions(table: _TensorTable, conditions: Conditions) -> dict[str, Any]:
    return {
        "num_samples": conditions.num_samples,
        "batch_axes": dict(conditions.batch_axes),
        "blocks": dict(conditions.blocks),
        "axis_orders": {
            str(step): {name: list(order) for name, order in orders.items()}
            for step, orders in conditions.axis_orders.items()
        },
        "steps": {
            str(step): [
                {
                    "module": call.module,
                    "args": [_encode(table, arg) for arg in call.args],
                    "kwargs": {k: _encode(table, v) for k, v in call.kwargs.items()},
                    "autocast": _encode(table, call.autocast),
                }
                for call in calls
            ]
            for step, calls in conditions.steps.items()
        },
    }


def _read_conditions(tensors: dict[str, Tensor], document: dict[str, Any]) -> Conditions:
    return Conditions(
        num_samples=document["num_samples"],
        batch_axes=document["batch_axes"],
        blocks=document.get("blocks", {}),
        axis_orders={
            int(step): {name: tuple(order) for name, order in orders.items()}
            for step, orders in document.get("axis_orders", {}).items()
        },
        steps={
            int(step): [
                DenoiserCall(
                    call["module"],
                    tuple(_decode(tensors, arg) for arg in call["args"]),
                    {k: _decode(tensors, v) for k, v in call["kwargs"].items()},
                    _decode(tensors, call["autocast"]),
                )
                for call in calls
            ]
            for step, calls in document["steps"].items()
        },
    )


def _encode(table: _TensorTable, tree: Any) -> Any:
    """A tree as JSON: a leaf that JSON lacks becomes a dict with one marked key."""
    if isinstance(tree, Tensor):
        return {"@tensor": table.add(tree)}
    if isinstance(tree, StreamState):
        shape = [] if tree.shape is None else [list(tree.shape)]
        document = {"@state": [tree.stream, str(tree.dtype).removeprefix("torch."), *shape]}
        return document if tree.front is None else {"@front": [document, table.add(tree.front)]}
    if isinstance(tree, torch.dtype):
        return {"@dtype": str(tree).removeprefix("torch.")}
    if isinstance(tree, tuple):
        return {"@tuple": [_encode(table, item) for item in tree]}
    if isinstance(tree, list):
        return [_encode(table, item) for item in tree]
    if isinstance(tree, dict):
        return {"@dict": {key: _encode(table, value) for key, value in tree.items()}}
    return tree


def _decode(tensors: dict[str, Tensor], tree: Any) -> Any:
    if isinstance(tree, list):
        return [_decode(tensors, item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "@tensor":
        return tensors[value]
    if kind == "@state":
        shape = tuple(value[2]) if len(value) > 2 else None
        return StreamState(value[0], getattr(torch, value[1]), shape)
    if kind == "@front":
        return dataclasses.replace(_decode(tensors, value[0]), front=tensors[value[1]])
    if kind == "@dtype":
        return getattr(torch, value)
    if kind == "@tuple":
        return tuple(_decode(tensors, item) for item in value)
    return {key: _decode(tensors, item) for key, item in value.items()}
