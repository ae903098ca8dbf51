"""Prompts that a reward refuses, by the line of their file and before a model is loaded."""

import re

import pytest

from tests.tiny_run import tiny_config
from trainers.build import build_trainer, read_inputs
from trainers.config_loader import ConfigError
from trainers.data import DataError
from trainers.rewards import build_reward, resolve_reward
from trainers.rewards.prompt_check import check_prompt, with_prompt_check

HERE = __name__


def refuse_short(prompt, metadata):
    if len(prompt) < metadata.get("least", 3):
        raise ValueError(f"too short; got {prompt!r}; set more")


@with_prompt_check(refuse_short)
def lengths(media, prompts, metadata, *, scale=1.0):
    return [scale * len(prompt) for prompt in prompts]


class Lengths:
    @staticmethod
    def check_prompt(prompt, metadata):
        refuse_short(prompt, metadata)

    def __call__(self, media, prompts, metadata):
        return [len(prompt) for prompt in prompts]


def constant(media, prompts, metadata):
    return [0.0] * len(media)


@pytest.mark.parametrize("name", ["lengths", "Lengths"])
def test_functions_and_classes_may_refuse_a_prompt(name):
    reward = resolve_reward(f"{HERE}:{name}", {})
    check_prompt(name, reward, "long", {}, where="here")
    check_prompt(name, reward, "ab", {"least": 2}, where="here")
    with pytest.raises(DataError, match=rf"^here: reward '{name}': too short; got 'ab'; set more$"):
        check_prompt(name, reward, "ab", {}, where="here")


def test_a_function_keeps_its_arguments():
    assert build_reward(f"{HERE}:lengths", {"scale": 2.0})([], ["abc"], [{}]) == [6.0]


def test_without_a_check_every_prompt_will_do():
    check_prompt("constant", resolve_reward(f"{HERE}:constant", {}), "", {}, where="here")


@pytest.mark.parametrize("bad", ["train", "eval"])
def test_both_files_are_checked_by_every_reward(tmp_path, bad):
    for name in ("train", "eval"):
        text = '{"prompt": "abc"}\n{"prompt": "ab", "least": 2}\n{"prompt": "abcd"}\n'
        (tmp_path / f"{name}.jsonl").write_text(text)
    files = [f"data.{name}={tmp_path / name}.jsonl" for name in ("train", "eval")]
    rewards = f"rewards=[{{name: '{HERE}:constant'}}, {{name: '{HERE}:lengths', weight: 0}}]"
    config = tiny_config(tmp_path / "run", *files, rewards)
    read_inputs(config)
    (tmp_path / f"{bad}.jsonl").write_text(text + '{"prompt": "x"}\n')
    path = re.escape(str(tmp_path / f"{bad}.jsonl"))
    with pytest.raises(DataError, match=f"^{path}:4: reward 'lengths': too short; got 'x'"):
        read_inputs(config)


@pytest.mark.parametrize(
    ("name", "text"),
    [("shape_match", "names no scene"), ("colour_and_loudness", "names no film")],
)
def test_rewards_that_parse_prompts_refuse_others(name, text):
    with pytest.raises(DataError, match=f"^p.txt:1: reward '{name}': parse_prompt: .*{text}"):
        check_prompt(name, resolve_reward(name, {}), "a cat", {}, where="p.txt:1")


def oops(prompt, metadata):
    raise KeyError("oops")


@with_prompt_check(oops)
def broken(media, prompts, metadata):
    return [0.0] * len(media)


def test_a_mistake_in_the_check_is_not_taken_for_a_prompts():
    with pytest.raises(KeyError):
        check_prompt("x", resolve_reward(f"{HERE}:broken", {}), "p", {}, where="here")


class Unbound:
    def check_prompt(self, prompt, metadata):
        refuse_short(prompt, metadata)


def test_a_check_that_would_need_the_reward_is_refused():
    with pytest.raises(ConfigError, match="got a method of Unbound; make it a staticmethod"):
        resolve_reward(f"{HERE}:Unbound", {})


class Heavy:
    """Stands for a reward with a model: building it is what must not happen early."""

    check_prompt = staticmethod(refuse_short)

    def __init__(self):
        raise RuntimeError("the model was loaded")


def test_prompts_are_refused_before_a_reward_loads_its_model(tmp_path):
    (tmp_path / "p.txt").write_text("abc\nx\n")
    files = [f"data.{name}={tmp_path / 'p.txt'}" for name in ("train", "eval")]
    rewards = f"rewards=[{{name: '{HERE}:Heavy'}}]"
    config = tiny_config(tmp_path / "run", *files, rewards, "rollout.num_prompts=2")
    with pytest.raises(DataError, match=r"p\.txt:2: reward 'Heavy': too short"):
        read_inputs(config)
    (tmp_path / "p.txt").write_text("abc\nabcd\n")
    inputs = read_inputs(config)
    with pytest.raises(RuntimeError, match="the model was loaded"):
        build_trainer(config, inputs)
