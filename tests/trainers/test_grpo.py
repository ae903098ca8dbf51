import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from miles_rollout import Replay, StreamReplay
from trainers.grpo import GRPO, GRPOConfig
from trainers.losses import grpo_loss_terms

OLD = torch.tensor([-1.0, -1.0, -1.0])
NEW = torch.tensor([-1.0, -0.9998, -1.0002])
ADVANTAGES = torch.tensor([1.0, 2.0, -9.0])


def _stream(mean: float, velocity: float) -> StreamReplay:
    return StreamReplay(
        velocity=torch.full((3, 4, 2), velocity),
        mean=torch.full((3, 4, 2), mean),
        std=torch.full((3, 1, 1), 0.2),
        log_prob=NEW,
    )


def _replay(mean: float = 0.0, velocity: float = 0.0, log_prob: Tensor = NEW) -> Replay:
    return Replay(streams={"image": _stream(mean, velocity)}, log_prob=log_prob)


def test_terms_are_the_clipped_loss_on_the_joint_log_prob() -> None:
    terms = GRPO(GRPOConfig(clip_range=(1e-4, 1e-4))).terms(_replay(), OLD, ADVANTAGES, None)
    loss, metrics = grpo_loss_terms(NEW, OLD, ADVANTAGES, clip_range=1e-4, adv_clip_max=5.0)
    assert torch.equal(terms.loss, loss)
    assert terms.metrics.keys() == metrics.keys()
    # 2 * 1.0001 is clipped; -5 of the clamped -9 is not: the pessimistic side is kept.
    expected = torch.tensor([-1.0, -2.0002, 5 * math.exp(-2e-4)])
    assert torch.allclose(terms.loss[:2], expected[:2])
    assert terms.loss[2] >= expected[2]


@pytest.mark.parametrize(
    ("kind", "expected"),
    # (0.1)^2 / (2 * 0.2^2) = 0.125, and 0.3^2
    [("mean", 0.125), ("velocity", 0.09)],
)
def test_kl_is_added_with_its_weight(kind: str, expected: float) -> None:
    algorithm = GRPO(GRPOConfig(kl_beta=0.5, kl=kind))  # type: ignore[arg-type]
    assert algorithm.needs_reference
    now = _replay(mean=0.1, velocity=0.3)
    with_kl = algorithm.terms(now, OLD, ADVANTAGES, _replay())
    without = algorithm.terms(now, OLD, ADVANTAGES, None)
    assert with_kl.metrics["kl"].tolist() == pytest.approx([expected] * 3)
    assert (with_kl.loss - without.loss).tolist() == pytest.approx([0.5 * expected] * 3, rel=1e-4)


def test_kl_of_two_streams_is_their_sum() -> None:
    streams = {"video": _stream(0.1, 0.0), "audio": _stream(0.2, 0.0)}
    reference = {"video": _stream(0.0, 0.0), "audio": _stream(0.0, 0.0)}
    terms = GRPO(GRPOConfig(kl_beta=1.0)).terms(
        Replay(streams=streams, log_prob=NEW),
        OLD,
        ADVANTAGES,
        Replay(streams=reference, log_prob=NEW),
    )
    assert terms.metrics["kl"].tolist() == pytest.approx([0.125 + 0.5] * 3)


def test_no_weight_needs_no_reference() -> None:
    assert not GRPO(GRPOConfig()).needs_reference


def test_every_metric_has_a_reduction() -> None:
    terms = GRPO(GRPOConfig(kl_beta=1.0)).terms(_replay(), OLD, ADVANTAGES, _replay(0.1))
    assert terms.metrics.keys() == GRPO.reductions.keys()


def test_a_reward_that_is_missing_counts_in_no_mean() -> None:
    rewards = torch.tensor([1.0, math.nan, 3.0, 5.0, 5.0], dtype=torch.float64)
    advantages = GRPO(GRPOConfig(advantage_std="none")).advantages(
        rewards, torch.tensor([0, 0, 0, 1, 1])
    )
    assert advantages.tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("std", ["batch", "group", "none"])
def test_the_std_is_the_configured_one(std: str) -> None:
    rewards = torch.tensor([1.0, 3.0, 10.0, 16.0])
    got = GRPO(GRPOConfig(advantage_std=std)).advantages(  # type: ignore[arg-type]
        rewards, torch.tensor([0, 0, 1, 1])
    )
    scales = {
        "batch": [rewards.std()] * 2,
        "group": [math.sqrt(2), 3 * math.sqrt(2)],
        "none": [1.0, 1.0],
    }[std]
    expected = [-1 / scales[0], 1 / scales[0], -3 / scales[1], 3 / scales[1]]
    assert got.tolist() == pytest.approx([float(e) for e in expected], rel=2e-4)


@pytest.mark.parametrize(("kind", "expected"), [("mean", 0.125), ("velocity", 0.09)])
def test_the_kl_counts_what_is_live_and_nothing_else(kind: str, expected: float) -> None:
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
    terms = GRPO(GRPOConfig(kl_beta=1.0, kl=kind)).terms(  # type: ignore[arg-type]
        Replay(streams={"video": wild}, log_prob=NEW), OLD, ADVANTAGES, _one(_stream(0.0, 0.0))
    )
    assert terms.metrics["kl"].tolist() == pytest.approx([expected] * 3)


def _one(stream: StreamReplay) -> Replay:
    return Replay(streams={"video": stream}, log_prob=NEW)
