"""A recorded step under the weights of now: mean, std and log-prob of each stream, and joint."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from miles_rollout.params import RolloutParams
from miles_rollout.shapes import Bool, Float
from miles_rollout.stream_trajectory import StreamTrajectory
from miles_rollout.transitions import schedule_step


@dataclass(frozen=True, kw_only=True)
class StreamReplay:
    """One step of one stream, computed again with the weights of now."""

    velocity: Float[Tensor, "rows ..."]
    mean: Float[Tensor, "rows ..."]
    std: Float[Tensor, "rows ..."]
    log_prob: Float[Tensor, " rows"]
    mask: Bool[Tensor, "rows ..."] | None = None
    """False where an element is neither noised, scored nor counted."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One step of all streams; ``log_prob`` is joint over the stochastic ones."""

    streams: dict[str, StreamReplay] = field(default_factory=dict)
    log_prob: Float[Tensor, " rows"]


def score_stream(
    stream: StreamTrajectory, step: int, velocity: Tensor, params: RolloutParams
) -> StreamReplay:
    """Score the recorded next state of ``step``, by the function that took the step."""
    scored = schedule_step(
        params.sde_type,
        stream.latent(step),
        velocity * stream.velocity_sign if stream.velocity_sign != 1 else velocity,
        sigmas=stream.sigmas,
        step=step,
        noise_level=params.noise_level,
        next_sample=stream.latent(step + 1),
        mask=stream.mask,
    )
    return StreamReplay(
        velocity=velocity,
        mean=scored.mean,
        std=scored.std,
        log_prob=scored.log_prob,
        mask=stream.mask,
    )
