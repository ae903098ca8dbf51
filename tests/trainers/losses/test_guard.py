"""GRPO-Guard: the ratio that is centred and scaled alike in every step."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from trainers.losses import LossError, grpo_guard_loss, grpo_guard_loss_terms

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/losses.json").read_text())
CLIP = {"clip_range": 1e-4, "adv_clip_max": 5.0}


def tensor(*values, grad=False):
    return torch.tensor(values, dtype=torch.float32, requires_grad=grad)


def shaped(values, shape):
    return torch.tensor(values, dtype=torch.float32).reshape(shape)


def gaussian_step(std, *, rows=3, size=(5, 4), seed=0, move=0.01):
    """Means before and after, the noise of the sample, and both log-probs, in float64."""
    generator = torch.Generator().manual_seed(seed)
    old_mean, noise, change = (
        torch.randn(rows, *size, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    mean = old_mean + move * change
    sample = old_mean + std * noise

    def log_prob(centre):
        terms = -((sample - centre) ** 2) / (2 * std**2) - math.log(std)
        return terms.flatten(1).mean(1)

    return mean, old_mean, noise, log_prob(mean), log_prob(old_mean)


@pytest.mark.parametrize("case", GOLDEN["grpo_guard_loss"], ids=lambda c: str(c["clip_range"]))
def test_it_matches_a_public_implementation(case):
    shape = case["mean_shape"]
    mean, old_mean = (shaped(case[name], shape) for name in ("mean", "old_mean"))
    loss, metrics = grpo_guard_loss(
        tensor(*case["log_prob"]),
        tensor(*case["old_log_prob"]),
        tensor(*case["advantages"]),
        mean=mean,
        old_mean=old_mean,
        std_dev_t=case["std_dev_t"],
        sqrt_dt=case["sqrt_dt"],
        clip_range=case["clip_range"],
        adv_clip_max=case["adv_clip_max"],
    )
    assert float(loss) == pytest.approx(case["loss"], rel=1e-5, abs=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(case["ratio_mean"], abs=1e-5)
    assert metrics["clipfrac"] == pytest.approx(case["clipfrac"], abs=1e-5)


def test_it_is_that_loss_by_hand():
    # s = 0.5 * 0.2 = 0.1. Bias: mean of 0.01^2 and 0.03^2 is 5e-4, over 2 * 0.01: 0.025.
    # Log-ratio (0.175 + 0.025) * 0.1 = 0.02; over -dt = 0.04.
    ratio = math.exp(0.02)
    loss, metrics = grpo_guard_loss(
        tensor(0.175),
        tensor(0.0),
        tensor(-2.0),
        mean=torch.tensor([[1.01, 2.03]]),
        old_mean=torch.tensor([[1.0, 2.0]]),
        std_dev_t=0.5,
        sqrt_dt=0.2,
        clip_range=0.5,
        adv_clip_max=5.0,
    )
    assert float(loss) == pytest.approx(2 * ratio / 0.04, rel=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(ratio, rel=1e-6)
    assert metrics["log_prob_max_abs_diff"] == pytest.approx(0.175), "of the raw log-ratio"


@pytest.mark.parametrize("std", [0.05, 0.4, 2.0])
def test_the_log_ratio_is_the_mean_of_noise_times_the_change(std):
    mean, old_mean, noise, new, old = gaussian_step(std)
    _, metrics = grpo_guard_loss_terms(
        new, old, torch.ones(3), mean=mean, old_mean=old_mean,
        std_dev_t=std / 0.3, sqrt_dt=0.3, **CLIP,
    )  # fmt: skip
    expected = (noise * (mean - old_mean)).flatten(1).mean(1)
    # To first order it would hold with the sign of any bias; to this order the bias matters.
    torch.testing.assert_close(metrics["ratio_mean"].log(), expected, rtol=1e-9, atol=1e-12)
    plain = (new - old) * std
    assert ((plain - expected).abs() > 1e-6).all()


def test_the_bias_is_each_samples_own():
    mean, old_mean, _, new, old = gaussian_step(0.4)
    arguments = {"old_mean": old_mean, "std_dev_t": 1.0, "sqrt_dt": 0.4, **CLIP, "clip_range": 9.0}
    before, _ = grpo_guard_loss_terms(new, old, torch.ones(3), mean=mean, **arguments)
    mean = mean.clone()
    mean[1] += 3.0
    after, _ = grpo_guard_loss_terms(new, old, torch.ones(3), mean=mean, **arguments)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert before[1] != after[1]


def test_one_std_a_sample_is_that_samples():
    mean, old_mean, _, new, old = gaussian_step(0.4)
    std, root = tensor(1.0, 2.0, 3.0), tensor(0.1, 0.2, 0.3)
    together, _ = grpo_guard_loss_terms(
        new, old, torch.ones(3), mean=mean, old_mean=old_mean,
        std_dev_t=std.reshape(3, 1, 1), sqrt_dt=root, **CLIP,
    )  # fmt: skip
    for i in range(3):
        row = slice(i, i + 1)
        alone, _ = grpo_guard_loss_terms(
            new[row], old[row], torch.ones(1), mean=mean[row], old_mean=old_mean[row],
            std_dev_t=std[i].item(), sqrt_dt=root[i].item(), **CLIP,
        )  # fmt: skip
        torch.testing.assert_close(together[row], alone)


def test_only_what_is_live_counts():
    mean, old_mean, _, new, old = gaussian_step(0.4)
    mask = torch.ones(mean.shape, dtype=torch.bool)
    mask[:, 2:] = False
    arguments = {"std_dev_t": 1.0, "sqrt_dt": 0.4, **CLIP}
    wild = mean.where(mask, 100.0)
    masked, _ = grpo_guard_loss_terms(
        new, old, torch.ones(3), mean=wild, old_mean=old_mean, mask=mask, **arguments
    )
    cut, _ = grpo_guard_loss_terms(
        new, old, torch.ones(3), mean=mean[:, :2], old_mean=old_mean[:, :2], **arguments
    )
    torch.testing.assert_close(masked, cut)


def test_gradients_reach_log_prob_and_mean_of_now_alone():
    mean, old_mean, _, new, old = (t.requires_grad_() for t in gaussian_step(0.4))
    advantages = torch.ones(3, requires_grad=True)
    grpo_guard_loss(
        new, old, advantages, mean=mean, old_mean=old_mean, std_dev_t=1.0, sqrt_dt=0.4,
        clip_range=10.0, adv_clip_max=5.0,
    )[0].backward()  # fmt: skip
    assert [t.grad is None for t in (new, mean, old, old_mean, advantages)] == [False] * 2 + [
        True
    ] * 3
    # d log-ratio / d mean, were the log-prob fixed: (mean - old_mean) / (s n), times ratio, -A, 1/-dt.
    assert mean.grad is not None
    expected = -(mean - old_mean).detach() / (0.4 * mean[0].numel()) / 3 / 0.4**2
    torch.testing.assert_close(mean.grad, expected, rtol=1e-2, atol=0)


def test_what_does_not_fit_is_refused():
    mean = torch.zeros(2, 3)
    arguments = {"mean": mean, "old_mean": mean, "std_dev_t": 1.0, "sqrt_dt": 1.0, **CLIP}
    two = torch.zeros(2)

    def loss(*given, **others):
        return grpo_guard_loss_terms(*given, **(arguments | others))

    with pytest.raises(
        LossError, match=r"guard_loss: needs a mean of now .* got \(2, 3\) and \(2, 1\) for"
    ):
        loss(two, two, two, old_mean=torch.zeros(2, 1))
    with pytest.raises(
        LossError, match=r"std_dev_t must be positive; got 0\.0; leave out the steps"
    ):
        loss(two, two, two, std_dev_t=tensor(1.0, 0.0))
    with pytest.raises(LossError, match=r"sqrt_dt does not fit; got \(3,\) for means \(2, 3\)"):
        loss(two, two, two, sqrt_dt=torch.ones(3))
    with pytest.raises(LossError, match="adv_clip_max must be positive; got 0"):
        loss(two, two, two, adv_clip_max=0)
