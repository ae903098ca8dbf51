"""What is particular to Wan: two experts with a scale each, two schedulers, mixed dtypes."""

import functools
from dataclasses import replace

import pytest
import torch
from diffusers import (
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)

from miles_rollout import RolloutEngine, RolloutParams, RolloutParamsError, rollout
from miles_rollout.testing import tiny_wan
from tests.miles_rollout.models import MODELS, load
from tests.miles_rollout.test_models import denoisers
from tests.miles_rollout.tiny import DEBUG, ODE, Calls, assert_replays

MODEL = MODELS["tiny-wan2-2"]


@functools.cache
def swapped(version, dtype=torch.float32):
    """Each version with the scheduler that the other tiny one has."""
    pipe = tiny_wan(version=version, dtype=dtype)
    pipe.scheduler = {
        "2.1": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
        ),
        "2.2": FlowMatchEulerDiscreteScheduler(shift=5.0),
    }[version]
    return pipe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_either_scheduler_rolls_out_as_stock_and_replays(version, dtype):
    pipe, model = swapped(version, dtype), MODELS["tiny-wan"]
    before = model.stock(pipe, True, "pt")["video"]
    _, inside = model.roll(pipe, True, ODE, output_type="pt")
    assert torch.equal(inside["video"], before)
    trajectory, _ = model.roll(pipe, True)
    assert_replays(RolloutEngine(pipe), trajectory)
    assert torch.equal(model.stock(pipe, True, "pt")["video"], before)


def test_each_expert_takes_its_steps_and_is_replayed_by_name():
    pipe = load("tiny-wan2-2")
    trajectory, _ = MODEL.roll(pipe, True)
    steps = trajectory.conditions[0].steps
    modules = [[call.module for call in steps[step]] for step in range(4)]
    assert modules == [["transformer"] * 2] * 2 + [["transformer_2"] * 2] * 2
    assert trajectory.streams["video"].timesteps.tolist() == [999, 900, 750, 500, 0]
    engine = RolloutEngine(pipe)
    held = pipe.transformer
    pipe.transformer = pipe.transformer_2
    try:
        gaps = [(engine.replay(trajectory, s).log_prob - trajectory.log_probs[:, s]).abs().max()
                for s in range(4)]  # fmt: skip
    finally:
        pipe.transformer = held
    assert [bool(gap > 0) for gap in gaps] == [True, True, False, False]


@pytest.mark.parametrize(
    ("argument", "steps"), [("guidance_scale", (0, 1)), ("guidance_scale_2", (2, 3))]
)
def test_each_expert_is_guided_by_its_own_scale(argument, steps):
    pipe = load("tiny-wan2-2")
    engine = RolloutEngine(pipe)
    trajectory, _ = MODEL.roll(pipe, True)
    assert trajectory.guidance == {
        "do_classifier_free_guidance": True,
        "guidance_scale": 3.0,
        "guidance_scale_2": 4.0,
    }
    other = replace(trajectory, guidance={**trajectory.guidance, argument: 2.0})
    held = trajectory.streams["video"].debug["velocity"]
    for step in range(4):
        velocity = engine.replay(other, step).streams["video"].velocity
        assert torch.equal(velocity, held[:, step]) == (step not in steps)


def test_the_second_scale_is_the_first_one_where_it_is_not_given():
    pipe = load("tiny-wan2-2")
    one, _ = MODEL.roll(pipe, True, ODE, guidance_scale_2=None)
    assert one.guidance["guidance_scale_2"] == 3.0
    two, _ = MODEL.roll(pipe, True, ODE, guidance_scale_2=3.0)
    finals = [t.streams["video"].latents[:, -1] for t in (one, two)]
    assert torch.equal(*finals)


def test_a_second_scale_without_guidance_says_that_it_has_no_effect():
    pipe = load("tiny-wan2-2")
    message = r"guidance_scale_2 has no effect .* got 4\.0 and guidance_scale 1\.0; set guidance"
    with pytest.warns(UserWarning, match=message):
        trajectory, _ = MODEL.roll(pipe, False, ODE, guidance_scale_2=4.0)
    assert trajectory.guidance["guidance_scale_2"] == 1.0


def test_a_scale_alone_guides_by_an_empty_negative_prompt():
    engine = RolloutEngine(load("tiny-wan"))
    how = {**MODELS["tiny-wan"].size, "num_inference_steps": 4, "seed": 0, "decode": False}
    finals = [
        next(engine.generate(["a"], 1, ODE, **how, **more)).latents["video"]
        for more in ({"guidance_scale": 3.0}, {"guidance_scale": 3.0, "negative_prompt": ""}, {})
    ]
    assert torch.equal(finals[0], finals[1])
    assert not torch.equal(finals[0], finals[2])


@pytest.mark.parametrize(
    ("name", "stays_float32"), [("tiny-wan", False), ("tiny-wan2-2", True)], ids=["fm", "unipc"]
)
def test_half_precision_states_are_the_pipelines(name, stays_float32):
    """Euler hands the velocity's dtype on, so only the noise is float32; UniPC keeps float32."""
    pipe, model = load(name, torch.bfloat16), MODELS[name]
    trajectory, _ = model.roll(pipe, True)
    latents = trajectory.streams["video"].latents
    assert latents.dtype == torch.float32
    rounded = [torch.equal(latents[:, k], latents[:, k].bfloat16().float()) for k in range(5)]
    assert rounded == [False, *[not stays_float32] * 4]


def test_half_precision_keeps_what_the_released_denoiser_keeps_in_float32():
    dtypes = {
        n: p.dtype for n, p in load("tiny-wan", torch.bfloat16).transformer.named_parameters()
    }
    assert dtypes["blocks.0.scale_shift_table"] == torch.float32
    assert dtypes["condition_embedder.time_embedder.linear_1.weight"] == torch.float32
    assert dtypes["blocks.0.attn1.to_q.weight"] == torch.bfloat16


def test_deterministic_steps_beside_noise_are_euler_steps_over_the_same_sigmas():
    pipe = load("tiny-wan2-2")
    own, _ = MODEL.roll(pipe, True, ODE)
    mixed, _ = MODEL.roll(pipe, True, RolloutParams(sde_step_indices=[2], debug=True))
    ours, stock = mixed.streams["video"], own.streams["video"]
    assert torch.equal(ours.sigmas, stock.sigmas)
    for step in (0, 1, 3):
        x, velocity = ours.latent(step), ours.debug["velocity"][:, step]
        euler = x + (ours.sigmas[step + 1] - ours.sigmas[step]) * velocity
        torch.testing.assert_close(ours.latent(step + 1), euler, atol=1e-6, rtol=0)
    # UniPC starts as Euler does, and corrects itself from its second step on.
    torch.testing.assert_close(ours.latent(1), stock.latent(1), atol=1e-5, rtol=0)
    assert not torch.allclose(ours.latent(2), stock.latent(2), atol=1e-4)


def test_a_timestep_a_token_is_refused_with_a_stochastic_step_only():
    pipe = tiny_wan()
    pipe.register_to_config(expand_timesteps=True)
    model = MODELS["tiny-wan"]
    before = model.stock(pipe, True)["video"]
    _, inside = model.roll(pipe, True, ODE)
    assert torch.equal(inside["video"], before)
    message = r"every token has a timestep of its own; got a pipeline with expand_timesteps=True"
    with Calls(*denoisers(pipe)) as calls:
        with pytest.raises(RolloutParamsError, match=message):
            model.roll(pipe, True, DEBUG)
        assert len(calls) == 0


def test_a_video_has_the_rate_that_the_family_was_trained_at():
    engine = RolloutEngine(load("tiny-wan"))
    how = {**MODELS["tiny-wan"].size, "num_inference_steps": 2, "seed": 0}
    (media,) = next(engine.generate(["a"], 1, ODE, **how)).media
    assert media.video.shape == (5, 3, 32, 32)
    assert media.fps == 16


def test_a_cache_on_either_expert_is_refused():
    pipe = tiny_wan(version="2.2")
    pipe.transformer_2.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with (
        pytest.raises(RolloutParamsError, match=r"call transformer_2\.disable_cache\(\) first"),
        rollout(pipe, ODE, MODEL.seeds),
    ):
        MODEL.stock(pipe, True)
