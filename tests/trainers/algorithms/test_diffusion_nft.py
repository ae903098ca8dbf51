from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainers.algorithms.steps import STEPS, a_step, scores_of
from trainers.algorithms.diffusion_nft import DiffusionNFT, DiffusionNFTConfig
from trainers.algorithms.group_relative import GroupRelativeConfig, group_relative
from trainers.losses import diffusion_nft_loss_terms, reward_probability
from trainers.old_policy import OldPolicyDecay
from trainers.update import TrainChunk

ADVANTAGES = torch.tensor([1.0, 2.0, -9.0, 0.5])
PLAIN = DiffusionNFTConfig(kl_beta=0.0)


def test_it_asks_for_an_old_policy_and_for_no_log_probs() -> None:
    needs = DiffusionNFT(DiffusionNFTConfig()).needs
    assert (needs.log_probs, needs.means, needs.reference) == (False, False, "base")
    assert needs.old_policy == OldPolicyDecay()
    assert DiffusionNFT(PLAIN).needs.reference is None


@pytest.mark.parametrize("index", STEPS)
def test_both_mixtures_are_the_velocity_while_nothing_has_moved(sampled: Any, index: int) -> None:
    terms = DiffusionNFT(DiffusionNFTConfig()).terms(a_step(sampled, index, ADVANTAGES))
    assert not terms.metrics["old_deviation"].any()
    positive = terms.metrics["nft_positive_loss"]
    assert torch.equal(positive, terms.metrics["nft_negative_loss"])
    assert (terms.metrics["velocity_kl"] > 0).all(), "the policy is not the base"
    assert terms.metrics.keys() == DiffusionNFT.reductions.keys()
    assert terms.loss.requires_grad


@pytest.mark.parametrize("index", STEPS)
def test_it_is_the_loss_on_the_noised_sample(moved: Any, index: int) -> None:
    config = DiffusionNFTConfig(beta=0.5, kl_beta=0.1, adv_clip_max=4.0, step_weights={1: 0.25})
    step = a_step(moved, index, ADVANTAGES)
    terms = DiffusionNFT(config).terms(step)
    trajectory, engine, policy = moved.batch.trajectory, moved.engine, moved.policy
    held = trajectory.streams["image"]
    x0, sigma = held.latents[:, -1], held.sigmas[index]
    assert torch.equal(x0, moved.batch.latents["image"])
    xt = {"image": (1 - sigma) * x0 + sigma * step.noise("image", x0)}
    with torch.no_grad():
        now = engine.velocities(trajectory, index, xt)["image"]
        with policy.old():
            old = engine.velocities(trajectory, index, xt)["image"]
        with policy.reference():
            base = engine.velocities(trajectory, index, xt)["image"]
    assert not torch.equal(now, old)
    assert not torch.equal(old, base)
    loss, metrics = diffusion_nft_loss_terms(
        now, old, base, x0=x0, xt=xt["image"], t=sigma.item(),
        reward_prob=reward_probability(ADVANTAGES, adv_clip_max=4.0), beta=0.5, adv_clip_max=4.0,
        adaptive_weight_min=1e-5, ref_kl_coef=0.1,
    )  # fmt: skip
    torch.testing.assert_close(terms.loss, (0.25 if index == 1 else 1.0) * loss)
    for name, values in metrics.items():
        torch.testing.assert_close(terms.metrics[name], values, msg=name)
    assert step.replayed is None, "no log-prob was asked for"


@pytest.mark.parametrize(("advantage", "metric"), [(5.0, "positive"), (-5.0, "negative")])
def test_a_step_down_the_gradient_brings_the_mixture_to_the_sample(
    sampled: Any, advantage: float, metric: str
) -> None:
    policy = sampled.policy
    before = policy.tensors()
    step = a_step(sampled, 1, torch.full((4,), advantage))
    terms = DiffusionNFT(PLAIN).terms(step)
    parameters = list(policy.parameters.values())
    gradients = torch.autograd.grad(terms.loss.mean(), parameters, allow_unused=True)
    try:
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.sub_(gradient, alpha=1e-2)
            after = DiffusionNFT(PLAIN).terms(step)
    finally:
        policy.load(before)
    name = f"nft_{metric}_loss"
    assert after.metrics[name].mean() < terms.metrics[name].mean()
    other = "nft_negative_loss" if metric == "positive" else "nft_positive_loss"
    assert after.metrics[other].mean() > terms.metrics[other].mean()


def test_a_sample_without_an_advantage_is_left_where_it_is(sampled: Any) -> None:
    """At r = 1/2 pull and push are equal while nothing has moved."""
    step = a_step(sampled, 1, torch.zeros(4))
    loss = DiffusionNFT(PLAIN).terms(step).loss.mean()
    parameters = list(sampled.policy.parameters.values())
    zero = torch.autograd.grad(loss, parameters, allow_unused=True)
    step = a_step(sampled, 1, torch.full((4,), 5.0))
    full = torch.autograd.grad(
        DiffusionNFT(PLAIN).terms(step).loss.mean(), parameters, allow_unused=True
    )
    size = max(g.abs().max() for g in full if g is not None)
    assert size > 0
    assert max(g.abs().max() for g in zero if g is not None) < 1e-5 * size


def test_the_noise_of_a_row_is_its_own_in_any_micro_batch(sampled: Any) -> None:
    whole, part = a_step(sampled, 1, ADVANTAGES), a_step(sampled, 1, ADVANTAGES, [2, 0])
    latent = sampled.batch.latents["image"]
    noise = whole.noise("image", latent)
    assert torch.equal(noise[[2, 0]], part.noise("image", latent[[2, 0]]))
    others = (a_step(sampled, 2, ADVANTAGES).noise("image", latent), whole.noise("audio", latent))
    assert not any(torch.equal(noise, other) for other in others)
    assert not torch.equal(noise[0], noise[1])
    config = DiffusionNFT(DiffusionNFTConfig())
    torch.testing.assert_close(
        config.terms(part).loss, config.terms(whole).loss[[2, 0]], rtol=1e-4, atol=1e-5
    )


def test_what_keys_the_noise_is_iteration_prompt_and_sample(sampled: Any) -> None:
    def seeds(rows: list[int], key: tuple[int, int]) -> list[int]:
        batch = sampled.batch
        cut = replace(
            batch,
            trajectory=batch.trajectory.select(rows),
            prompts=[batch.prompts[i] for i in rows],
            group_ids=batch.group_ids[rows],
            sample_ids=batch.sample_ids[rows],
        )
        ones = torch.ones(len(rows))
        return TrainChunk(batch=cut, advantages=ones, weights=ones, key=key).seeds

    whole = seeds([0, 1, 2, 3], (0, 5))
    assert len(set(whole)) == 4
    assert seeds([3, 1], (0, 5)) == [whole[3], whole[1]]
    assert not set(whole) & {*seeds([0, 1, 2, 3], (0, 6)), *seeds([0, 1, 2, 3], (1, 5))}


def test_advantages_are_group_relative() -> None:
    rewards, ids = torch.tensor([1.0, 3.0, 10.0, 16.0]), torch.tensor([0, 0, 1, 1])
    config = DiffusionNFTConfig(advantage_std="group", best_of_group=1, worst_of_group=1)
    got = DiffusionNFT(config).advantages(scores_of(rewards), ids)
    assert torch.equal(got.values, group_relative(config, scores_of(rewards), ids).values)
    assert got.values.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5] * 2, rel=1e-3)


def test_a_reward_that_is_missing_is_in_no_part_of_gdpo_and_zeros_can_be_left_out() -> None:
    nan = float("nan")
    total = torch.tensor([1.0, nan, 3.0, 7.0, 7.0])
    components = {"a": torch.tensor([1.0, 50.0, 3.0, 7.0, 7.0]), "shown": torch.zeros(5)}
    scores = scores_of(total, components, {"a": 2.0})
    config = GroupRelativeConfig(
        multi_reward="gdpo", advantage_std="none", skip_zero_advantages=True
    )
    got = group_relative(config, scores, torch.tensor([0, 0, 0, 1, 1]))
    assert got.values.tolist() == [-2.0, 0.0, 2.0, 0.0, 0.0]
    assert got.trained is not None
    assert got.trained.tolist() == [True, False, True, False, False]
    kept = group_relative(GroupRelativeConfig(), scores, torch.tensor([0, 0, 0, 1, 1]))
    assert kept.trained is None or kept.trained.all()
