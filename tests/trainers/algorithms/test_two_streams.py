"""A film with sound: what each algorithm makes of two streams and of a negative velocity."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles_rollout import RolloutEngine, RolloutParams
from miles_rollout.testing import tiny_minimax_h3
from tests.trainers.algorithms.steps import a_step
from tests.trainers.test_update import move_adapter
from trainers.algorithms.diffusion_nft import DiffusionNFT, DiffusionNFTConfig
from trainers.algorithms.grpo_guard import GRPOGuard, GRPOGuardConfig
from trainers.lora import LoraConfig
from trainers.losses import diffusion_nft_loss_terms, grpo_guard_loss_terms, reward_probability
from trainers.policy import Policy


@pytest.fixture(scope="module")
def film() -> Any:
    """One film with sound, and a policy that has moved since."""
    engine = RolloutEngine(tiny_minimax_h3())
    targets = ("attn.to_q", "ff.net.2")
    lora = LoraConfig(rank=2, alpha=4.0, targets=targets)
    policy = Policy(engine, lora, seed=0, denoisers=["transformer"], beside=["old"])
    params = RolloutParams(sde_step_indices=[1], return_means=True, debug=True)
    (batch,) = engine.generate(
        ["a red circle on a blue background"],
        1,
        params,
        seed=0,
        chunk_size=1,
        decode=False,
        num_inference_steps=4,
        height=32,
        width=32,
        num_frames=124,
    )
    return SimpleNamespace(engine=engine, policy=policy, batch=batch)


def test_two_streams_have_a_ratio_each_and_one_loss(film: Any) -> None:
    advantages = torch.tensor([2.0])
    first = GRPOGuard(GRPOGuardConfig()).terms(a_step(film, 1, advantages))
    assert not first.metrics["ratio_abs_minus_1"].any()
    before = film.policy.tensors()
    move_adapter(film.policy)
    step = a_step(film, 1, advantages)
    terms = GRPOGuard(GRPOGuardConfig(clip_range=10.0)).terms(step)
    assert step.replayed is not None
    losses, ratios = {}, []
    for name, now in step.replayed.streams.items():
        held, root = step.trajectory.streams[name], step.sqrt_dt(name)
        losses[name], metrics = grpo_guard_loss_terms(
            now.log_prob, held.log_probs[:, 1], advantages, mean=now.mean, old_mean=held.means[1],
            std_dev_t=now.std / root, sqrt_dt=root, clip_range=10.0, adv_clip_max=5.0,
        )  # fmt: skip
        ratios.append(metrics["ratio_mean"])
    assert ratios[0] != ratios[1]
    count = {name: step.trajectory.streams[name].num_elements for name in losses}
    expected = (losses["video"] * count["video"] + losses["audio"] * count["audio"]) / sum(
        count.values()
    )
    torch.testing.assert_close(terms.loss, expected)
    torch.testing.assert_close(terms.metrics["ratio_mean"], sum(ratios) / 2)
    worst = torch.stack(ratios).sub(1).abs().amax(0)
    torch.testing.assert_close(terms.metrics["ratio_abs_minus_1"], worst)
    film.policy.load(before)


def test_the_denoiser_of_a_negative_velocity_gives_noise_minus_x0(film: Any) -> None:
    trajectory = film.batch.trajectory
    states = {name: stream.latent(1) for name, stream in trajectory.streams.items()}
    base = film.policy.reference()
    with torch.no_grad(), base:
        got = film.engine.velocities(trajectory, 1, states)
    for name, stream in trajectory.streams.items():
        assert stream.velocity_sign == -1
        recorded = stream.debug["velocity"][:, 1]
        # What was recorded is the denoiser's own output, or already turned about: see the step.
        step = states[name] + (stream.sigmas[2] - stream.sigmas[1]) * got[name]
        away = states[name] - (stream.sigmas[2] - stream.sigmas[1]) * got[name]
        mean = stream.means[1]
        assert (step - mean).abs().mean() < (away - mean).abs().mean()
        assert torch.equal(got[name].abs().float(), recorded.abs().float())


@pytest.mark.parametrize("weights", [None, {"video": 0.25, "audio": 2.0}])
def test_nft_joins_the_streams_as_log_probs_are(film: Any, weights: Any) -> None:
    trajectory = film.batch.trajectory
    if weights is not None:
        params = replace(trajectory.params, stream_weights=weights)
        trajectory = replace(trajectory, params=params)
    advantages = torch.tensor([2.0])
    setup = SimpleNamespace(
        engine=film.engine, policy=film.policy, batch=replace(film.batch, trajectory=trajectory)
    )
    step = a_step(setup, 1, advantages)
    before = film.policy.tensors()
    move_adapter(film.policy, seed=3)
    terms = DiffusionNFT(DiffusionNFTConfig(kl_beta=0.0)).terms(step)
    held = trajectory.streams
    x0 = {name: stream.latent(stream.num_steps) for name, stream in held.items()}
    noised = {}
    for name, stream in held.items():
        sigma = stream.sigmas[1]
        noised[name] = (1 - sigma) * x0[name] + sigma * step.noise(name, x0[name])
    assert held["video"].sigmas[1] != held["audio"].sigmas[1], "each at its own level"
    with torch.no_grad():
        now = film.engine.velocities(trajectory, 1, noised)
        with film.policy.old():
            old = film.engine.velocities(trajectory, 1, noised)
    film.policy.load(before)
    losses = {
        name: diffusion_nft_loss_terms(
            now[name], old[name], None, x0=x0[name], xt=noised[name],
            t=held[name].sigmas[1].item(), beta=1.0, adv_clip_max=5.0, adaptive_weight_min=1e-5,
            reward_prob=reward_probability(advantages, adv_clip_max=5.0), ref_kl_coef=0.0,
        )[0]
        for name in held
    }  # fmt: skip
    shares = weights or {
        name: x0[name].numel() / sum(x.numel() for x in x0.values()) for name in held
    }
    expected = sum(shares[name] * loss for name, loss in losses.items())
    torch.testing.assert_close(terms.loss, expected)
    assert terms.metrics["old_deviation"] > 0
