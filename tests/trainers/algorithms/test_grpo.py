import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from miles_rollout import StreamReplay
from tests.trainers.algorithms.steps import STEPS, a_step, scores_of
from trainers.algorithms.grpo import GRPO, GRPOConfig, distance
from trainers.losses import grpo_loss_terms

ADVANTAGES = torch.tensor([1.0, 2.0, -9.0, 0.5])


def _stream(mean: float, velocity: float) -> StreamReplay:
    return StreamReplay(
        velocity=torch.full((3, 4, 2), velocity),
        mean=torch.full((3, 4, 2), mean),
        std=torch.full((3, 1, 1), 0.2),
        log_prob=torch.zeros(3),
    )


@pytest.mark.parametrize("index", STEPS)
def test_terms_are_the_clipped_loss_on_the_joint_log_prob(moved: Any, index: int) -> None:
    """After the weights have moved, so that ratios are clipped."""
    step = a_step(moved, index, ADVANTAGES)
    terms = GRPO(GRPOConfig(clip_range=(1e-4, 2e-4))).terms(step)
    now = moved.engine.replay(moved.batch.trajectory, index).log_prob
    old = moved.batch.trajectory.log_probs[:, index]
    loss, metrics = grpo_loss_terms(now, old, ADVANTAGES, clip_range=(1e-4, 2e-4), adv_clip_max=5.0)
    assert torch.equal(terms.loss, loss)
    assert terms.metrics.keys() == metrics.keys()
    assert metrics["clipfrac"].sum() > 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    # 0.1^2 / (2 * 0.2^2) = 0.125; with the std over sqrt(-dt) = 0.5: 0.1^2 / (2 * 0.4^2); and 0.3^2.
    [("mean", 0.125), ("mean_without_dt", 0.03125), ("velocity", 0.09)],
)
def test_the_distance_to_a_reference_by_hand(kind: Any, expected: float) -> None:
    far = distance(kind, _stream(0.1, 0.3), _stream(0.0, 0.0), 0.5)
    assert far.tolist() == pytest.approx([expected] * 3)


@pytest.mark.parametrize("kind", ["mean", "mean_without_dt", "velocity"])
def test_kl_is_added_with_its_weight(moved: Any, kind: Any) -> None:
    algorithm = GRPO(GRPOConfig(kl_beta=0.5, kl=kind))
    assert algorithm.needs.reference == "base"
    step = a_step(moved, 1, ADVANTAGES)
    with_kl, without = algorithm.terms(step), GRPO(GRPOConfig()).terms(step)
    now = step.replay().streams["image"]
    reference = step.replay("base").streams["image"]
    expected = distance(kind, now, reference, step.sqrt_dt("image"))
    assert torch.equal(with_kl.metrics["kl"], expected.detach())
    assert (expected > 0).all()
    assert torch.allclose(with_kl.loss, without.loss + 0.5 * expected)
    assert with_kl.metrics.keys() == GRPO.reductions.keys()


def test_no_weight_needs_no_reference() -> None:
    assert GRPO(GRPOConfig()).needs.reference is None


def test_a_step_has_its_weight(moved: Any) -> None:
    weighted = GRPO(GRPOConfig(step_weights={1: 0.25}))
    for index, factor in ((1, 0.25), (2, 1.0)):
        step = a_step(moved, index, ADVANTAGES)
        assert torch.equal(weighted.terms(step).loss, factor * GRPO(GRPOConfig()).terms(step).loss)


def test_a_reward_that_is_missing_counts_in_no_mean() -> None:
    rewards = torch.tensor([1.0, math.nan, 3.0, 5.0, 5.0], dtype=torch.float64)
    advantages = GRPO(GRPOConfig(advantage_std="none")).advantages(
        scores_of(rewards), torch.tensor([0, 0, 0, 1, 1])
    )
    assert advantages.values.tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("std", ["batch", "group", "none"])
def test_the_std_is_the_configured_one(std: str) -> None:
    rewards = torch.tensor([1.0, 3.0, 10.0, 16.0])
    got = (
        GRPO(GRPOConfig(advantage_std=std))
        .advantages(  # type: ignore[arg-type]
            scores_of(rewards), torch.tensor([0, 0, 1, 1])
        )
        .values
    )
    scales = {
        "batch": [rewards.std()] * 2,
        "group": [math.sqrt(2), 3 * math.sqrt(2)],
        "none": [1.0, 1.0],
    }[std]
    expected = [-1 / scales[0], 1 / scales[0], -3 / scales[1], 3 / scales[1]]
    assert got.tolist() == pytest.approx([float(e) for e in expected], rel=2e-4)


@pytest.mark.parametrize(("kind", "expected"), [("mean", 0.125), ("velocity", 0.09)])
def test_the_kl_counts_what_is_live_and_nothing_else(kind: Any, expected: float) -> None:
    """Half of each sample is masked, and there the two differ wildly."""
    mask = torch.ones(3, 4, 2, dtype=torch.bool)
    mask[:, 2:] = False
    now = _stream(0.1, 0.3)
    wild = replace(
        now,
        mean=now.mean.where(mask, 100.0),
        velocity=now.velocity.where(mask, torch.nan),
        mask=mask,
    )
    assert distance(kind, wild, _stream(0.0, 0.0), 0.5).tolist() == pytest.approx([expected] * 3)
