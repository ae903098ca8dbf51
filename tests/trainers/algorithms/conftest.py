from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from miles_rollout import RolloutEngine, RolloutParams
from miles_rollout.testing import tiny_qwen_image
from tests.trainers.algorithms.steps import STEPS
from tests.trainers.test_update import move_adapter
from trainers.lora import LoraConfig
from trainers.policy import Policy


@pytest.fixture(scope="package")
def sampled() -> Any:
    """Four rows, two prompts, sampled by a policy that is not the base."""
    engine = RolloutEngine(tiny_qwen_image())
    policy = Policy(engine, LoraConfig(rank=2, alpha=4.0), seed=0, beside=["old"])
    move_adapter(policy)
    policy.update_old(0.0)
    params = RolloutParams(sde_step_indices=STEPS, return_means=True)
    (batch,) = engine.generate(
        ["a cat", "a red circle on a blue background"],
        2,
        params,
        seed=0,
        chunk_size=4,
        decode=False,
        num_inference_steps=4,
        height=32,
        width=32,
    )
    return SimpleNamespace(engine=engine, policy=policy, batch=batch)


@pytest.fixture
def moved(sampled: Any) -> Iterator[Any]:
    """The same rollout, and a policy that has moved since."""
    before = sampled.policy.tensors()
    move_adapter(sampled.policy, seed=2)
    yield sampled
    sampled.policy.load(before)
