"""One denoising step of some rows, under the weights of now, the reference's or the old ones."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor

from miles_rollout import Replay, RolloutEngine, RolloutTrajectory
from miles_rollout.noise import keyed_noise
from miles_rollout.shapes import Float
from trainers.policy import Policy

Who = Literal["now", "base", "start", "old"]
"""Whose weights: those that are trained, a reference's, or the policy's that sampled."""


@final
class TrainedStep:
    """What an algorithm's loss is made of. Only what it asks for is computed.

    ``rows`` of the trajectory (None: all, whose replay is bitwise); ``seeds``, one a row, key noise
    that is drawn for training.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        policy: Policy,
        trajectory: RolloutTrajectory,
        index: int,
        *,
        advantages: Float[Tensor, " batch"],
        seeds: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> None:
        chosen = list(range(len(advantages)) if rows is None else rows)
        self.index = index
        self.trajectory = trajectory if rows is None else trajectory.select(chosen)
        self.advantages = advantages[chosen].to(self.old_log_probs.device)
        """[R]"""
        self.replayed: Replay | None = None
        """What `replay` gave, once it was asked for."""
        self._seeds = [seeds[row] for row in chosen]
        self._engine = engine
        self._policy = policy

    @property
    def old_stream_log_probs(self) -> dict[str, Float[Tensor, " rows"]]:
        """Of the rollout, by stream."""
        streams = self.trajectory.streams.items()
        return {name: stream.log_probs[:, self.index] for name, stream in streams}

    @property
    def old_log_probs(self) -> Float[Tensor, " rows"]:
        """Of the rollout, joint over the streams."""
        return self.trajectory.joint(self.old_stream_log_probs, self.index)

    def sqrt_dt(self, stream: str) -> float:
        """``sqrt(-dt)`` of the step, by the stream's own sigmas."""
        sigmas = self.trajectory.streams[stream].sigmas.double()
        return (sigmas[self.index] - sigmas[self.index + 1]).sqrt().item()

    def replay(self, who: Who = "now") -> Replay:
        """Velocity, mean, std and log-prob of the recorded step; with gradients for "now" only."""
        with self._as(who):
            replay = self._engine.replay(self.trajectory, self.index)
        if who == "now":
            self.replayed = replay
        return replay

    def velocities(self, states: Mapping[str, Tensor], who: Who = "now") -> dict[str, Tensor]:
        """noise - x0 of each stream on other states; with gradients for "now" only."""
        with self._as(who):
            return self._engine.velocities(self.trajectory, self.index, states)

    def noise(self, stream: str, like: Float[Tensor, "rows ..."]) -> Float[Tensor, "rows ..."]:
        """Standard normals that no rollout draws, keyed by row, stream and step."""
        key = ("forward_process", stream, self.index)
        return keyed_noise(self._seeds, like.shape[1:], *key).to(like.device)

    @contextlib.contextmanager
    def _as(self, who: Who) -> Any:
        if who == "now":
            yield
            return
        scope = self._policy.old() if who == "old" else self._policy.reference(who)
        with torch.no_grad(), scope:
            yield
