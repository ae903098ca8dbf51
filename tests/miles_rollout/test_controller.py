"""One stream alone: its own loop, masks, signs and refusals."""

import pytest
import torch

from miles_rollout import (
    FlowRolloutController,
    RolloutParams,
    RolloutParamsError,
    RolloutStateError,
    flow_step,
)

L4 = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
SEEDS = [3, 4]


def randn(seed, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (2, 3, 5)), generator=generator).to(dtype)


def controller(params=None, sigmas=L4, seeds=SEEDS, **kwargs):
    return FlowRolloutController(
        params or RolloutParams(),
        seeds,
        stream="image",
        sigmas=sigmas,
        timesteps=sigmas * 1000,
        **kwargs,
    )


def euler(sigmas=L4, step=0, sign=1.0):
    return lambda v, x: x + sign * v * (sigmas[step + 1] - sigmas[step])


def loop(control, x=None, sigmas=L4, dtype=torch.float32, sign=1.0):
    x = randn(0, dtype=dtype) if x is None else x
    for step in range(control.plan.num_steps):
        v = sign * randn(step + 1, *x.shape, dtype=dtype)
        x = control.transition(v, x, step=step, ode=euler(sigmas, step, sign))
    return control.trajectory()


def test_a_loop_of_ones_own():
    trajectory = loop(controller(RolloutParams(debug=True)))
    for step in range(4):
        taken = flow_step(
            "sde",
            trajectory.latents[:, step],
            randn(step + 1),
            sigma=L4[step],
            sigma_next=L4[step + 1],
            sigma_max=L4[1],
            noise_level=0.7,
            noise=trajectory.debug["noise"][:, step],
        )
        assert torch.equal(taken.next_sample, trajectory.latents[:, step + 1])
        assert torch.equal(taken.log_prob, trajectory.log_probs[:, step])


def test_the_opposite_velocity_sign_is_the_same_process():
    plain, flipped = loop(controller()), loop(controller(velocity_sign=-1.0), sign=-1.0)
    assert torch.equal(plain.latents, flipped.latents)
    assert torch.equal(plain.log_probs, flipped.log_probs)
    assert flipped.velocity_sign == -1.0


def test_the_opposite_sign_on_a_published_schedule():
    """Steps of x = 1, v = .5 towards data: 1.02, 1.0514286 and 1.4285714."""
    sigmas = torch.tensor([1, 0.96, 0.857143, 0])
    expected, one = (1.02, 1.0514286, 1.4285714), torch.ones(1, 1)
    for step in range(3):
        params = RolloutParams(sde_step_indices=[(step + 1) % 3])
        control = controller(params, sigmas, [1], velocity_sign=-1.0, euler_ode=True)
        control.next_step = step
        taken = control.transition(one / 2, one, step=step, ode=euler())
        assert taken.item() == pytest.approx(expected[step], abs=1e-6)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (1, 3, 5), (2, 3, 5)])
def test_masked_elements_are_neither_noised_nor_scored_nor_counted(shape):
    mask = torch.ones(shape, dtype=torch.bool)
    mask[..., 3:] = False
    trajectory = loop(controller(mask=mask))
    free = loop(controller(RolloutParams(sde_type="ode")))
    still = trajectory.latents[..., 3:]
    torch.testing.assert_close(still, free.latents[..., 3:], atol=1e-6, rtol=0)
    assert (trajectory.latents[:, 1, :, :3] != free.latents[:, 1, :, :3]).all()
    assert trajectory.num_elements.tolist() == [9, 9]
    assert trajectory.mask.shape == (2, 3, 5)
    assert torch.isfinite(trajectory.log_probs).all()


def zeroing_loop(control, mask, spoil=None, dtype=torch.float32):
    """Zeros in place what is masked, after every step; ``spoil`` changes a live element, too."""
    x = torch.where(mask, randn(0, dtype=dtype), 0)
    seen = []
    for step in range(4):
        seen.append(x.clone())
        v = torch.where(mask, randn(step + 1, dtype=dtype), 0)
        x = control.transition(v, x, step=step, ode=euler(L4, step))
        x[~mask] = 7.0
        if step == spoil:
            x[0, 0, 0] += 1
    return control.trajectory(), [*seen, x]


@pytest.mark.parametrize("latent_dtype", ["pipeline", "float32"])
def test_a_loop_may_change_what_is_masked_and_the_states_are_those_it_made(latent_dtype):
    mask = torch.ones(2, 3, 5, dtype=torch.bool)
    mask[:, 1] = False
    control = controller(RolloutParams(latent_dtype=latent_dtype))
    control.declare_mask(mask[0])
    trajectory, seen = zeroing_loop(control, mask)
    for boundary, state in enumerate(seen):
        assert torch.equal(trajectory.latents[:, boundary], state)
    assert trajectory.num_elements.tolist() == [10, 10]
    assert torch.equal(trajectory.mask, mask)


def test_a_float32_state_takes_what_a_half_loop_made_of_the_masked_elements():
    mask = torch.ones(2, 3, 5, dtype=torch.bool)
    mask[:, 1] = False
    control = controller(RolloutParams(latent_dtype="float32"), mask=mask)
    trajectory, _ = zeroing_loop(control, mask, dtype=torch.bfloat16)
    assert (trajectory.latents[:, 1:][~mask[:, None].expand(2, 4, 3, 5)] == 7).all()


def test_a_live_element_may_not_be_changed_in_place():
    mask = torch.ones(2, 3, 5, dtype=torch.bool)
    mask[:, 1] = False
    for spoil in range(3):
        with pytest.raises(RolloutStateError, match=f"changed between steps {spoil} and"):
            zeroing_loop(controller(mask=mask), mask, spoil)


def test_a_view_changed_in_place_is_seen():
    control = controller()
    x = control.transition(randn(1), randn(0), step=0, ode=euler())
    x.view(2, 15).mul_(2)
    with pytest.raises(RolloutStateError, match="changed between steps 0 and 1"):
        control.transition(randn(2), x.view(2, 3, 5), step=1, ode=euler())


def test_a_mask_comes_before_the_first_step():
    control = controller()
    control.transition(randn(1), randn(0), step=0, ode=euler())
    with pytest.raises(RolloutStateError, match="mask of stream 'image' came after step 0"):
        control.declare_mask(torch.ones(5, dtype=torch.bool))


def test_a_deterministic_step_is_the_loops_own_update():
    calls = []

    def own(v, x):
        calls.append(1)
        return x + 7

    control = controller(RolloutParams(sde_step_indices=[1]))
    x = randn(0)
    assert torch.equal(control.transition(randn(1), x, step=0, ode=own), x + 7)
    assert calls == [1]


def test_a_loop_with_memory_gets_euler_steps():
    def never(v, x):
        raise AssertionError

    control = controller(RolloutParams(sde_step_indices=[1]), euler_ode=True)
    x, v = randn(0), randn(1)
    taken = control.transition(v, x, step=0, ode=never)
    torch.testing.assert_close(taken, x - 0.25 * v)


@pytest.mark.parametrize("steps", [None, [1, 2]])
def test_a_float32_state_is_not_rounded_on_the_way(steps):
    params = RolloutParams(sde_step_indices=steps, latent_dtype="float32")
    fine = loop(controller(params), dtype=torch.bfloat16)
    coarse = loop(controller(RolloutParams(sde_step_indices=steps)), dtype=torch.bfloat16)
    assert fine.latents.dtype == torch.float32
    assert coarse.latents.dtype == torch.bfloat16
    assert torch.equal(fine.latents[:, 0], coarse.latents[:, 0].float())
    assert not torch.equal(fine.latents.bfloat16().float(), fine.latents)


def test_steps_are_taken_once_and_in_order():
    control = controller()
    for step in (1, 4, -1):
        with pytest.raises(RolloutStateError, match=f"expected step 0; got step {step}"):
            control.transition(randn(1), randn(0), step=step, ode=euler())
    x = control.transition(randn(1), randn(0), step=0, ode=euler())
    with pytest.raises(RolloutStateError, match="expected step 1; got step 0"):
        control.transition(randn(1), x, step=0, ode=euler())


def test_an_unfinished_loop_has_no_trajectory():
    control = controller()
    control.transition(randn(1), randn(0), step=0, ode=euler())
    with pytest.raises(RolloutStateError, match="was interrupted after 1 of 4 steps"):
        control.trajectory()


def test_one_seed_a_row():
    with pytest.raises(RolloutParamsError, match="got 2 seeds for 3 rows"):
        controller().transition(randn(1, 3, 5), randn(0, 3, 5), step=0, ode=euler())


def test_indices_are_checked_before_the_loop():
    with pytest.raises(RolloutParamsError, match="index 4 is out of range"):
        controller(RolloutParams(sde_step_indices=[4]))


@pytest.mark.parametrize("dtype", ["pipeline", "float32"])
def test_another_sample_than_the_emitted_one_is_refused(dtype):
    control = controller(RolloutParams(latent_dtype=dtype))
    x = control.transition(randn(1), randn(0), step=0, ode=euler())
    with pytest.raises(RolloutStateError, match="was changed between steps 0 and 1"):
        control.transition(randn(2), x + 1, step=1, ode=euler())


def test_the_schedule_is_a_copy():
    sigmas = L4.clone()
    control = controller(sigmas=sigmas)
    sigmas.fill_(0.5)
    trajectory = loop(control)
    assert torch.equal(trajectory.sigmas, L4)
    trajectory.sigmas.fill_(0)
    assert torch.equal(control.trajectory().sigmas, L4)
