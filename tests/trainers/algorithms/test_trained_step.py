from typing import Any

import pytest
import torch

from tests.trainers.algorithms.steps import a_step

ADVANTAGES = torch.tensor([1.0, 2.0, -3.0, 0.5])


def test_each_policy_replays_as_itself(moved: Any) -> None:
    """The old one is that which sampled, so its log-prob is the recorded one to the bit."""
    step = a_step(moved, 1, ADVANTAGES)
    recorded = moved.batch.trajectory.log_probs[:, 1]
    assert torch.equal(step.old_log_probs, recorded)
    assert torch.equal(step.old_stream_log_probs["image"], recorded)
    old, base = step.replay("old"), step.replay("base")
    assert step.replayed is None
    now = step.replay()
    assert step.replayed is now
    assert torch.equal(old.log_prob, recorded)
    values = [r.log_prob.detach() for r in (now, old, base)]
    assert not any(torch.equal(values[i], values[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert [r.log_prob.requires_grad for r in (now, old, base)] == [True, False, False]


def test_velocities_of_each_policy_and_gradients_for_the_trained_one(moved: Any) -> None:
    step = a_step(moved, 1, ADVANTAGES)
    states = {"image": moved.batch.trajectory.streams["image"].latent(1).requires_grad_()}
    for who in ("now", "old", "base"):
        got = step.velocities(states, who)["image"]
        assert torch.equal(got, step.replay(who).streams["image"].velocity)
        assert got.requires_grad == (who == "now")


def test_rows_are_cut_with_all_that_belongs_to_them(moved: Any) -> None:
    whole, part = a_step(moved, 2, ADVANTAGES), a_step(moved, 2, ADVANTAGES, [3, 1])
    assert part.advantages.tolist() == [0.5, 2.0]
    assert torch.equal(part.old_log_probs, whole.old_log_probs[[3, 1]])
    held = whole.trajectory.streams["image"].means[2]
    assert torch.equal(part.trajectory.streams["image"].means[2], held[[3, 1]])
    torch.testing.assert_close(part.replay().log_prob, whole.replay().log_prob[[3, 1]])


def test_sqrt_dt_is_that_of_the_schedule(moved: Any) -> None:
    sigmas = moved.batch.trajectory.streams["image"].sigmas.double()
    step = a_step(moved, 2, ADVANTAGES)
    assert step.sqrt_dt("image") ** 2 == pytest.approx((sigmas[2] - sigmas[3]).item(), rel=1e-12)
