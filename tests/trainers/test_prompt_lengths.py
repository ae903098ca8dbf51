"""Prompts that are told to be cut are those whose end the text encoder does not see."""

import logging
from typing import Any

import pytest
import torch

from miles_rollout import RolloutEngine
from miles_rollout.loading import TINY_PIPELINES, load_pipeline
from trainers.data import PromptFile, PromptRecord
from trainers.prompt_lengths import warn_of_cut_prompts

UNIFORM = {"tiny-qwen-image-pretrained", "tiny-minimax-h3-pretrained"}
"""The same families once more, with other weights."""


def _file(*prompts: str) -> PromptFile:
    records = [PromptRecord(prompt=p, id=i, line=i + 3) for i, p in enumerate(prompts)]
    return PromptFile(source="a.txt", records=records)


def _warnings(engine: RolloutEngine, file: PromptFile, caplog: Any, **sampling: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="trainers.prompt_lengths"):
        warn_of_cut_prompts(file, engine.pipe, engine.adapter, sampling)
    return [record.getMessage() for record in caplog.records]


def _same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name]
        for name in a
    )


@pytest.mark.parametrize("name", sorted(set(TINY_PIPELINES) - UNIFORM))
def test_what_is_told_to_be_cut_is_not_seen(name: str, caplog: Any) -> None:
    engine = RolloutEngine(load_pipeline(name))
    pipe, adapter = engine.pipe, engine.adapter
    long = " ".join(["cat"] * 1100)
    inputs = [adapter.sample_inputs(pipe)] * 2
    size = adapter.small_request(pipe)
    a, b = engine.encode([f"{long} red", f"{long} blue"], inputs=inputs, **size)
    told = _warnings(engine, _file("a cat", f"{long} red", f"{long} blue"), caplog)
    assert bool(told) == _same(a, b)
    if told:
        assert "2 of 3 prompts are longer than the " in told[0]
        assert "the first is line 4;" in told[0]
    assert bool(told) == adapter.cuts_prompts


def test_a_given_length_counts(caplog: Any) -> None:
    engine = RolloutEngine(load_pipeline("tiny-qwen-image"))
    prompts = ["red red red", "red red red red blue", "red red red red green"]
    told = _warnings(engine, _file(*prompts), caplog, max_sequence_length=5)
    assert len(told) == 1
    assert told[0].startswith(
        "a.txt: 2 of 3 prompts are longer than the 5 tokens that the text encoder sees, and are cut; "
        "the first is line 4"
    )
    encoded = engine.encode(prompts[1:], max_sequence_length=5)
    assert _same(*encoded)
    assert not _warnings(engine, _file(*prompts), caplog, max_sequence_length=9)
