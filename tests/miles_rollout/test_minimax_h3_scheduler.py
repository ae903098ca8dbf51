"""MiniMax H3's scheduler under transitions: the other sign, another clock, one step fewer."""

import pytest
import torch
from diffusers import MiniMaxH3Scheduler

from miles_rollout import RolloutParams, RolloutParamsError
from miles_rollout.controller import controller_for
from miles_rollout.schedulers import accept_transition, check_stochastic, convention_of
from miles_rollout.transitions import flow_step

VIDEO_SIGMAS = [1.0, 0.96, 0.857143, 0.0]
AUDIO_SIGMAS = [1.0, 0.857143, 0.6, 0.0]
OWN_STEPS = [1.02, 1.0514286, 1.4285714]
"""From x = 1 and v = 0.5, for each of the three steps of the video grid."""


def scheduler(points=4, shift=12.0):
    made = MiniMaxH3Scheduler(shift=shift)
    made.set_timesteps(points)
    return made


def ones(value=1.0):
    return torch.full((1, 4, 2), value)


def own_step(step, x, v):
    made = scheduler()
    made.set_begin_index(step)
    return made.step(v, made.timesteps[step], x, return_dict=False)[0]


@pytest.mark.parametrize(("shift", "sigmas"), [(12.0, VIDEO_SIGMAS), (3.0, AUDIO_SIGMAS)])
def test_four_grid_points_are_three_evaluations(shift, sigmas):
    controller = controller_for(scheduler(shift=shift), RolloutParams(), [1], "video")
    assert controller.plan.num_steps == 3
    assert controller.plan.sde_steps == (0, 1, 2)
    assert controller._sigmas.tolist() == pytest.approx(sigmas, abs=1e-6)
    assert controller._timesteps.tolist() == pytest.approx([1 - s for s in sigmas], abs=1e-6)


def test_two_grid_points_are_one_evaluation():
    assert controller_for(scheduler(2), RolloutParams(), [1], "video").plan.num_steps == 1


def test_an_index_is_checked_against_evaluations():
    with pytest.raises(
        RolloutParamsError, match=r"index 3 is out of range: this request has 3 steps.*in 0\.\.2"
    ):
        controller_for(scheduler(), RolloutParams(sde_step_indices=[3]), [1], "video")


def test_the_convention():
    convention = convention_of(accept_transition(scheduler()))
    assert convention.velocity_sign == -1
    assert convention.terminal_timestep == 1
    assert not convention.emits_velocity_dtype
    check_stochastic(scheduler())


@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_golden_own_steps(step):
    x, v = ones(), ones(0.5)
    assert own_step(step, x, v).flatten()[0].item() == pytest.approx(OWN_STEPS[step], abs=1e-6)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_transition_without_noise_is_the_own_step_and_the_other_sign_is_not(step):
    x = torch.randn(1, 4, 2, generator=torch.Generator().manual_seed(0))
    v = torch.randn(1, 4, 2, generator=torch.Generator().manual_seed(1))
    sigmas = scheduler().sigmas
    own = own_step(step, x, v)
    for sign, agrees in ((-1.0, True), (1.0, False)):
        taken = flow_step(
            "sde", x, sign * v, sigma=sigmas[step], sigma_next=sigmas[step + 1], noise_level=0.0,
            sigma_max=sigmas[1], noise=torch.zeros_like(x),
        )  # fmt: skip
        assert ((taken.next_sample - own).abs().max() <= 1e-6) == agrees


def test_the_golden_stochastic_step_through_the_plugged_scheduler():
    plugged = accept_transition(scheduler())
    controller = controller_for(
        plugged, RolloutParams(sde_step_indices=[1], debug=True), [1], "video"
    )
    for t in plugged.timesteps:
        plugged.step(ones(0.5), t, ones(), transition=_fresh(controller))
    assert plugged.step_index == 3
    debug = controller.trajectory().debug
    assert debug["mean"][0, 1].flatten()[0].item() == pytest.approx(0.4340294, abs=1e-6)
    assert debug["std"][0, 1].item() == pytest.approx(1.0998174, abs=1e-6)
    assert [debug["mean"][0, i].flatten()[0].item() for i in (0, 2)] == pytest.approx(
        [OWN_STEPS[0], OWN_STEPS[2]], abs=1e-6
    )


def _fresh(controller):
    """The controller's transition from a state that the test sets itself."""

    def take(velocity, sample, **how):
        controller._emitted = None
        return controller.transition(velocity, sample, **how)

    return take


def test_each_stream_has_the_std_of_its_own_grid():
    stds = {}
    for name, shift in (("video", 12.0), ("audio", 3.0)):
        plugged = accept_transition(scheduler(shift=shift))
        controller = controller_for(plugged, RolloutParams(debug=True), [1], name)
        x = ones()
        for t in plugged.timesteps:
            x = plugged.step(ones(0.5), t, x, transition=controller.transition).prev_sample
        stds[name] = controller.trajectory().debug["std"][0, 1].item()
    for name, (s, n) in {"video": (0.96, 0.857143), "audio": (0.857143, 0.6)}.items():
        expected = 0.7 * (s / (1 - s)) ** 0.5 * (s - n) ** 0.5
        assert stds[name] == pytest.approx(expected, rel=1e-5)


def test_half_precision_emits_the_dtype_of_the_sample():
    seen = []

    def take(velocity, sample, *, step, ode, out_dtype):
        seen.append((step, out_dtype))
        return ode(velocity, sample)

    plugged = accept_transition(scheduler())
    for t in plugged.timesteps[:2]:
        out = plugged.step(ones().bfloat16(), t, ones(), transition=take).prev_sample
        assert out.dtype == torch.float32
    assert seen == [(0, torch.float32), (1, torch.float32)]
