"""The conditioning of a trajectory as SGLang's ``denoising_env``: static, by guidance branch.

SGLang keeps what the denoiser is given once a request, as keyword arguments of a positive and a
negative branch. So what recurs in every recorded step goes there, a row a sample, and what changes
from step to step (state, timestep) is made again by the reader, who knows the denoiser.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from miles_rollout.conditions import DenoiserCall, StreamState, map_tree
from miles_rollout.errors import RolloutParamsError
from miles_rollout.replay_calls import Conditions
from miles_rollout.sglang_response import ResponseReader
from miles_rollout.trajectory import RolloutTrajectory

Branch = Literal["pos", "neg"]
"""A guidance branch of ``denoising_env``."""


@dataclass(frozen=True, kw_only=True)
class EnvStep:
    """What a step's denoiser calls are made of; tensors of the environment have all rows again."""

    step: int
    num_samples: int
    timesteps: Mapping[str, Tensor]
    """Stream -> the step's timestep, 0-dim, in the scheduler's own convention."""
    states: Mapping[str, Tensor]
    """Stream -> the state before the step, [B, ...]."""
    pos_cond_kwargs: Mapping[str, Any]
    neg_cond_kwargs: Mapping[str, Any]
    image_kwargs: Mapping[str, Any]
    guidance: Any
    """The embedded guidance scale."""


BuildCalls = Callable[[EnvStep], Sequence[DenoiserCall]]


def env_rows(
    conditions: Conditions, branches: Sequence[Branch] | None, per_step: Collection[str]
) -> list[dict[str, Any] | None]:
    """The environment of each row. Raises ``RolloutParamsError`` for what it cannot hold."""
    if not conditions.steps:
        return [None] * conditions.num_samples
    calls = _static_calls(conditions, per_step)
    pieces = [(call, *piece) for call in calls for piece in _blocks_of(call, conditions)]
    roles: Sequence[str] = ("pos",) if branches is None and len(pieces) == 1 else branches or ()
    if len(roles) != len(pieces) or len(set(roles)) != len(roles) or set(roles) - {"pos", "neg"}:
        raise RolloutParamsError(
            f"sglang layout: a step has {len(pieces)} guidance branches, and denoising_env holds a "
            f"positive and a negative one; got branches {branches}; pass what each call, or block "
            'of rows in it, is, in order, for example ("pos", "neg")'
        )
    rows: list[dict[str, Any] | None] = []
    for row in range(conditions.num_samples):
        env: dict[str, Any] = dict.fromkeys(
            ("image_kwargs", "pos_cond_kwargs", "neg_cond_kwargs", "guidance")
        )
        for role, (call, block, count) in zip(roles, pieces, strict=True):
            kwargs = {
                name: _row(name, value, row, block, count, conditions)
                for name, value in call.items()
            }
            guidance = kwargs.pop("guidance", None)
            env["guidance"] = guidance if env["guidance"] is None else env["guidance"]
            env[f"{role}_cond_kwargs"] = kwargs
        rows.append(env)
    return rows


def read_conditions(
    readers: Sequence[ResponseReader],
    trajectory: RolloutTrajectory,
    calls: BuildCalls,
    batch_axes: Mapping[str, int | None],
    blocks: Mapping[str, int],
) -> Conditions:
    """The calls of each replayable step, made by ``calls``."""
    for reader in readers:
        reader.require("denoising_env.pos_cond_kwargs")
    envs: dict[str, Any] = {}
    for part in ("pos_cond_kwargs", "neg_cond_kwargs", "image_kwargs"):
        held = [reader.tree(f"denoising_env.{part}") or {} for reader in readers]
        envs[part] = _joined(readers, part, held, batch_axes)
    guidance = [reader.tree("denoising_env.guidance") for reader in readers]
    joined = _joined(
        readers, "guidance", [{"guidance": g} for g in guidance], {"guidance": 0} | dict(batch_axes)
    )
    names = list(trajectory.streams)
    plans = [trajectory.params.plan(trajectory.streams[n].sigmas, n).replayable for n in names]
    steps = {
        step: list(
            calls(
                EnvStep(
                    step=step,
                    num_samples=len(readers),
                    timesteps={n: trajectory.streams[n].timesteps[step] for n in names},
                    states={n: trajectory.streams[n].latent(step) for n in names},
                    guidance=joined["guidance"],
                    **envs,
                )
            )
        )
        for step in sorted(set().union(*plans))
    }
    return Conditions(
        num_samples=len(readers), steps=steps, batch_axes=dict(batch_axes), blocks=dict(blocks)
    )


def _static_calls(conditions: Conditions, per_step: Collection[str]) -> list[dict[str, Any]]:
    """The keyword arguments of each call of a step that are the same in all steps.

    ``per_step`` names those that are not, whatever a single recorded step shows.
    """
    first, *others = conditions.steps.values()
    if any(call.args for calls in conditions.steps.values() for call in calls):
        raise RolloutParamsError(
            "sglang layout: denoising_env names every argument; got a denoiser call with positional "
            "ones; keep such trajectories with RolloutTrajectory.save"
        )
    if any(len(calls) != len(first) for calls in others):
        raise RolloutParamsError(
            "sglang layout: denoising_env is the same in every step; got "
            f"{sorted({len(first), *map(len, others)})} denoiser calls a step; keep such "
            "trajectories with RolloutTrajectory.save"
        )
    return [
        {
            name: value
            for name, value in call.kwargs.items()
            if name not in per_step
            and not _has_state(value)
            and all(
                name in calls[i].kwargs and _equal(value, calls[i].kwargs[name]) for calls in others
            )
        }
        for i, call in enumerate(first)
    ]


def _blocks_of(call: Mapping[str, Any], conditions: Conditions) -> list[tuple[int, int]]:
    """(block, number of blocks) of the guidance branches that a call holds side by side."""
    count = max((conditions.blocks.get(name, 1) for name in call), default=1)
    return [(block, count) for block in range(count)]


def _row(name: str, value: Any, row: int, block: int, count: int, conditions: Conditions) -> Any:
    """What one sample of one branch is given, without its batch axis; a list keeps its own."""
    axis = conditions.batch_axes.get(name)
    if axis is None:
        return _cloned(value)
    at = row + (block * conditions.num_samples if conditions.blocks.get(name, 1) == count else 0)
    if isinstance(value, list):
        return [_cloned(value[at])]

    def cut(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.select(axis, at if leaf.shape[axis] > 1 else 0).cpu().clone()

    return map_tree(cut, value, name)


def _joined(
    readers: Sequence[ResponseReader],
    part: str,
    rows: Sequence[Mapping[str, Any]],
    batch_axes: Mapping[str, int | None],
) -> dict[str, Any]:
    """The rows of all samples side by side again, by the declared axes."""
    for reader, row in zip(readers, rows, strict=True):
        if set(row) != set(rows[0]):
            reader.refuse(
                f"denoising_env.{part} has other names than the first sample's",
                sorted(row),
                "pass samples of one request",
            )
    joined: dict[str, Any] = {}
    for name, first in rows[0].items():
        axis, values = batch_axes.get(name), [row[name] for row in rows]
        if axis is not None and isinstance(first, list):
            joined[name] = [item for value in values for item in value]
        elif axis is not None and isinstance(first, Tensor):
            for reader, value in zip(readers, values, strict=True):
                if value.shape != first.shape:
                    reader.refuse(
                        f"denoising_env.{part}.{name} has another shape than the first sample's",
                        f"{tuple(value.shape)} for {tuple(first.shape)}",
                        "convert apart what was denoised apart, and join with RolloutTrajectory.cat",
                    )
            joined[name] = torch.stack(values, dim=axis)
        else:
            for reader, value in zip(readers, values, strict=True):
                if not _equal(value, first):
                    reader.refuse(
                        f"denoising_env.{part}.{name} differs between samples, and no batch axis is "
                        "declared",
                        f"batch_axes {dict(batch_axes)}",
                        f"declare {name!r} in batch_axes",
                    )
            joined[name] = first
    return joined


def _has_state(tree: Any) -> bool:
    found = []
    map_tree(lambda _, leaf: found.append(isinstance(leaf, StreamState)), tree, "")
    return any(found)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(_equal(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and bool(a == b)


def _cloned(tree: Any) -> Any:
    return map_tree(lambda _, t: t.cpu().clone() if isinstance(t, Tensor) else t, tree, "")
