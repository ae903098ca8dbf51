"""Rewards by name. A new one is a function or class and a line here, or a path in the config.

An entry names, as ``module:attribute``, one of two things: a function that **is** the reward (it
has an argument ``media``; ``kwargs`` are its further arguments), or a class or function that
**builds** it from ``kwargs``. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from trainers.config_loader import ConfigError
from trainers.rewards.protocol import Reward
from trainers.rewards.source import RewardSource

__all__ = ["REWARDS", "Reward", "RewardSource", "build_reward", "resolve_reward"]

REWARDS: Mapping[str, str] = {
    "aesthetic": "trainers.rewards.aesthetic:Aesthetic",
    "clap": "trainers.rewards.clap:Clap",
    "clip_score": "trainers.rewards.clip_score:clip_score",
    "colour_and_loudness": "trainers.rewards.colour_and_loudness:colour_and_loudness",
    "jpeg_compressibility": "trainers.rewards.jpeg_compressibility:jpeg_compressibility",
    "ocr": "trainers.rewards.ocr:Ocr",
    "pickscore": "trainers.rewards.pickscore:pickscore",
    "remote": "trainers.rewards.remote:RemoteReward",
    "shape_match": "trainers.rewards.shape_match:shape_match",
    "speech_quality": "trainers.rewards.speech_quality:SpeechQuality",
}


def build_reward(name: str, kwargs: Mapping[str, Any]) -> Reward:
    """The reward called ``name``, or the one at the path ``module:attribute``."""
    return resolve_reward(name, kwargs).get()


def resolve_reward(name: str, kwargs: Mapping[str, Any]) -> RewardSource:
    """Check name and ``kwargs`` and give the source of the reward: no model is loaded yet."""
    return RewardSource(name, _import(name), kwargs)


def _import(name: str) -> Callable[..., Any]:
    module_name, colon, attribute = REWARDS.get(name, name).partition(":")
    if not colon:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        raise ConfigError(
            f"reward {name!r}: no such reward"
            + (f"; did you mean {near[0]}?" if near else "")
            + f"; known are {', '.join(sorted(REWARDS))}, or write module:attribute"
        )
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"reward {name!r}: cannot be imported; got {error}; install what is missing or correct "
            "the path"
        ) from error
    target = getattr(module, attribute, None)
    if not callable(target):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        raise ConfigError(
            f"reward {name!r}: {module_name} has no function or class {attribute!r}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    return target
