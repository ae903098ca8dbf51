"""What a rollout leaves behind: states, log-probs, and the calls to replay.

A trajectory says what it holds. ``timesteps`` and ``sigmas`` cover every step; ``latents`` follow
``return_step_indices``; ``latent_step_indices`` tells which boundary each kept latent is. Pairs are
found by that provenance, never by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles_rollout.conditions import DenoiserCall, StepCalls, StreamState, map_calls, tensors_of
from miles_rollout.errors import RolloutParamsError
from miles_rollout.params import RolloutParams
from miles_rollout.shapes import Bool, Float, Int


@dataclass(frozen=True, kw_only=True)
class StreamTrajectory:
    """One latent stream of a request: T steps, B samples, K kept states."""

    latents: Float[Tensor, "batch kept ..."]
    """The states as the denoiser saw them; the final one is what is decoded."""
    latent_step_indices: Int[Tensor, " kept"]
    """Which boundary in 0..T each kept latent is."""
    timesteps: Float[Tensor, " boundaries"]
    """[T + 1] in the scheduler's own convention, terminal value included."""
    sigmas: Float[Tensor, " boundaries"]
    """[T + 1], exact copies of the scheduler's, never filtered."""
    log_probs: Float[Tensor, "batch steps"]
    """[B, T]: mean over elements; zeros on deterministic steps."""
    sde_step_indices: tuple[int, ...]
    num_elements: Int[Tensor, " batch"]
    """The unmasked elements of each sample, which weight the joint log-prob."""
    mask: Bool[Tensor, "batch ..."] | None = None
    """False where an element is neither noised, scored nor counted."""
    velocity_sign: float = 1.0
    """-1 where the denoiser predicts x0 - noise."""
    debug: Mapping[str, Tensor] = field(default_factory=dict)
    """With ``RolloutParams.debug``: velocity, mean, noise [B, T, ...] and std [B, T, 1, ...]."""

    @property
    def num_steps(self) -> int:
        """T, the denoiser's evaluations."""
        return self.log_probs.shape[1]

    def latent(self, boundary: int) -> Float[Tensor, "batch ..."]:
        """The state at a boundary in 0..T, contiguous. Raises for one that was not kept."""
        at = (self.latent_step_indices == boundary).nonzero().flatten().tolist()
        if not at:
            raise RolloutParamsError(
                f"trajectory: boundary {boundary} was not kept; got return_step_indices "
                f"{self.latent_step_indices.tolist()}; add {boundary} to them"
            )
        return self.latents[:, at[0]].contiguous()

    def map(self, batched: Any, shared: Any) -> StreamTrajectory:
        """Apply ``batched`` to tensors with a batch axis and ``shared`` to the others."""
        return replace(
            self,
            latents=batched(self.latents),
            log_probs=batched(self.log_probs),
            num_elements=batched(self.num_elements),
            mask=None if self.mask is None else batched(self.mask),
            debug={name: batched(tensor) for name, tensor in self.debug.items()},
            latent_step_indices=shared(self.latent_step_indices),
            timesteps=shared(self.timesteps),
            sigmas=shared(self.sigmas),
        )


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The denoiser calls of ``num_samples`` consecutive rows: one rollout, or a part of one."""

    num_samples: int
    steps: StepCalls
    batch_axes: Mapping[str, int | None]
    """Argument name -> its batch axis (None: shared by all rows). What is not named cannot be cut."""
    blocks: Mapping[str, int] = field(default_factory=dict)
    """Argument name -> how often its batch axis holds all rows, block after block; 1 if not named."""

    def calls(self, step: int, states: Mapping[str, Tensor]) -> list[DenoiserCall]:
        """The calls of a step, with the streams' states filled in."""

        def fill(_: str, leaf: Any) -> Any:
            return leaf.of(states) if isinstance(leaf, StreamState) else leaf

        return [call.map(fill) for call in self.steps[step]]

    def select(self, rows: Sequence[int]) -> Conditions:
        """The calls of some rows only."""
        if list(rows) == list(range(self.num_samples)):
            return self

        def cut(name: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            axis = self._axis(name)
            if axis is None or leaf.shape[axis] == 1 < self.num_samples:  # one row for all
                return leaf
            blocks = self.blocks.get(name, 1)
            if leaf.shape[axis] != blocks * self.num_samples:
                raise RolloutParamsError(
                    f"trajectory: the denoiser's argument {name!r} should hold {blocks} x "
                    f"{self.num_samples} rows; got {leaf.shape[axis]}; declare its batch axis and "
                    "blocks in the adapter"
                )
            chosen = [block * self.num_samples + row for block in range(blocks) for row in rows]
            return leaf.index_select(axis, _index(chosen, leaf))

        def cut_lists(call: DenoiserCall) -> DenoiserCall:
            kwargs = {
                name: [value[r] for r in rows]
                if isinstance(value, list) and self.batch_axes.get(name) == 0
                else value
                for name, value in call.kwargs.items()
            }
            return replace(call, kwargs=kwargs)

        steps = {s: [cut_lists(c) for c in calls] for s, calls in self.steps.items()}
        return replace(self, num_samples=len(rows), steps=map_calls(cut, steps))

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


@dataclass(frozen=True, kw_only=True)
class RolloutTrajectory:
    """All streams of B samples, what was asked for, and the calls to replay."""

    streams: Mapping[str, StreamTrajectory]
    params: RolloutParams
    conditions: tuple[Conditions, ...] = ()
    """One entry for each rollout that was joined by `cat`, covering the rows in order."""
    guidance: Mapping[str, float | bool] = field(default_factory=dict)
    """How the pipeline combined its denoiser calls, for example ``do_true_cfg``."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """The numbers and strings of the pipeline call (size, steps, scales)."""

    @property
    def num_samples(self) -> int:
        """B, the rows."""
        return next(iter(self.streams.values())).log_probs.shape[0]

    @property
    def num_steps(self) -> int:
        """T, the denoiser's evaluations, the same for all streams."""
        return next(iter(self.streams.values())).num_steps

    @property
    def replayable_steps(self) -> tuple[int, ...]:
        """The stochastic steps whose states and calls are all here."""
        return tuple(sorted(self.conditions[0].steps)) if self.conditions else ()

    @property
    def log_probs(self) -> Float[Tensor, "batch steps"]:
        """The joint log-prob [B, T] over the streams that are stochastic at each step."""
        columns = []
        for step in range(self.num_steps):
            columns.append(
                self.joint({n: s.log_probs[:, step] for n, s in self.streams.items()}, step)
            )
        return torch.stack(columns, dim=1)

    def joint(
        self, log_probs: Mapping[str, Float[Tensor, " rows"]], step: int
    ) -> Float[Tensor, " rows"]:
        """Join per-stream log-probs of one step by the weights that `params` asks for."""
        live = [n for n, s in self.streams.items() if step in s.sde_step_indices]
        if not live:
            return torch.zeros_like(next(iter(log_probs.values())))
        weights = self.params.stream_weights
        if not isinstance(weights, str):
            return sum((log_probs[n] * weights.get(n, 0.0) for n in live), torch.zeros(()))
        if len(live) == 1:
            return log_probs[live[0]]
        counts = {n: self.streams[n].num_elements for n in live}
        total = sum(counts[n] for n in live)
        return sum((log_probs[n] * counts[n] for n in live), torch.zeros(())) / total

    def pair(
        self, stream: str, step: int
    ) -> tuple[Float[Tensor, "batch ..."], Float[Tensor, "batch ..."]]:
        """The states before and after a stochastic step, contiguous, by provenance.

        Raises ``RolloutParamsError`` for an unknown stream, a step that was not stochastic, or a
        boundary that was not kept.
        """
        if stream not in self.streams:
            raise RolloutParamsError(
                f"trajectory: no such stream; got {stream!r}; choose among {sorted(self.streams)}"
            )
        held = self.streams[stream]
        if step not in held.sde_step_indices:
            raise RolloutParamsError(
                f"trajectory: step {step} of stream {stream!r} was not stochastic and has no "
                f"density; got sde_step_indices {list(held.sde_step_indices)}; train one of those"
            )
        return held.latent(step), held.latent(step + 1)

    def select(self, samples: Sequence[int] | Tensor) -> RolloutTrajectory:
        """The trajectory of some samples, in the order given. Raises for one out of range."""
        rows = samples.tolist() if isinstance(samples, Tensor) else list(samples)
        if not rows:
            raise RolloutParamsError("trajectory: no samples; got []; select at least one")
        for row in rows:
            if isinstance(row, bool) or not 0 <= row < self.num_samples:
                raise RolloutParamsError(
                    f"trajectory: no sample {row}; got {rows}; choose in 0..{self.num_samples - 1}"
                )
        streams = {
            name: stream.map(lambda t: t.index_select(0, _index(rows, t)), lambda t: t)
            for name, stream in self.streams.items()
        }
        parts = tuple(c.select(part) for c, part in self.parts(rows))
        return replace(self, streams=streams, conditions=parts)

    def parts(self, rows: Sequence[int]) -> list[tuple[Conditions, list[int]]]:
        """Split ``rows`` into runs of one rollout each, with the rows' numbers inside of it."""
        owner = [(i, r) for i, c in enumerate(self.conditions) for r in range(c.num_samples)]
        runs: list[tuple[int, list[int]]] = []
        for row in rows if owner else []:
            i, inside = owner[row]
            if runs and runs[-1][0] == i:
                runs[-1][1].append(inside)
            else:
                runs.append((i, [inside]))
        return [(self.conditions[i], inside) for i, inside in runs]

    @staticmethod
    def cat(trajectories: Sequence[RolloutTrajectory]) -> RolloutTrajectory:
        """Join rollouts of one plan along the batch; raises if they differ in more than rows."""
        if not trajectories:
            raise RolloutParamsError("RolloutTrajectory.cat: nothing to join; got []; pass some")
        first, *rest = trajectories
        for other in rest:
            _check_joinable(first, other)
        streams = {}
        for name in first.streams:
            pieces = [t.streams[name] for t in trajectories]
            mask = [p.mask for p in pieces if p.mask is not None]
            streams[name] = replace(
                pieces[0],
                latents=torch.cat([p.latents for p in pieces]),
                log_probs=torch.cat([p.log_probs for p in pieces]),
                num_elements=torch.cat([p.num_elements for p in pieces]),
                mask=torch.cat(mask) if mask else None,
                debug={k: torch.cat([p.debug[k] for p in pieces]) for k in pieces[0].debug},
            )
        conditions = tuple(c for t in trajectories for c in t.conditions)
        return replace(first, streams=streams, conditions=conditions)

    def to(self, device: str | torch.device) -> RolloutTrajectory:
        """Move every tensor."""
        streams = {
            name: stream.map(lambda t: t.to(device), lambda t: t.to(device))
            for name, stream in self.streams.items()
        }
        conditions = tuple(c.map(lambda t: t.to(device)) for c in self.conditions)
        return replace(self, streams=streams, conditions=conditions)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; one that is shared by several calls counts once."""
        tensors: list[Tensor] = []

        def visit(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        for stream in self.streams.values():
            stream.map(visit, visit)
        for conditions in self.conditions:
            tensors += tensors_of(conditions.steps)
        return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())

    def save(self, path: str | Path) -> None:
        """Write a folder: ``trajectory.safetensors`` and ``trajectory.json``."""
        from miles_rollout.trajectory_io import save_trajectory

        save_trajectory(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> RolloutTrajectory:
        """Read what `save` wrote, bit for bit. Raises ``RolloutStateError`` for anything else."""
        from miles_rollout.trajectory_io import load_trajectory

        return load_trajectory(Path(path))


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.long, device=like.device)


def _numbers(request: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in request.items() if not isinstance(value, str)}


def _check_joinable(first: RolloutTrajectory, other: RolloutTrajectory) -> None:
    same = {
        "streams": list(first.streams) == list(other.streams),
        "params": first.params == other.params,
        "guidance": first.guidance == other.guidance,
        # Two sizes can have one number of tokens; prompts may differ.
        "request": _numbers(first.request) == _numbers(other.request),
    }
    for name in first.streams if same["streams"] else ():
        a, b = first.streams[name], other.streams[name]
        same[f"{name}.sigmas"] = torch.equal(a.sigmas, b.sigmas)
        same[f"{name}.latent_step_indices"] = torch.equal(
            a.latent_step_indices, b.latent_step_indices
        )
        same[f"{name}.timesteps"] = torch.equal(a.timesteps, b.timesteps)
        same[f"{name}.shape"] = a.latents.shape[1:] == b.latents.shape[1:]
        same[f"{name}.dtype"] = a.latents.dtype == b.latents.dtype
        same[f"{name}.mask"] = (a.mask is None) == (b.mask is None)
    different = [what for what, equal in same.items() if not equal]
    if different:
        raise RolloutParamsError(
            f"RolloutTrajectory.cat: rollouts must differ in rows only; got different "
            f"{', '.join(different)}; join rollouts of one plan and one size"
        )
