"""The transitions against published figures, written formulas and their own promises.

L4 is the schedule 1, .75, .5, .25, 0 at noise level .7 with x = 1 and v = .5.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from miles_rollout import RolloutParamsError, RolloutStateError, flow_step
from miles_rollout.transitions import SDE_TYPES, schedule_step

CASES = json.loads((Path(__file__).parents[1] / "golden" / "transitions.json").read_text())["cases"]
L4 = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
NOISY = ("sde", "dance_sde", "cps")


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def l4_step(sde_type, step, noise_level, **kwargs):
    x, v = torch.ones(1, 1), torch.full((1, 1), 0.5)
    kwargs.setdefault("noise", torch.zeros(1, 1))
    return schedule_step(sde_type, x, v, sigmas=L4, step=step, noise_level=noise_level, **kwargs)


def draw(sde_type, x, v, **kwargs):
    kwargs = {"sigma": 0.5, "sigma_next": 0.25, "noise_level": 0.7} | kwargs
    return flow_step(sde_type, x, v, **kwargs)


def assert_same(a, b):
    """Two results, or the same rows of two: next_sample, mean, std and log_prob."""
    for name, mine, theirs in zip(("next", "mean", "std", "log_prob"), a, b, strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['schedule']}-{c['sde_type']}")
def test_the_published_implementations_agree(case):
    x, v, x_next, mean = (
        torch.tensor(case[name]).view(case["shape"])
        for name in ("sample", "velocity", "next_sample", "mean")
    )
    step = flow_step(
        case["sde_type"],
        x,
        v,
        sigma=case["sigma"],
        sigma_next=case["sigma_next"],
        sigma_max=case["sigma_second"],
        noise_level=case["noise_level"],
        next_sample=x_next,
    )
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(step.mean, mean, **close)
    torch.testing.assert_close(step.std.flatten(), torch.tensor(case["std"]), **close)
    torch.testing.assert_close(step.log_prob, torch.tensor(case["log_prob_mean"]), **close)


@pytest.mark.parametrize(
    ("sde_type", "noise_level", "step", "mean", "std"),
    [
        ("sde", 0.7, 0, 0.63, 0.7),
        ("sde", 0.7, 1, 0.599375, 0.606217782649),
        ("sde", 0.7, 2, 0.721875, 0.35),
        ("sde", 0.7, 3, 0.762708333, 0.202072594),
        ("cps", 0.7, 0, 0.465492875, 0.668254893),
        ("cps", 0.7, 1, 0.567869656, 0.445503262),
        ("cps", 0.7, 2, 0.704372032, 0.222751631),
        ("cps", 0.7, 3, 0.875, 0.0),
        ("dance_sde", 0.3, 0, 0.86375, 0.15),
        ("dance_sde", 0.3, 2, 0.846875, 0.15),
    ],
)
def test_mean_and_std_on_l4(sde_type, noise_level, step, mean, std):
    taken = l4_step(sde_type, step, noise_level)
    assert taken.mean.item() == pytest.approx(mean, abs=1e-7)
    assert taken.std.item() == pytest.approx(std, abs=1e-7)


def test_kl_of_a_mean_gap_uses_the_whole_std():
    std = l4_step("sde", 2, 0.7).std.item()
    assert 0.1**2 / (2 * std**2) == pytest.approx(0.0408163, abs=1e-7)


@pytest.mark.parametrize("sde_type", NOISY)
def test_noise_level_0_is_the_ode_and_has_no_density(sde_type):
    taken = l4_step(sde_type, 2, 0.0, noise=torch.ones(1, 1))
    assert taken.next_sample.item() == taken.mean.item() == 0.875
    assert taken.std.item() == 0
    assert taken.log_prob.item() == 0
    assert l4_step("sde", 0, 0.0).mean.item() == 0.875


def test_cps_onto_the_terminal_sigma_has_std_0_and_finite_numbers():
    taken = l4_step("cps", 3, 0.7, noise=torch.ones(1, 1))
    assert taken.next_sample.item() == taken.mean.item() == 0.875
    assert taken.log_prob.item() == 0


@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_a_step_that_does_not_move_has_no_nan(sde_type):
    noise = None if sde_type == "ode" else randn(2, 3, seed=2)
    x = randn(2, 3)
    taken = draw(sde_type, x, randn(2, 3, seed=1), sigma=0.5, sigma_next=0.5, noise=noise)
    assert torch.isfinite(taken.log_prob).all()
    assert torch.isfinite(taken.next_sample).all()
    if sde_type != "cps":  # which keeps the coefficients, not the sample
        assert torch.equal(taken.next_sample, x)


def test_sigma_1_takes_its_denominator_from_the_second_sigma():
    one = torch.ones(1, 1)
    exact = flow_step(
        "sde", one, one, sigma=1, sigma_next=0.75, sigma_max=0.75, noise_level=0.7, noise=one
    )
    assert exact.std.item() == pytest.approx(0.7)
    hair = torch.tensor([1 - 1e-6, 0.75, 0.5, 0.25, 0])
    near = schedule_step("sde", one, one, sigmas=hair, step=0, noise_level=0.7, noise=one)
    assert near.std.item() == pytest.approx(0.7, rel=1e-5)


def test_a_high_sigma_after_the_first_step_is_taken_as_it_is():
    sigmas, one = torch.tensor([0.999, 0.995, 0.5, 0]), torch.ones(1, 1)
    taken = schedule_step("sde", one, one, sigmas=sigmas, step=1, noise_level=0.7, noise=one)
    assert taken.std.item() == pytest.approx(0.7 * math.sqrt(0.995 / 0.005 * 0.495), rel=1e-4)


def test_one_step_schedules_are_finite():
    sigmas, one = torch.tensor([1.0, 0.0]), torch.ones(1, 1)
    taken = schedule_step("sde", one, one, sigmas=sigmas, step=0, noise_level=0.7, noise=one)
    assert taken.std.item() == pytest.approx(0.7)


def test_schedule_step_is_flow_step():
    x, v, noise = randn(2, 5), randn(2, 5, seed=1), randn(2, 5, seed=2)
    for step in range(4):
        whole = schedule_step("sde", x, v, sigmas=L4, step=step, noise_level=0.7, noise=noise)
        single = draw(
            "sde", x, v, sigma=L4[step], sigma_next=L4[step + 1], sigma_max=L4[1], noise=noise
        )
        assert_same(whole, single)


def test_log_prob_is_the_mean_gaussian_log_density():
    x, v, noise = randn(2, 3, 4), randn(2, 3, 4, seed=1), randn(2, 3, 4, seed=2)
    for sde_type in ("sde", "dance_sde"):
        taken = draw(sde_type, x, v, noise=noise)
        density = torch.distributions.Normal(taken.mean, taken.std).log_prob(taken.next_sample)
        torch.testing.assert_close(taken.log_prob, density.mean((1, 2)))


def test_cps_log_prob_is_the_unnormalised_square():
    x, v, noise = randn(2, 3), randn(2, 3, seed=1), randn(2, 3, seed=2)
    taken = draw("cps", x, v, noise=noise)
    torch.testing.assert_close(taken.log_prob, -((taken.std * noise) ** 2).mean(1))


@pytest.mark.parametrize("sde_type", NOISY)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_a_drawn_step_scores_as_itself_bitwise(sde_type, out_dtype):
    x, v = randn(3, 33), randn(3, 33, seed=1).to(out_dtype)
    drawn = draw(sde_type, x, v, noise=randn(3, 33, seed=2), out_dtype=out_dtype)
    assert drawn.next_sample.dtype == out_dtype
    assert_same(drawn, draw(sde_type, x, v, next_sample=drawn.next_sample))


def test_the_emitted_sample_is_scored_and_not_the_unrounded_one():
    """Scored in float32 and emitted in bfloat16, a std of .01 gives ratios near .98."""
    x, v, noise = randn(1, 4096), randn(1, 4096, seed=1), randn(1, 4096, seed=2)
    how = {"noise": noise, "noise_level": 0.02}
    exact = draw("dance_sde", x, v, **how)
    rounded = draw("dance_sde", x, v, out_dtype=torch.bfloat16, **how)
    assert abs(math.exp(rounded.log_prob - exact.log_prob) - 1) > 1e-3


@pytest.mark.parametrize("sde_type", NOISY)
@pytest.mark.parametrize("masked", [False, True])
def test_a_row_does_not_depend_on_its_batch(sde_type, masked):
    x, v, noise = (randn(4, 3, 11, seed=seed) for seed in range(3))
    mask = randn(4, 3, 11, seed=3) > 0 if masked else None
    whole = draw(sde_type, x, v, noise=noise, mask=mask)
    for i in range(4):
        row = slice(i, i + 1)
        alone = draw(
            sde_type, x[row], v[row], noise=noise[row], mask=None if mask is None else mask[row]
        )
        assert_same(alone, [field[row] for field in whole])


def test_a_row_does_not_depend_on_memory_layout():
    x, v, noise = (randn(2, 33, 5, seed=seed) for seed in range(3))
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, v, noise)]
    plain = draw("sde", x, v, noise=noise)
    assert_same(plain, draw("sde", *strided[:2], noise=strided[2]))
    x_next = plain.next_sample.transpose(1, 2).contiguous().transpose(1, 2)
    assert_same(plain, draw("sde", *strided[:2], next_sample=x_next))


@pytest.mark.parametrize("sde_type", NOISY)
def test_sigmas_may_differ_by_row(sde_type):
    x, v, noise = (randn(3, 7, seed=seed) for seed in range(3))
    now, then = torch.tensor([1.0, 0.75, 0.5]), torch.tensor([0.75, 0.5, 0.25])
    how = {"sigma_max": 0.75}
    rows = draw(sde_type, x, v, noise=noise, sigma=now, sigma_next=then, **how)
    for i in range(3):
        row = slice(i, i + 1)
        alone = draw(
            sde_type, x[row], v[row], noise=noise[row], sigma=now[i], sigma_next=then[i], **how
        )
        assert_same(alone, [field[row] for field in rows])
    same = draw(sde_type, x, v, noise=noise, sigma=now[[1, 1, 1]], sigma_next=then[[1, 1, 1]])
    assert_same(same, draw(sde_type, x, v, noise=noise, sigma=0.75, sigma_next=0.5))


@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 64, 16), (2, 3, 4, 5), (2, 3, 2, 4, 5)])
@pytest.mark.parametrize("sde_type", NOISY)
def test_any_rank(sde_type, shape):
    x, v, noise = (randn(*shape, seed=seed) for seed in range(3))
    taken = draw(sde_type, x, v, noise=noise)
    flat = draw(sde_type, x.view(2, -1), v.view(2, -1), noise=noise.view(2, -1))
    assert taken.next_sample.shape == taken.mean.shape == shape
    assert taken.std.shape == (2, *[1] * (len(shape) - 1))
    assert torch.equal(taken.log_prob, flat.log_prob)
    assert torch.equal(taken.next_sample.view(2, -1), flat.next_sample)


@pytest.mark.parametrize("sde_type", NOISY)
def test_masked_elements_follow_the_ode_and_do_not_count(sde_type):
    x, v, noise = (randn(2, 3, 8, seed=seed) for seed in range(3))
    live = torch.tensor([True] * 5 + [False] * 3)
    taken = draw(sde_type, x, v, noise=noise, mask=live)
    short = draw(sde_type, x[..., :5], v[..., :5], noise=noise[..., :5])
    ode = flow_step("ode", x, v, sigma=0.5, sigma_next=0.25, noise_level=0.0)
    assert torch.equal(taken.next_sample[..., :5], short.next_sample)
    assert torch.equal(taken.next_sample[..., 5:], ode.next_sample[..., 5:])
    torch.testing.assert_close(taken.log_prob, short.log_prob)
    far = taken.next_sample.clone()
    far[..., 5:] += 100
    again = draw(sde_type, x, v, next_sample=far, mask=live)
    assert torch.equal(again.log_prob, taken.log_prob)


def test_a_row_without_live_elements_has_a_finite_log_prob():
    x, noise = randn(1, 4), randn(1, 4, seed=1)
    taken = draw("sde", x, x, noise=noise, mask=torch.zeros(1, 4, dtype=torch.bool))
    assert torch.isfinite(taken.log_prob).all()


@pytest.mark.parametrize("sde_type", NOISY)
def test_float64_stays(sde_type):
    x, v, noise = (randn(2, 3, seed=seed, dtype=torch.float64) for seed in range(3))
    taken = draw(sde_type, x, v, noise=noise)
    assert {t.dtype for t in taken} == {torch.float64}
    single = draw(sde_type, x.float(), v.float(), noise=noise.float())
    torch.testing.assert_close(taken.mean, single.mean.double(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("sde_type", NOISY)
def test_autocast_changes_nothing(sde_type):
    x, v, noise = (randn(2, 3, seed=seed).bfloat16() for seed in range(3))
    plain = draw(sde_type, x, v, noise=noise)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(plain, draw(sde_type, x, v, noise=noise))
    assert plain.mean.dtype == plain.log_prob.dtype == torch.float32


@pytest.mark.parametrize("sde_type", NOISY)
def test_the_inputs_are_left_alone(sde_type):
    x, v, noise = (randn(2, 3, seed=seed) for seed in range(3))
    before = [t.clone() for t in (x, v, noise)]
    draw(sde_type, x, v, noise=noise)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, v, noise), strict=True))


@pytest.mark.parametrize("sde_type", NOISY)
def test_gradients_are_those_of_the_written_formula(sde_type):
    s, n, eta = 0.5, 0.25, 0.7
    x, x_next = randn(2, 5, dtype=torch.float64), randn(2, 5, seed=2, dtype=torch.float64)
    v = randn(2, 5, seed=1, dtype=torch.float64)
    dt = n - s
    ours, theirs = v.clone().requires_grad_(), v.clone().requires_grad_()
    if sde_type == "cps":
        std = n * math.sin(eta * math.pi / 2)
        mean = (x - s * theirs) * (1 - n) + (x + (1 - s) * theirs) * math.sqrt(n**2 - std**2)
        written = -((x_next - mean) ** 2)
    else:
        g = eta * math.sqrt(s / (1 - s)) if sde_type == "sde" else eta
        mean = (
            x * (1 + g**2 / (2 * s) * dt) + theirs * (1 + g**2 * (1 - s) / (2 * s)) * dt
        )  # Flow-GRPO, eq. 9
        written = torch.distributions.Normal(mean, g * math.sqrt(-dt)).log_prob(x_next)
    scored = draw(sde_type, x, ours, next_sample=x_next).log_prob
    torch.testing.assert_close(scored, written.mean(1), atol=1e-12, rtol=1e-12)
    scored.sum().backward()
    written.mean(1).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-12, rtol=1e-12)
    assert theirs.grad.abs().min() > 0


def test_values_do_not_depend_on_gradients_being_on():
    x, v, noise = (randn(2, 33, seed=seed) for seed in range(3))
    for sde_type in NOISY:
        plain = draw(sde_type, x, v, noise=noise)
        graph = draw(sde_type, x, v.clone().requires_grad_(), noise=noise)
        assert_same(plain, [t.detach() for t in graph])


def test_gradients_flow_through_drawn_noise_too():
    x, v = randn(2, 3), randn(2, 3, seed=1)
    noise = randn(2, 3, seed=2).requires_grad_()
    draw("sde", x, v, noise=noise).next_sample.sum().backward()
    torch.testing.assert_close(noise.grad, torch.full((2, 3), 0.35))


@pytest.mark.parametrize(
    ("sde_type", "changes", "message"),
    [
        ("sdee", {}, "unknown sde_type; got 'sdee'; choose one of ode, sde, cps, dance_sde"),
        ("sde", {"noise_level": -0.1}, "noise_level must be finite and >= 0; got -0.1"),
        ("sde", {"noise_level": math.nan}, "noise_level must be finite"),
        ("cps", {"noise_level": 1.5}, "cps keeps its coefficients only up to noise_level 1"),
        ("ode", {}, "an ode step has no noise and no density; got noise; pass neither"),
        ("sde", {"noise": None}, "got neither; pass exactly one"),
        ("sde", {"next_sample": torch.ones(2, 3)}, "got noise and next_sample; pass exactly one"),
        ("sde", {"noise": torch.ones(2, 4)}, r"noise must have the sample's shape \(2, 3\)"),
        ("sde", {"sigma": torch.ones(3)}, r"got 3 values for 2 rows; pass \[2\]"),
        ("sde", {"sigma": 1.0}, "infinite at sigma 1; got sigma_max None; pass the second sigma"),
        ("sde", {"sigma": 1.0, "sigma_max": 1.0}, "infinite at sigma 1; got sigma_max 1.0"),
        ("sde", {"sigma": 0.25, "sigma_next": 0.5}, r"down to sigma_next >= 0; got 0.25 to 0.5"),
        ("sde", {"sigma": 1.5}, "got 1.5 to 0.25; pass two neighbours of the scheduler's sigmas"),
        ("dance_sde", {"sigma": 0.0, "sigma_next": 0.0}, "got 0.0 to 0.0"),
    ],
)
def test_mistakes_say_what_to_pass(sde_type, changes, message):
    x = torch.ones(2, 3)
    kwargs = {"noise": x} | changes
    # The wrong types and shapes of this test must reach the checks of production.
    unchecked = getattr(flow_step, "__wrapped__", flow_step)
    how = {"sigma": 0.5, "sigma_next": 0.25, "noise_level": 0.7} | kwargs
    with pytest.raises(RolloutParamsError, match=message):
        unchecked(sde_type, x, x, **how)


def test_the_mean_is_the_same_whenever_it_is_asked_for_and_refused_after_a_change():
    x, v, noise = (randn(2, 5, seed=seed) for seed in range(3))
    eager = draw("sde", x, v.clone().requires_grad_(), noise=noise)
    late = draw("sde", x, v, noise=noise)
    assert torch.equal(late.mean, eager.mean)
    spoiled = draw("sde", x, v, noise=noise)
    v.add_(1)
    with pytest.raises(RolloutStateError, match="changed in place before the mean was asked for"):
        _ = spoiled.mean


@pytest.mark.parametrize("sde_type", NOISY)
def test_the_drawn_sample_is_rounded_as_the_formula_is_written(sde_type):
    """A fused multiply-add rounds once instead of twice and would change most rows of this size."""
    x, v, noise = (randn(3, 200, seed=seed) for seed in range(3))
    taken = draw(sde_type, x, v, noise=noise)
    assert torch.equal(taken.next_sample, noise * taken.std + taken.mean)
