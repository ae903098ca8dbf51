import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles_rollout import RolloutEngine
from miles_rollout.testing import tiny_qwen_image
from tests.tiny_run import ROOT
from tests.trainers.test_update import move_adapter
from trainers.config import EvalConfig, RolloutConfig
from trainers.data import load_prompts
from trainers.evaluation import DETERMINISTIC, Evaluation, before_and_after, evaluate
from trainers.lora import LoraConfig
from trainers.policy import Policy
from trainers.rewards.scoring import RewardConfig, Scorer

CONFIG = EvalConfig(num_prompts=3, samples_per_prompt=2, num_inference_steps=2)
ROLLOUT = RolloutConfig()


@pytest.fixture(scope="module")
def setup() -> Any:
    engine = RolloutEngine(tiny_qwen_image())
    policy = Policy(engine, LoraConfig(rank=2, alpha=4.0), seed=0)
    scorer = Scorer(
        [RewardConfig(name="tests.tiny_run:brightness")], timeout_s=60.0, max_masked_fraction=0.5
    )
    records = load_prompts(ROOT / "configs/prompts/shapes_eval.txt")
    return SimpleNamespace(engine=engine, policy=policy, scorer=scorer, records=records)


def _evaluate(setup: Any, config: EvalConfig = CONFIG, rollout: RolloutConfig = ROLLOUT) -> Any:
    return evaluate(setup.engine, setup.records, setup.scorer, config, rollout)


def _pixels(evaluation: Evaluation) -> torch.Tensor:
    return torch.stack([m.image for m in evaluation.media if m.image is not None])


def test_evaluations_are_paired_sample_by_sample(setup: Any) -> None:
    weights = setup.policy.tensors()
    first, second = _evaluate(setup), _evaluate(setup)
    assert torch.equal(_pixels(first), _pixels(second))
    assert first.prompts == second.prompts == [r.prompt for r in setup.records[:3]] * 2
    assert len({image.numpy().tobytes() for image in _pixels(first)}) == 6
    assert all(torch.equal(t, weights[name]) for name, t in setup.policy.tensors().items())


def test_what_the_rollout_samples_does_not_matter(setup: Any) -> None:
    other = replace(ROLLOUT, noise_level=0.3, num_prompts=2, group_size=3, num_inference_steps=7)
    assert torch.equal(_pixels(_evaluate(setup)), _pixels(_evaluate(setup, rollout=other)))


def test_chunks_change_the_last_bits_at_most(setup: Any) -> None:
    parts = _evaluate(setup, replace(CONFIG, chunk_size=4))
    assert torch.allclose(_pixels(_evaluate(setup)), _pixels(parts), atol=1e-4)


def test_another_seed_or_step_count_is_another_evaluation(setup: Any) -> None:
    start = _pixels(_evaluate(setup))
    for config in (replace(CONFIG, seed=7), replace(CONFIG, num_inference_steps=3)):
        assert not torch.equal(_pixels(_evaluate(setup, config)), start)


def test_a_run_of_the_same_seed_never_has_its_noise(setup: Any) -> None:
    held_out = _pixels(_evaluate(setup))
    for iteration in range(2):
        (batch, *_) = setup.engine.generate(
            [r.prompt for r in setup.records[:3]],
            1,
            DETERMINISTIC,
            seed=CONFIG.seed,
            iteration=iteration,
            num_inference_steps=2,
            height=32,
            width=32,
        )
        assert not torch.equal(torch.stack([m.image for m in batch.media]), held_out[:3])


def test_metrics_are_over_the_samples_that_have_a_score(setup: Any) -> None:
    scorer = Scorer(
        [RewardConfig(name="tests.tiny_run:brightness_with_a_hole")],
        timeout_s=60.0,
        max_masked_fraction=0.5,
    )
    whole = _evaluate(setup)
    holed = evaluate(setup.engine, setup.records, scorer, CONFIG, ROLLOUT)
    live = [value for i, value in enumerate(whole.scores.total.tolist()) if i != 3]
    metrics = holed.metrics()
    assert metrics["eval/reward/masked"] == 1
    assert metrics["eval/reward/mean"] == holed.mean == pytest.approx(sum(live) / 5)
    assert metrics["eval/reward/brightness_with_a_hole"] == pytest.approx(sum(live) / 5)
    assert all(math.isfinite(value) for value in metrics.values())


def test_one_sample_has_no_spread(setup: Any) -> None:
    metrics = _evaluate(setup, replace(CONFIG, num_prompts=1, samples_per_prompt=1)).metrics()
    assert metrics["eval/reward/std"] == 0.0


def test_before_is_the_reference_and_after_the_policy(setup: Any) -> None:
    def pair() -> list[Evaluation]:
        reference = setup.policy.reference()
        return before_and_after(
            setup.engine, setup.records, CONFIG, ROLLOUT, reference, setup.scorer
        )

    saved = setup.policy.tensors()
    before, after = pair()
    assert torch.equal(_pixels(before), _pixels(after))
    move_adapter(setup.policy)
    start = _pixels(before)
    before, after = pair()
    setup.policy.load(saved)
    assert torch.equal(_pixels(before), start)
    assert not torch.equal(_pixels(after), start)
    assert before.prompts == after.prompts == [r.prompt for r in setup.records[::4]]
