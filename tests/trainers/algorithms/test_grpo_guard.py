from typing import Any

import pytest
import torch

from tests.trainers.algorithms.steps import STEPS, a_step
from trainers.algorithms.grpo import GRPO, GRPOConfig
from trainers.algorithms.grpo_guard import GRPOGuard, GRPOGuardConfig

ADVANTAGES = torch.tensor([1.0, 2.0, -3.0, 0.5])
WIDE = GRPOGuardConfig(clip_range=10.0)


def test_it_asks_for_the_means_and_for_steps_with_a_gaussian_density() -> None:
    needs = GRPOGuard(GRPOGuardConfig()).needs
    assert (needs.means, needs.log_probs, needs.reference) == (True, True, None)
    assert needs.sde_types == ("sde", "dance_sde")
    assert GRPOGuard(GRPOGuardConfig(kl_beta=0.1)).needs.reference == "base"


@pytest.mark.parametrize("index", STEPS)
def test_the_first_ratio_is_exactly_one(sampled: Any, index: int) -> None:
    step = a_step(sampled, index, ADVANTAGES)
    terms = GRPOGuard(GRPOGuardConfig()).terms(step)
    kept = sampled.batch.trajectory.streams["image"].means[index]
    assert step.replayed is not None
    assert torch.equal(step.replayed.streams["image"].mean, kept)
    assert not terms.metrics["ratio_abs_minus_1"].any()
    torch.testing.assert_close(terms.loss.detach(), -ADVANTAGES / step.sqrt_dt("image") ** 2)
    assert terms.metrics.keys() | {"kl"} == GRPOGuard.reductions.keys()


@pytest.mark.parametrize("index", STEPS)
def test_after_a_move_the_log_ratio_is_the_mean_of_noise_times_change(
    moved: Any, index: int
) -> None:
    """Whatever the noise of the step is; a plain log-ratio is its own std's multiple of that."""
    step = a_step(moved, index, ADVANTAGES)
    terms = GRPOGuard(WIDE).terms(step)
    assert step.replayed is not None
    now, held = step.replayed.streams["image"], step.trajectory.streams["image"]
    old_mean = held.means[index].double()
    noise = (held.latent(index + 1).double() - old_mean) / now.std.double()
    expected = (noise * (now.mean.double() - old_mean)).flatten(1).mean(1).detach()
    assert expected.abs().max() > 1e-4
    log_ratio = terms.metrics["ratio_mean"].double().log()
    torch.testing.assert_close(log_ratio, expected, rtol=1e-3, atol=3e-7)


@pytest.mark.parametrize("index", STEPS[1:])
def test_the_gradient_is_flat_over_the_steps(sampled: Any, index: int) -> None:
    """(1 + eta^2 / 2) A noise / n for the velocity: neither dt nor the step's std is in it.

    Not in step 0, whose sigma of 1 stands for another one.
    """
    step = a_step(sampled, index, ADVANTAGES)
    terms = GRPOGuard(WIDE).terms(step)
    assert step.replayed is not None
    now, held = step.replayed.streams["image"], step.trajectory.streams["image"]
    (gradient,) = torch.autograd.grad(terms.loss.sum(), now.velocity, retain_graph=True)
    noise = (held.latent(index + 1) - held.means[index]) / now.std
    flat = (1 + 0.7**2 / 2) * ADVANTAGES[:, None, None] * noise / noise[0].numel()
    torch.testing.assert_close(gradient, flat, rtol=1e-3, atol=1e-6)


def test_the_kl_and_a_weight_are_added_as_in_grpo(moved: Any) -> None:
    settings = {"kl_beta": 0.5, "step_weights": {1: 0.25}}
    guard = GRPOGuard(GRPOGuardConfig(**settings))  # type: ignore[arg-type]
    step = a_step(moved, 1, ADVANTAGES)
    terms = guard.terms(step)
    kl = GRPO(GRPOConfig(kl_beta=0.5)).terms(step).metrics["kl"]
    plain = GRPOGuard(GRPOGuardConfig()).terms(step).loss
    assert torch.equal(terms.metrics["kl"], kl)
    torch.testing.assert_close(terms.loss, 0.25 * (plain + 0.5 * kl))
