"""``step(..., transition=None)`` over stock schedulers."""

import copy
import inspect

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

from miles_rollout import FlowRolloutController, RolloutParams, RolloutParamsError, flow_step
from miles_rollout.controller import controller_for
from miles_rollout.schedulers import accept_transition, check_stochastic


def euler(**config):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, **config)
    scheduler.set_timesteps(4)
    return scheduler


def unipc():
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    scheduler.set_timesteps(4)
    return scheduler


def dpm(**config):
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, **config
    )
    scheduler.set_timesteps(4)
    return scheduler


def randn(seed=0, dtype=torch.float32):
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loop(scheduler, dtype=torch.float32, **kwargs):
    x = randn(dtype=dtype)
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(randn(i + 1, dtype), t, x, return_dict=False, **kwargs)[0]
    return x


class Log:
    """An observer that takes no step."""

    def __init__(self):
        self.events = []

    def scheduled(self, scheduler):
        self.events.append(("scheduled", scheduler))

    def copied(self, original, duplicate):
        self.events.append(("copied", original, duplicate))

    def transition_of(self, scheduler):
        return None


@pytest.mark.parametrize("make", [euler, unipc, dpm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_transition_a_step_is_the_stock_step(make, dtype):
    assert torch.equal(loop(make(), dtype), loop(accept_transition(make()), dtype))


@pytest.mark.parametrize("make", [euler, unipc])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transition_that_takes_the_own_step_is_the_stock_step(make, dtype):
    def own(velocity, sample, *, step, ode, out_dtype):
        return ode(velocity, sample)

    plugged = accept_transition(make())
    assert torch.equal(loop(make(), dtype), loop(plugged, dtype, transition=own))
    assert plugged.step_index == 4


def test_a_transition_gets_the_step_and_the_dtype_to_emit():
    seen = []

    def take(velocity, sample, *, step, ode, out_dtype):
        seen.append((step, velocity.dtype, sample.dtype, out_dtype))
        return (sample - velocity).to(out_dtype)

    for make, emitted in ((euler, torch.bfloat16), (unipc, torch.float32)):
        seen.clear()
        plugged = accept_transition(make())
        v, x = randn(1, torch.bfloat16), randn()
        for t in plugged.timesteps[:2]:
            out = plugged.step(v, t, x, transition=take)
            assert torch.equal(out.prev_sample, (x - v).to(emitted))
        assert seen == [(i, torch.bfloat16, torch.float32, emitted) for i in range(2)]


def test_return_dict_is_honoured():
    def take(velocity, sample, **_):
        return sample

    plugged = accept_transition(euler())
    t, x = plugged.timesteps[0], randn()
    assert plugged.step(x, t, x, transition=take).prev_sample is x
    assert plugged.step(x, t, x, transition=take, return_dict=False) == (x,)


def test_a_stock_scheduler_raises_on_a_transition():
    with pytest.raises(TypeError, match="transition"):
        loop(euler(), transition=lambda *_, **__: None)


def test_the_original_is_untouched():
    scheduler = euler()
    sigmas = scheduler.sigmas
    plugged = accept_transition(scheduler)
    loop(plugged)
    plugged.set_timesteps(7)
    assert scheduler.sigmas is sigmas
    assert scheduler.step_index is None
    assert type(scheduler) is FlowMatchEulerDiscreteScheduler


def test_what_pipelines_inspect_is_as_it_was():
    scheduler = euler()
    plugged = accept_transition(scheduler)
    assert isinstance(plugged, FlowMatchEulerDiscreteScheduler)
    assert type(plugged).__name__ == "FlowMatchEulerDiscreteScheduler"
    own, ours = (dict(inspect.signature(s.step).parameters) for s in (scheduler, plugged))
    transition = ours.pop("transition")
    assert transition.kind is inspect.Parameter.KEYWORD_ONLY
    assert transition.default is None
    assert ours == own
    for a, b in ((scheduler, plugged),):
        assert inspect.signature(a.set_timesteps) == inspect.signature(b.set_timesteps)


def test_a_config_names_the_stock_class(tmp_path):
    plugged = accept_transition(euler())
    stock = FlowMatchEulerDiscreteScheduler.from_config(plugged.config)
    assert dict(stock.config) == dict(plugged.config) == dict(euler().config)
    again = type(plugged).from_config(plugged.config)
    again.set_timesteps(4)
    assert torch.equal(loop(again), loop(euler()))
    plugged.save_pretrained(tmp_path)
    saved = FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path)
    assert saved.config["_class_name"] == "FlowMatchEulerDiscreteScheduler"
    assert saved.config["shift"] == 3.0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copies_accept_transitions_and_are_reported(duplicate):
    log = Log()
    plugged = accept_transition(euler(), log)
    other = duplicate(plugged)
    assert log.events == [("copied", plugged, other)]
    assert torch.equal(other.sigmas, plugged.sigmas)
    other.set_timesteps(4)
    assert log.events[-1] == ("scheduled", other)
    assert torch.equal(loop(other), loop(euler()))
    assert plugged.step_index is None


def test_a_controller_is_a_transition():
    scheduler = accept_transition(euler())
    controller = FlowRolloutController(
        RolloutParams(sde_step_indices=[1]),
        [5, 6],
        stream="image",
        sigmas=scheduler.sigmas,
        timesteps=torch.cat([scheduler.timesteps, torch.zeros(1)]),
    )
    out = loop(scheduler, transition=controller.transition)
    trajectory = controller.trajectory()
    assert torch.equal(trajectory.latents[:, -1], out)
    assert trajectory.log_probs[:, 1].all()
    assert not trajectory.log_probs[:, [0, 2, 3]].any()


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (
            UniPCMultistepScheduler(),
            "UniPCMultistepScheduler does not integrate a flow .* got 'epsilon', False",
        ),
        (
            dpm(algorithm_type="sde-dpmsolver++"),
            "DPMSolverMultistepScheduler adds noise of its own; got algorithm_type='sde-dpm",
        ),
        (FlowMatchHeunDiscreteScheduler(), "HeunDiscreteScheduler has no Markov step with a dens"),
        (euler(stochastic_sampling=True), "has stochastic_sampling on, which is another process"),
        (euler(invert_sigmas=True), "has invert_sigmas on"),
    ],
)
def test_schedulers_without_a_density_are_refused_by_name(scheduler, message):
    with pytest.raises(RolloutParamsError, match=message):
        check_stochastic(scheduler)


def test_sigmas_beyond_flow_matching_are_refused():
    scheduler = euler()
    scheduler.sigmas = scheduler.sigmas * 14
    with pytest.raises(RolloutParamsError, match=r"sigmas do not fall within 1..0"):
        check_stochastic(scheduler)


def test_timesteps_per_token_are_refused_under_a_transition():
    plugged = accept_transition(euler())
    x = torch.zeros(2, 3, 4)
    with pytest.raises(RolloutParamsError, match="every token has a timestep of its own"):
        plugged.step(
            x, plugged.timesteps[0], x, per_token_timesteps=torch.ones(2, 3),
            transition=lambda *_, **__: x,
        )  # fmt: skip


@pytest.mark.parametrize("make", [euler, unipc, dpm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deterministic_rollout_takes_the_solvers_own_steps_bitwise(make, dtype):
    plugged = accept_transition(make())
    control = controller_for(plugged, RolloutParams(sde_type="ode"), [1, 2], "image")
    out = loop(plugged, dtype, transition=control.transition)
    stock = loop(make(), dtype)
    assert out.dtype == stock.dtype
    assert torch.equal(out, stock)


@pytest.mark.parametrize("make", [unipc, dpm])
@pytest.mark.parametrize("streams", [None, ["audio"]])
def test_a_solver_with_memory_takes_euler_steps_beside_stochastic_ones(make, streams):
    """Also in a stream without a stochastic step: what a step is belongs to the whole request."""
    plugged = accept_transition(make())
    params = RolloutParams(sde_step_indices=[1], sde_streams=streams)
    control = controller_for(plugged, params, [1, 2], "image")
    x = randn()
    for i, t in enumerate(plugged.timesteps):
        s, n = plugged.sigmas[i : i + 2]
        v = randn(i + 1)
        taken = plugged.step(v, t, x, transition=control.transition).prev_sample
        if streams or i != 1:
            expected = flow_step("ode", x, v, sigma=s, sigma_next=n, noise_level=0).next_sample
            assert torch.equal(taken, expected)
        x = taken
    assert control.trajectory().log_probs.any().item() == (streams is None)
    assert plugged.step_index == 4


@pytest.mark.parametrize("make", [unipc, dpm])
def test_the_first_std_of_a_schedule_that_starts_below_1_is_that_of_the_second_sigma(make):
    plugged = accept_transition(make())
    assert 0.99 < plugged.sigmas[0] < 1
    control = controller_for(plugged, RolloutParams(debug=True), [1, 2], "image")
    loop(plugged, transition=control.transition)
    s, n = plugged.sigmas[:2].tolist()
    expected = 0.7 * (s / (1 - n)) ** 0.5 * (s - n) ** 0.5
    std = control.trajectory().debug["std"][:, 0]
    torch.testing.assert_close(std, torch.full_like(std, expected))
