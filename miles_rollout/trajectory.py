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

from miles_rollout.conditions import tensors_of
from miles_rollout.errors import RolloutParamsError, RolloutStateError
from miles_rollout.params import RolloutParams
from miles_rollout.replay_calls import Conditions
from miles_rollout.scoring import Replay, score_stream
from miles_rollout.shapes import Float
from miles_rollout.stream_trajectory import StreamTrajectory
from miles_rollout.trajectory_io import read_folder, write_folder


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
        held = {
            step
            for stream in self.streams.values()
            for step in stream.sde_step_indices
            if {step, step + 1} <= set(stream.latent_step_indices.tolist())
        }
        return tuple(step for step in self.call_steps if step in held)

    @property
    def call_steps(self) -> tuple[int, ...]:
        """The steps whose denoiser calls are here."""
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
        self._check_stream(stream)
        held = self.streams[stream]
        if step not in held.sde_step_indices:
            raise RolloutParamsError(
                f"trajectory: step {step} of stream {stream!r} was not stochastic and has no "
                f"density; got sde_step_indices {list(held.sde_step_indices)}; train one of those"
            )
        return held.latent(step), held.latent(step + 1)

    def score(self, step: int, velocities: Mapping[str, Float[Tensor, "batch ..."]]) -> Replay:
        """Score the recorded ``step`` for what the denoiser predicts now, with gradients if any.

        ``velocities`` maps streams to [B, ...], with the sign as predicted; those that are not
        stochastic in ``step`` may be left out. Bitwise the recorded log-prob for the recorded
        velocity. Raises ``RolloutParamsError`` for a step that `pair` refuses or a velocity that is
        missing, and ``RolloutStateError`` for a log-prob that is not finite.
        """
        for name in velocities:
            self._check_stream(name)
        live = [n for n, s in self.streams.items() if step in s.sde_step_indices]
        missing = [name for name in live if name not in velocities]
        if missing or not live:
            raise RolloutParamsError(
                f"trajectory: step {step} has the stochastic streams {live}; got velocities of "
                f"{sorted(velocities)}; score a stochastic step, with a velocity for each stream"
            )
        streams = {}
        for name in live:
            streams[name] = score_stream(self.streams[name], step, velocities[name], self.params)
        joint = self.joint({name: s.log_prob for name, s in streams.items()}, step)
        if not torch.isfinite(joint).all():
            raise RolloutStateError(
                f"trajectory: the log-prob of step {step} is not finite; got {joint.tolist()}; check "
                "the denoiser's weights, dtype and guidance scale"
            )
        return Replay(streams=streams, log_prob=joint)

    def _check_stream(self, stream: str) -> None:
        if stream not in self.streams:
            raise RolloutParamsError(
                f"trajectory: no such stream; got {stream!r}; choose among {sorted(self.streams)}"
            )

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
                means={k: torch.cat([p.means[k] for p in pieces]) for k in pieces[0].means},
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
        write_folder(
            Path(path),
            streams=self.streams,
            params=self.params,
            conditions=self.conditions,
            guidance=self.guidance,
            request=self.request,
        )

    @staticmethod
    def load(path: str | Path) -> RolloutTrajectory:
        """Read what `save` wrote, bit for bit. Raises ``RolloutStateError`` for anything else."""
        return RolloutTrajectory(**read_folder(Path(path)))


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
