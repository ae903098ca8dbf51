from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from trainers.losses import (
    METRIC_REDUCTIONS,
    LossError,
    grpo_loss,
    grpo_loss_terms,
    mean_kl,
    reduce_metrics,
    velocity_mse,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/losses.json").read_text())
CLIP = {"clip_range": 1e-4, "adv_clip_max": 5.0}


def tensor(*values, grad=False):
    return torch.tensor(values, dtype=torch.float32, requires_grad=grad)


@pytest.mark.parametrize("case", GOLDEN["flow_grpo_loss"], ids=lambda c: str(c["clip_range"]))
def test_grpo_loss_matches_a_public_implementation(case):
    new, old = tensor(*case["log_prob"]), tensor(*case["old_log_prob"])
    loss, metrics = grpo_loss(
        new,
        old,
        tensor(*case["advantages"]),
        clip_range=case["clip_range"],
        adv_clip_max=case["adv_clip_max"],
    )
    assert float(loss) == pytest.approx(case["loss"], abs=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(case["ratio_mean"], abs=1e-5)
    assert metrics["clipfrac"] == pytest.approx(case["clipfrac"], abs=1e-5)
    assert metrics["clipfrac_high"] == pytest.approx(case["clipfrac_higher"], abs=1e-5)
    assert metrics["clipfrac_low"] == pytest.approx(case["clipfrac_lower"], abs=1e-5)
    terms, metric_terms = grpo_loss_terms(
        new,
        old,
        tensor(*case["advantages"]),
        clip_range=case["clip_range"],
        adv_clip_max=case["adv_clip_max"],
    )
    ratio_std = float(metric_terms["ratio_mean"].std())
    assert ratio_std == pytest.approx(case["ratio_std"], abs=1e-5)
    assert float(terms.sum()) / 6 == pytest.approx(case["loss"], abs=1e-5)


def test_grpo_loss_by_hand():
    # Ratios 1.1, 0.9, 1.0; clipped to 0.95 .. 1.05; max(-A r, -A clip(r)):
    # A 2: max(-2.2, -2.1) = -2.1; A -1: max(.9, .95) = .95; A 9 counts as 3: -3.
    new = tensor(math.log(1.1), math.log(0.9), 0.0)
    terms, _ = grpo_loss_terms(
        new, torch.zeros(3), tensor(2, -1, 9), clip_range=0.05, adv_clip_max=3.0
    )
    torch.testing.assert_close(terms, tensor(-2.1, 0.95, -3.0))
    _, metrics = grpo_loss(new, torch.zeros(3), tensor(2, -1, 9), clip_range=0.05, adv_clip_max=3.0)
    log_high, log_low = math.log(1.1), math.log(0.9)
    assert metrics == pytest.approx(
        {
            "ratio_mean": 1.0,
            "ratio_abs_minus_1": 0.1,
            "clipfrac": 2 / 3,
            "clipfrac_high": 1 / 3,
            "clipfrac_low": 1 / 3,
            "approx_kl": (log_high**2 + log_low**2) / 6,
            "log_prob_mean_abs_diff": (log_high - log_low) / 3,
            "log_prob_max_abs_diff": -log_low,
        },
        abs=1e-6,
    )
    assert set(metrics) == set(METRIC_REDUCTIONS)


def test_the_two_sides_of_the_clip_are_separate():
    new = tensor(math.log(1.3), math.log(0.7))
    loss, metrics = grpo_loss(
        new, torch.zeros(2), tensor(1, -1), clip_range=(0.2, 0.4), adv_clip_max=5
    )
    # 1.3 is within 1.4; 0.7 is clipped to 0.8: (-1.3 + 0.8) / 2.
    assert float(loss) == pytest.approx(-0.25)
    assert (metrics["clipfrac_high"], metrics["clipfrac_low"]) == (0.0, 0.5)


def test_the_first_update_has_ratio_one_and_the_policy_gradient():
    new = tensor(-0.9, 0.3, grad=True)
    loss, metrics = grpo_loss(new, new.detach().clone(), tensor(2, -3), **CLIP)
    loss.backward()
    assert metrics["ratio_mean"] == 1.0
    assert metrics["ratio_abs_minus_1"] == metrics["log_prob_max_abs_diff"] == 0.0
    assert new.grad is not None
    assert torch.equal(new.grad, tensor(-1.0, 1.5))


def test_a_second_update_has_another_ratio():
    old = tensor(-0.9, 0.3)
    new = (old + tensor(1e-5, -1e-5)).requires_grad_()
    loss, metrics = grpo_loss(new, old, tensor(2, -3), **CLIP)
    loss.backward()
    assert metrics["ratio_abs_minus_1"] > 0
    assert new.grad is not None
    assert (new.grad != 0).all()


def test_nothing_but_the_new_log_prob_gets_a_gradient():
    new, old, advantages = tensor(0.1, grad=True), tensor(0.1, grad=True), tensor(1.0, grad=True)
    grpo_loss(new, old, advantages, **CLIP)[0].backward()
    assert old.grad is None
    assert advantages.grad is None
    assert new.grad is not None


@pytest.mark.parametrize("advantage", [-5.0, 0.0, 5.0])
@pytest.mark.parametrize("log_ratio", [-100.0, 100.0, -1e30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_log_ratio_gives_a_finite_loss_and_no_gradient(log_ratio, advantage, dtype):
    new = torch.tensor([log_ratio, 0.0], dtype=dtype, requires_grad=True)
    loss, metrics = grpo_loss(new, torch.zeros(2), tensor(advantage, 1.0), **CLIP)
    loss.backward()
    assert loss.isfinite()
    assert new.grad is not None
    assert torch.equal(new.grad, torch.tensor([0.0, -0.5], dtype=dtype))
    assert metrics["ratio_mean"] <= math.exp(20)
    assert metrics["log_prob_max_abs_diff"] == pytest.approx(abs(log_ratio), rel=0.01)


def test_a_log_ratio_within_the_limit_keeps_its_gradient():
    new = tensor(15.0, grad=True)
    grpo_loss(new, torch.zeros(1), tensor(-1.0), **CLIP)[0].backward()
    assert new.grad is not None
    assert float(new.grad) == pytest.approx(math.exp(15), rel=1e-5)


def test_a_log_prob_that_is_not_finite_is_not_hidden():
    loss, _ = grpo_loss(tensor(math.nan), torch.zeros(1), tensor(1.0), **CLIP)
    assert loss.isnan()


def test_a_single_element_has_no_nan():
    _, metrics = grpo_loss(tensor(0.2), tensor(0.1), tensor(1.0), **CLIP)
    assert all(math.isfinite(value) for value in metrics.values())


def test_half_precision_is_computed_in_float32():
    new = torch.tensor([1.0, 1.0], dtype=torch.bfloat16)
    loss, metrics = grpo_loss(new, torch.full((2,), 1.00005), tensor(1, 1), **CLIP)
    assert loss.dtype == torch.float32
    assert metrics["ratio_mean"] == pytest.approx(1 - 5e-5, abs=1e-6)


def test_an_advantage_a_sample_serves_every_step_of_it():
    new = torch.tensor([[0.1, 0.2], [0.3, 0.1]])
    terms, _ = grpo_loss_terms(
        new, torch.zeros(2, 2), tensor(1, -2), clip_range=9.0, adv_clip_max=5.0
    )
    torch.testing.assert_close(terms, new.exp() * torch.tensor([[-1.0], [2.0]]))


def test_ragged_micro_batches_sum_to_the_whole_batch():
    generator = torch.Generator().manual_seed(0)
    old, advantages = torch.randn(2, 7, 3, generator=generator)
    delta = 1e-4 * torch.randn(7, 3, generator=generator)
    whole = (old + delta).requires_grad_()
    loss, metrics = grpo_loss(whole, old, advantages, **CLIP)
    loss.backward()
    parts = whole.detach().clone().requires_grad_()
    collected: dict[str, list] = {name: [] for name in METRIC_REDUCTIONS}
    for rows in ([0, 1, 2, 3], [4], [5, 6]):
        terms, metric_terms = grpo_loss_terms(parts[rows], old[rows], advantages[rows], **CLIP)
        (terms.sum() / parts.numel()).backward()
        for name, values in metric_terms.items():
            collected[name].append(values)
    assert parts.grad is not None
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-6, atol=0)
    assert reduce_metrics({k: torch.cat(v) for k, v in collected.items()}) == pytest.approx(metrics)


def test_shapes_that_would_broadcast_by_chance_are_refused():
    square = torch.zeros(2, 2)
    with pytest.raises(LossError, match=r"got \(2, 2\) and \(2,\); pass two of shape"):
        grpo_loss(square, torch.zeros(2), torch.zeros(2), **CLIP)
    with pytest.raises(
        LossError, match=r"advantages do not fit; got \(3,\) for log-probs \(2, 3\)"
    ):
        grpo_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3), **CLIP)
    with pytest.raises(LossError, match=r"got \(0,\) and \(0,\)"):
        grpo_loss(torch.zeros(0), torch.zeros(0), torch.zeros(0), **CLIP)


@pytest.mark.parametrize("clip_range", [0.0, -1e-4, math.nan, math.inf, (0.1, 0.0)])
def test_a_clip_range_that_is_none_is_refused(clip_range):
    with pytest.raises(LossError, match=r"clip_range must be positive and finite; got .*1e-4"):
        grpo_loss(*torch.zeros(3, 1), clip_range=clip_range, adv_clip_max=5.0)


def test_an_advantage_limit_that_is_none_is_refused():
    with pytest.raises(LossError, match=r"adv_clip_max must be positive; got 0\.0; set it near 5"):
        grpo_loss(*torch.zeros(3, 1), clip_range=0.1, adv_clip_max=0.0)


def golden_kl():
    case = GOLDEN["kl"]
    mean, ref = (tensor(*case[name]).reshape(case["shape"]) for name in ("mean", "ref_mean"))
    return mean, ref, tensor(*case["std_dev_t"]), case["kl"]


def test_kl_matches_a_public_implementation():
    mean, ref, std, expected = golden_kl()
    for shape in [(3,), (3, 1, 1)]:
        kl = mean_kl(mean, ref, std.reshape(shape))
        assert kl.shape == (3,)
        assert float(kl.mean()) == pytest.approx(expected, abs=1e-5)


def test_kl_by_hand_for_any_rank_and_std():
    # Squares 1 and 9, over 2 * 0.5^2 = 0.5: mean of 2 and 18 is 10.
    mean, ref = torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2)
    for std in (0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5, 0.5]])):
        torch.testing.assert_close(mean_kl(mean, ref, std), tensor(10.0))
    video = mean.reshape(1, 1, 2, 1, 1)
    torch.testing.assert_close(mean_kl(video, torch.zeros_like(video), 0.5), tensor(10.0))


def test_one_std_a_sample_is_never_laid_along_the_last_axis():
    # As many samples as last elements: right-aligned broadcasting would fit, wrongly.
    mean, std = torch.ones(2, 3, 2), tensor(1.0, 10.0)
    torch.testing.assert_close(mean_kl(mean, torch.zeros(2, 3, 2), std), tensor(0.5, 0.005))


def test_kl_has_a_gradient_for_the_mean_only():
    mean, ref = torch.ones(1, 2, requires_grad=True), torch.zeros(1, 2, requires_grad=True)
    mean_kl(mean, ref, 1.0).sum().backward()
    assert mean.grad is not None
    torch.testing.assert_close(mean.grad, torch.full((1, 2), 0.5))
    assert ref.grad is None


def test_kl_of_half_precision_is_computed_in_float32():
    mean = torch.full((1, 2), 1.0, dtype=torch.bfloat16)
    kl = mean_kl(mean, torch.full((1, 2), 1.001), 1.0)
    assert kl.dtype == torch.float32
    assert float(kl[0]) == pytest.approx(5e-7, rel=1e-2)


def test_kl_refuses_what_does_not_fit():
    mean = torch.zeros(2, 3)
    with pytest.raises(LossError, match=r"std does not fit; got \(3,\) for means \(2, 3\)"):
        mean_kl(mean, mean, torch.ones(3))
    with pytest.raises(LossError, match=r"two means of one shape; got \(2, 3\) and \(2, 1\)"):
        mean_kl(mean, torch.zeros(2, 1), 1.0)
    with pytest.raises(LossError, match=r"std must be positive; got 0\.0; leave out the steps"):
        mean_kl(mean, mean, tensor(1.0, 0.0))


def test_velocity_distance_by_hand():
    velocity = torch.tensor([[1.0, 3.0], [0.0, 0.0]], requires_grad=True)
    distance = velocity_mse(velocity, torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
    torch.testing.assert_close(distance, tensor(5.0, 2.0))
    distance.sum().backward()
    assert velocity.grad is not None
    torch.testing.assert_close(velocity.grad, torch.tensor([[1.0, 3.0], [-2.0, 0.0]]))
    with pytest.raises(LossError, match=r"velocities of one shape; got \(2, 2\) and \(2, 1\)"):
        velocity_mse(velocity, torch.zeros(2, 1))
