from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trainers.losses import (
    NFT_METRIC_REDUCTIONS,
    LossError,
    diffusion_nft_loss,
    diffusion_nft_loss_terms,
    reward_probability,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/losses.json").read_text())
NAMES = ("velocity", "old_velocity", "ref_velocity", "x0", "xt")
SETTINGS = ("beta", "adv_clip_max", "adaptive_weight_min", "ref_kl_coef")
PLAIN = {"beta": 1.0, "adv_clip_max": 5.0, "adaptive_weight_min": 1e-5, "ref_kl_coef": 0.0}


def tensor(*values, grad=False):
    return torch.tensor(values, dtype=torch.float32, requires_grad=grad)


@pytest.mark.parametrize("case", GOLDEN["diffusion_nft_loss"], ids=lambda c: str(c["beta"]))
def test_it_matches_a_public_implementation(case):
    v, old, ref, x0, xt = (tensor(*case[name]).reshape(case["shape"]) for name in NAMES)
    settings = {name: case[name] for name in SETTINGS}
    arguments = {
        "x0": x0, "xt": xt, "t": tensor(*case["t"]), "reward_prob": tensor(*case["reward_prob"]),
    }  # fmt: skip
    loss, metrics = diffusion_nft_loss(v, old, ref, **arguments, **settings)
    assert float(loss) == pytest.approx(case["loss"], rel=1e-6, abs=1e-5)
    assert metrics["velocity_kl"] == pytest.approx(case["ref_kl_loss"], abs=1e-5)
    assert metrics["nft_loss"] * case["adv_clip_max"] == pytest.approx(
        case["policy_loss"], rel=1e-6, abs=1e-5
    )
    assert metrics.keys() == NFT_METRIC_REDUCTIONS.keys()


def test_it_is_that_loss_by_hand():
    # beta 0.5: v+ = 0.5 * 2 + 0.5 * 1 = 1.5 and v- = 1.5 * 1 - 0.5 * 2 = 0.5, at t = 0.5 from
    # x_t = 1: 0.25 and 0.75, away from x0 = 0.05: 0.2 and 0.7. A squared distance over itself
    # is itself; r = 0.75: 5 * (0.75 * 0.2 + 0.25 * 0.7) / 0.5 = 3.25, and 0.1 * (2 - 3)^2.
    loss, terms = diffusion_nft_loss_terms(
        torch.tensor([[2.0]]),
        torch.tensor([[1.0]]),
        torch.tensor([[3.0]]),
        x0=torch.tensor([[0.05]]),
        xt=torch.tensor([[1.0]]),
        t=0.5,
        reward_prob=tensor(0.75),
        beta=0.5,
        adv_clip_max=5.0,
        adaptive_weight_min=1e-5,
        ref_kl_coef=0.1,
    )
    assert loss.tolist() == pytest.approx([3.35])
    assert {n: t.item() for n, t in terms.items()} == pytest.approx(
        {
            "nft_loss": 0.65,
            "nft_positive_loss": 0.2,
            "nft_negative_loss": 0.7,
            "old_deviation": 1.0,
            "velocity_kl": 1.0,
        }
    )


def test_the_weight_is_the_distance_and_has_a_floor():
    # Two elements, away by 0.3 and 0.1: 0.05 over 0.2; with a floor of 0.5, 0.05 over 0.5.
    def positive(floor):
        _, terms = diffusion_nft_loss_terms(
            torch.tensor([[1.0, 1.0]]),
            torch.tensor([[0.0, 0.0]]),
            None,
            x0=torch.tensor([[0.2, 0.4]]),
            xt=torch.tensor([[1.0, 1.0]]),
            t=0.5,
            reward_prob=tensor(1.0),
            **(PLAIN | {"adaptive_weight_min": floor}),
        )
        return terms["nft_positive_loss"].item()

    assert positive(1e-5) == pytest.approx(0.25)
    assert positive(0.5) == pytest.approx(0.1)


def test_the_weight_is_a_constant_and_only_the_velocity_has_a_gradient():
    given = {
        name: torch.tensor([[value]], requires_grad=True)
        for name, value in (("velocity", 1.0), ("old", 0.0), ("ref", 0.0), ("x0", 0.1), ("xt", 1.0))
    }
    prob = tensor(1.0, grad=True)
    loss, _ = diffusion_nft_loss_terms(
        given["velocity"], given["old"], given["ref"], x0=given["x0"], xt=given["xt"], t=0.5,
        reward_prob=prob, **(PLAIN | {"ref_kl_coef": 0.5}),
    )  # fmt: skip
    loss.sum().backward()
    grad = given.pop("velocity").grad
    # 5 * d/dv (0.9 - 0.5 v)^2 / 0.4 at v = 1, and 0.5 * 2 v: 5 * 2 * 0.4 * -0.5 / 0.4 + 1.
    assert grad is not None
    assert grad.item() == pytest.approx(-4.0)
    assert all(tensor.grad is None for tensor in (*given.values(), prob))


@pytest.mark.parametrize(("prob", "closer"), [(1.0, True), (0.0, False)])
def test_a_good_sample_pulls_and_a_bad_one_pushes(prob, closer):
    generator = torch.Generator().manual_seed(0)
    x0, noise, v = (torch.randn(3, 8, generator=generator) for _ in range(3))
    old = v.clone()
    v.requires_grad_()
    t = 0.6
    xt = (1 - t) * x0 + t * noise

    def terms():
        return diffusion_nft_loss_terms(
            v, old, None, x0=x0, xt=xt, t=t, reward_prob=torch.full((3,), prob), **PLAIN
        )

    loss, before = terms()
    (gradient,) = torch.autograd.grad(loss.sum(), v)
    assert torch.equal(before["nft_positive_loss"], before["nft_negative_loss"])
    assert not before["old_deviation"].any()
    with torch.no_grad():
        v -= 1e-2 * gradient
    _, after = terms()
    assert ((after["nft_positive_loss"] < before["nft_positive_loss"]) == closer).all()
    assert ((((noise - x0) - v) ** 2).sum(1) < (((noise - x0) - old) ** 2).sum(1)).all() == closer


def test_levels_and_samples_are_each_their_own():
    generator = torch.Generator().manual_seed(1)
    v, old, ref, x0, xt = (torch.randn(3, 2, 4, generator=generator) for _ in range(5))
    t, prob = tensor(0.2, 0.5, 0.9), tensor(0.1, 0.5, 1.0)
    settings = PLAIN | {"beta": 0.3, "ref_kl_coef": 0.2}
    whole, _ = diffusion_nft_loss_terms(
        v, old, ref, x0=x0, xt=xt, t=t, reward_prob=prob, **settings
    )
    for i in range(3):
        row = slice(i, i + 1)
        alone, _ = diffusion_nft_loss_terms(
            v[row], old[row], ref[row], x0=x0[row], xt=xt[row], t=t[i].item(),
            reward_prob=prob[row], **settings,
        )  # fmt: skip
        torch.testing.assert_close(whole[row], alone)


def test_only_what_is_live_counts():
    generator = torch.Generator().manual_seed(2)
    v, old, ref, x0, xt = (torch.randn(2, 6, generator=generator) for _ in range(5))
    mask = torch.arange(6).expand(2, 6) < 4
    settings = PLAIN | {"ref_kl_coef": 0.2, "t": 0.5, "reward_prob": tensor(0.3, 0.8)}
    masked, _ = diffusion_nft_loss_terms(
        v.where(mask, 50.0), old, ref, x0=x0, xt=xt, mask=mask, **settings
    )
    cut, _ = diffusion_nft_loss_terms(
        v[:, :4], old[:, :4], ref[:, :4], x0=x0[:, :4], xt=xt[:, :4], **settings
    )
    torch.testing.assert_close(masked, cut)


def test_half_precision_is_computed_in_float32():
    v = torch.full((1, 2), 1.0, dtype=torch.bfloat16)
    loss, _ = diffusion_nft_loss_terms(
        v, v.float() - 1e-3, None, x0=v.float() * 0, xt=v.float(), t=0.5,
        reward_prob=tensor(0.5), **PLAIN,
    )  # fmt: skip
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(5 * (0.5 * 0.5 + 0.5 * 0.501), rel=1e-5)


def test_the_probability_by_hand():
    advantages = tensor(-10.0, -5.0, 0.0, 2.5, 5.0, 7.0)
    got = reward_probability(advantages, adv_clip_max=5.0)
    assert got.tolist() == [0.0, 0.0, 0.5, 0.75, 1.0, 1.0]
    with pytest.raises(
        LossError, match=r"reward_probability: adv_clip_max must be positive; got 0"
    ):
        reward_probability(advantages, adv_clip_max=0)


def test_what_does_not_fit_is_refused():
    v = torch.zeros(2, 3)

    def loss(old=v, **others):
        arguments = {"x0": v, "xt": v, "t": 0.5, "reward_prob": torch.zeros(2), **PLAIN}
        return diffusion_nft_loss_terms(v, old, None, **(arguments | others))

    with pytest.raises(
        LossError, match=r"got \(2, 3\) for velocity, others for \['old_velocity'\]"
    ):
        loss(old=torch.zeros(2, 1))
    with pytest.raises(LossError, match=r"diffusion_nft_loss: beta must be positive; got 0"):
        loss(beta=0)
    with pytest.raises(LossError, match=r"diffusion_nft_loss: t must be positive; got 0\.0"):
        loss(t=0.0)
