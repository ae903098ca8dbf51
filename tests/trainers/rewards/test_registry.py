from __future__ import annotations

import re
import sys

import pytest
import torch

from miles_rollout.media import Media
from trainers.config_loader import ConfigError
from trainers.rewards import REWARDS, build_reward, resolve_reward
from trainers.rewards.protocol import Reward

HERE = __name__
loaded: list[str] = []


def constant(media, prompts, metadata, *, value=1.0):
    return [value] * len(media)


class Model:
    def __init__(self, *, scale: float = 2.0) -> None:
        loaded.append("model")
        self.scale = scale

    def __call__(self, media, prompts, metadata):
        return [self.scale] * len(media)


def factory(scale: float) -> Model:
    return Model(scale=scale)


MEDIA = [Media(image=torch.zeros(3, 8, 8))]


def score(reward):
    return list(reward(MEDIA, ["p"], [{}]))


def test_every_name_points_at_a_reward():
    needed = {"remote": {"url": "http://127.0.0.1:1"}, "aesthetic": {"head": "head.safetensors"}}
    builders = {name: resolve_reward(name, needed.get(name, {})) for name in REWARDS}
    # Their own tests build these, from models that are not here.
    for name in ("aesthetic", "clap", "clip_score", "pickscore"):
        del builders[name]
    for source in builders.values():
        assert isinstance(source.get(), Reward)
    assert score(build_reward("jpeg_compressibility", {}))[0] < 0


def test_a_path_names_a_reward_or_what_builds_it():
    assert score(build_reward(f"{HERE}:constant", {})) == [1.0]
    assert score(build_reward(f"{HERE}:constant", {"value": 3.0})) == [3.0]
    assert score(build_reward(f"{HERE}:Model", {"scale": 4.0})) == [4.0]
    assert score(build_reward(f"{HERE}:factory", {"scale": 5.0})) == [5.0]


def test_resolving_checks_but_builds_nothing():
    loaded.clear()
    source = resolve_reward(f"{HERE}:Model", {})
    assert not loaded
    assert source.get() is source.get()
    assert loaded == ["model"]


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (
            "jpeg_compresibility",
            {},
            "reward 'jpeg_compresibility': no such reward; did you mean jpeg_compressibility?; "
            "known are aesthetic, clap, clip_score, colour_and_loudness, jpeg_compressibility, ocr, "
            "pickscore, remote, shape_match, speech_quality, or write module:attribute",
        ),
        ("zzz", {}, "reward 'zzz': no such reward; known are aesthetic, clap, "),
        ("no_such_module:x", {}, "reward 'no_such_module:x': cannot be imported; got No module"),
        (
            "builtins:max",
            {},
            "reward 'builtins:max': its arguments are not known; got <built-in function max> (",
        ),
        (":x", {}, "reward ':x': cannot be imported; got Empty module name"),
        (
            "trainers.rewards.protocol:Rewards",
            {},
            "reward 'trainers.rewards.protocol:Rewards': trainers.rewards.protocol has no function "
            "or class 'Rewards'; did you mean Reward?",
        ),
        (
            f"{HERE}:Model",
            {"scael": 1},
            f"reward '{HERE}:Model': wrong kwargs: got an unexpected keyword argument 'scael'; "
            "got {'scael': 1}; it takes scale",
        ),
        (f"{HERE}:factory", {}, f"reward '{HERE}:factory': wrong kwargs: missing a required"),
        ("jpeg_compressibility", {"quality": 1}, "reward 'jpeg_compressibility': wrong kwargs: "),
    ],
)
def test_a_reward_that_cannot_be_built_says_why(name, kwargs, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        resolve_reward(name, kwargs)


def test_a_reward_is_imported_only_when_asked_for():
    module = "trainers.rewards.jpeg_compressibility"
    kept = sys.modules.pop(module)
    try:
        resolve_reward(f"{HERE}:constant", {})
        assert module not in sys.modules
    finally:
        sys.modules[module] = kept
