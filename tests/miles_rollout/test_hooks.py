"""A loop of one's own with the four hooks: what the pipeline does, and nothing without a rollout."""

import pytest
import torch

from miles_rollout import RolloutParams, rollout
from miles_rollout.controller import FlowRolloutController
from miles_rollout.hooks import (
    accept_transition,
    finalize_rollout_if_enabled,
    init_rollout_env_if_enabled,
    prepare_rollout_if_enabled,
    rollout_step_kwargs,
)
from miles_rollout.noise import keyed_generator
from miles_rollout.testing import tiny_qwen_image
from tests.miles_rollout.tiny_loop import noise, prepared, scheduler, steps

SEEDS = [3, 4]
STEPS = 4


@pytest.fixture(scope="module")
def parts():
    """A denoiser with its prompt filled in, the pipeline's schedule, and its initial noise."""
    pipe = tiny_qwen_image()
    call = {
        "prompt": ["a red circle", "a blue cross"],
        "true_cfg_scale": 1.0,
        "num_inference_steps": STEPS,
        "height": 32,
        "width": 32,
        "output_type": "latent",
    }
    return pipe, call


def _generators():
    return [keyed_generator("hooks", seed) for seed in SEEDS]


def _loop(pipe, call, request, params, *, with_hooks=True):
    """The 15 lines that somebody who owns his loop would write."""
    with torch.no_grad():
        embeds, mask = pipe.encode_prompt(call["prompt"])
        x = pipe.prepare_latents(2, 4, 32, 32, torch.float32, "cpu", _generators())
        scheduler = accept_transition(pipe.scheduler) if with_hooks else pipe.scheduler
        mu = 0.5 + (0.9 - 0.5) * (x.shape[1] - 256) / (8192 - 256)
        sigmas = torch.linspace(1, 1 / STEPS, STEPS, dtype=torch.float64).numpy()
        scheduler.set_timesteps(sigmas=sigmas, mu=mu)
        scheduler.set_begin_index(0)
        if with_hooks:
            prepare_rollout_if_enabled(request, params, SEEDS, schedulers={"image": scheduler})
            init_rollout_env_if_enabled(request, {"embeds": embeds, "mask": mask})
        for t in scheduler.timesteps:
            velocity = pipe.transformer(
                hidden_states=x,
                timestep=t.expand(2).to(x.dtype) / 1000,
                guidance=None,
                encoder_hidden_states_mask=mask,
                encoder_hidden_states=embeds,
                img_shapes=[[(1, 4, 4)]] * 2,
                attention_kwargs={},
                return_dict=False,
            )[0]
            kwargs = rollout_step_kwargs(request, stream="image") if with_hooks else {}
            x = scheduler.step(velocity, t, x, return_dict=False, **kwargs)[0]
        return x, finalize_rollout_if_enabled(request) if with_hooks else None


def test_a_loop_with_hooks_gives_the_pipelines_trajectory_bitwise(parts):
    pipe, call = parts
    params = RolloutParams(sde_step_indices=(1, 2))
    with rollout(pipe, params, SEEDS) as session:
        expected = pipe(**call, generator=_generators()).images
    final, trajectory = _loop(pipe, call, {}, params)
    assert torch.equal(final, expected)
    theirs, ours = session.trajectory.streams["image"], trajectory.streams["image"]
    assert torch.equal(ours.latents, theirs.latents)
    assert torch.equal(ours.log_probs, theirs.log_probs)
    assert torch.equal(ours.timesteps, theirs.timesteps)
    assert sorted(trajectory.conditions[0].steps) == [1, 2]
    assert set(trajectory.conditions[0].steps[1][0].kwargs) == {"embeds", "mask"}


def test_without_a_rollout_the_hooks_change_nothing(parts):
    pipe, call = parts
    plain, _ = _loop(pipe, call, {}, None, with_hooks=False)
    request = {}
    hooked, trajectory = _loop(pipe, call, request, None)
    assert torch.equal(hooked, plain)
    assert trajectory is None
    assert request == {}


def test_any_object_can_be_the_request_and_is_left_as_it_was(parts):
    class Request:
        pass

    pipe, call = parts
    request = Request()
    _, trajectory = _loop(pipe, call, request, RolloutParams())
    assert trajectory.num_samples == 2
    assert vars(request) == {}


def test_a_loop_without_a_scheduler_brings_its_controller_and_its_own_update():
    sigmas = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    x0 = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))

    def build(params, seeds):
        controller = FlowRolloutController(
            params, seeds, stream="video", sigmas=sigmas, timesteps=1 - sigmas, velocity_sign=-1.0
        )
        return {"video": controller}

    def run(request, params):
        prepare_rollout_if_enabled(request, params, SEEDS, build_controller=build)
        x = x0
        for i in range(4):
            velocity = x.sin()

            def own(v, x, i=i):
                return x - (sigmas[i + 1] - sigmas[i]) * v

            kwargs = rollout_step_kwargs(request, stream="video")
            if kwargs:
                x = kwargs["transition"](velocity, x, step=i, ode=own)
            else:
                x = own(velocity, x)
        return x, finalize_rollout_if_enabled(request)

    plain, none = run({}, None)
    deterministic, _ = run({}, RolloutParams(sde_type="ode"))
    assert none is None
    assert torch.equal(plain, deterministic)
    stochastic, trajectory = run({}, RolloutParams(sde_step_indices=(1,)))
    assert not torch.equal(stochastic, plain)
    assert trajectory.log_probs[:, [0, 2, 3]].abs().max() == 0
    assert trajectory.log_probs[:, 1].abs().min() > 0


def test_a_buffer_of_the_loops_own_may_be_written_but_not_changed():
    request, drive = {}, scheduler()
    prepared(request, schedulers={"image": drive})
    *_, expected = steps(request, drive, noise())
    finalize_rollout_if_enabled(request)

    def loop(change):
        drive, buffer = scheduler(), noise()
        prepared(request, schedulers={"image": drive})
        for t in drive.timesteps:
            kwargs = rollout_step_kwargs(request, stream="image")
            buffer[:] = drive.step(buffer.sin(), t, buffer, return_dict=False, **kwargs)[0]
            buffer += change
        return buffer, finalize_rollout_if_enabled(request)

    final, trajectory = loop(0.0)
    assert torch.equal(final, expected)
    assert torch.equal(trajectory.streams["image"].latent(4), expected)
    with pytest.raises(
        RuntimeError, match="was changed between steps 0 and 1, next to a stochasti"
    ):
        loop(0.1)


def test_rows_that_are_given_are_masked_and_restored_by_the_loop():
    sigmas, given = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]), noise(5)[:, :2]
    mask = torch.tensor([False, False, True, True, True, True]).expand(2, 6)

    def build(params, seeds):
        return {
            "image": FlowRolloutController(
                params, seeds, stream="image", sigmas=sigmas, timesteps=sigmas, mask=mask
            )
        }

    def run(x):
        request = {}
        prepared(
            request,
            build_controller=build,
            ode_transition=lambda v, x, i: x + (sigmas[i + 1] - sigmas[i]) * v,
        )
        for _ in range(4):
            x[:, :2] = given
            x = rollout_step_kwargs(request, stream="image")["transition"](x.sin(), x)
        x[:, :2] = given
        return x, finalize_rollout_if_enabled(request)

    final, trajectory = run(noise())
    stream = trajectory.streams["image"]
    assert torch.equal(final[:, :2], given)
    assert (stream.latents[:, :, :2] == given[:, None]).all()
    assert stream.num_elements.tolist() == [4, 4]
    for step in range(4):
        replay = trajectory.score(step, {"image": stream.latent(step).sin()})
        assert torch.equal(replay.log_prob, trajectory.log_probs[:, step])


def test_misuse_is_named():
    sigmas = torch.tensor([1.0, 0.5, 0.0])

    def build(params, seeds):
        return {
            "image": FlowRolloutController(
                params, seeds, stream="image", sigmas=sigmas, timesteps=sigmas
            )
        }

    request = {}
    with pytest.raises(RuntimeError, match="needs schedulers or build_controller; got neither"):
        prepare_rollout_if_enabled(request, RolloutParams(), SEEDS)
    prepare_rollout_if_enabled(request, RolloutParams(), SEEDS, build_controller=build)
    with pytest.raises(RuntimeError, match="already in a rollout"):
        prepare_rollout_if_enabled(request, RolloutParams(), SEEDS, build_controller=build)
    with pytest.raises(RuntimeError, match="no such stream; got 'audio'; choose among image"):
        rollout_step_kwargs(request, stream="audio")
    with pytest.raises(RuntimeError, match="interrupted after 0 of 2 steps"):
        finalize_rollout_if_enabled(request)
