"""Runs diffusers pipelines in the trainer's process and turns them into RL rollouts."""

from miles_rollout.controller import FlowRolloutController
from miles_rollout.engine import RolloutBatch, RolloutEngine
from miles_rollout.errors import MilesRolloutError, RolloutParamsError, RolloutStateError
from miles_rollout.media import Media
from miles_rollout.params import RolloutParams
from miles_rollout.scoring import Replay, StreamReplay
from miles_rollout.session import RolloutSession, rollout
from miles_rollout.shared_prefix import SharedPrefix
from miles_rollout.trajectory import RolloutTrajectory, StreamTrajectory
from miles_rollout.transitions import FlowStep, flow_step

__version__ = "0.1.0"

__all__ = [
    "FlowRolloutController",
    "FlowStep",
    "Media",
    "MilesRolloutError",
    "Replay",
    "RolloutBatch",
    "RolloutEngine",
    "RolloutParams",
    "RolloutParamsError",
    "RolloutSession",
    "RolloutStateError",
    "RolloutTrajectory",
    "SharedPrefix",
    "StreamReplay",
    "StreamTrajectory",
    "flow_step",
    "rollout",
]
