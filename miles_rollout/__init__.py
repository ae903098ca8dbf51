"""Runs diffusers pipelines in the trainer's process and turns them into RL rollouts."""

from miles_rollout.media import Media

__version__ = "0.1.0"

__all__ = ["Media"]
