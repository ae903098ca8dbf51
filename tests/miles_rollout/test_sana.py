"""What is particular to Sana: a multistep solver, an instruction, binned sizes, float32 latents."""

import functools

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaTransformer2DModel,
)

from miles_rollout import RolloutEngine, RolloutParams, RolloutParamsError
from miles_rollout.testing import tiny_sana
from miles_rollout.testing.weights import enliven
from tests.miles_rollout.models import MODELS, load
from tests.miles_rollout.tiny import DEBUG, ODE, Calls, assert_replays

MODEL = MODELS["tiny-sana"]


@functools.cache
def with_euler(dtype=torch.float32):
    pipe = tiny_sana(dtype=dtype)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return pipe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_euler_scheduler_rolls_out_as_stock_and_replays(dtype):
    pipe = with_euler(dtype)
    before = MODEL.stock(pipe, True, "pt")["image"]
    _, inside = MODEL.roll(pipe, True, ODE, output_type="pt")
    assert torch.equal(inside["image"], before)
    trajectory, _ = MODEL.roll(pipe, True)
    assert_replays(RolloutEngine(pipe), trajectory)
    assert torch.equal(MODEL.stock(pipe, True, "pt")["image"], before)


def test_a_solver_with_noise_of_its_own_runs_as_stock_and_takes_no_stochastic_step():
    """Its own noise comes from the generators, which the pipeline hands to what accepts them."""
    pipe = tiny_sana()
    pipe.scheduler = DPMSolverMultistepScheduler.from_config(
        pipe.scheduler.config, algorithm_type="sde-dpmsolver++"
    )
    before = MODEL.stock(pipe, True)["image"]
    _, inside = MODEL.roll(pipe, True, ODE)
    assert torch.equal(inside["image"], before)
    with Calls(pipe.transformer) as calls:
        message = "adds noise of its own; got algorithm_type='sde-dpmsolver"
        with pytest.raises(RolloutParamsError, match=message):
            MODEL.roll(pipe, True, DEBUG)
        assert len(calls) == 0


def test_deterministic_steps_beside_noise_are_euler_steps_over_the_same_sigmas():
    pipe = load("tiny-sana")
    own, _ = MODEL.roll(pipe, True, ODE)
    mixed, _ = MODEL.roll(pipe, True, RolloutParams(sde_step_indices=[2], debug=True))
    ours, stock = mixed.streams["image"], own.streams["image"]
    assert torch.equal(ours.sigmas, stock.sigmas)
    assert ours.timesteps.tolist() == [999, 899, 749, 499, 0]
    for step in (0, 1, 3):
        x, velocity = ours.latent(step), ours.debug["velocity"][:, step]
        euler = x + (ours.sigmas[step + 1] - ours.sigmas[step]) * velocity
        torch.testing.assert_close(ours.latent(step + 1), euler, atol=1e-6, rtol=0)
    assert not torch.allclose(ours.latent(2), stock.latent(2), atol=1e-4)


def test_the_first_step_is_not_as_noisy_as_a_sigma_just_below_1_would_make_it():
    trajectory, _ = MODEL.roll(load("tiny-sana"), True)
    stream = trajectory.streams["image"]
    first, second = stream.sigmas[:2].tolist()
    assert 0.99 < first < 1
    wanted = 0.7 * (first / (1 - second) * (first - second)) ** 0.5
    torch.testing.assert_close(
        stream.debug["std"][:, 0].flatten(), torch.full((2,), wanted), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("cfg", [False, True], ids=["plain", "cfg"])
def test_the_channels_of_a_learned_variance_are_left_out(cfg):
    pipe = tiny_sana()
    config = {**pipe.transformer.config, "out_channels": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe.transformer = SanaTransformer2DModel.from_config(config).eval()
    enliven(pipe.transformer, torch.Generator().manual_seed(0))
    trajectory, _ = MODEL.roll(pipe, cfg)
    engine = RolloutEngine(pipe)
    assert_replays(engine, trajectory)
    alone = engine.replay(trajectory, 1, [1]).log_prob
    torch.testing.assert_close(alone, trajectory.log_probs[[1], 1], atol=1e-5, rtol=0)


def test_a_binned_size_is_decoded_to_the_size_that_was_asked_for():
    pipe = load("tiny-sana")
    engine = RolloutEngine(pipe)
    how = {
        "use_resolution_binning": True,
        "height": 300,
        "width": 500,
        "num_inference_steps": 1,
        "prompt": [MODEL.prompts[0]],
    }
    trajectory, latents = MODEL.roll(
        pipe, False, ODE, seeds=[1], **how, generator=[torch.Generator().manual_seed(0)]
    )
    (media,) = engine.decode(latents, **trajectory.request)
    stock = MODEL.stock(pipe, False, "pt", **how, generator=[torch.Generator().manual_seed(0)])[
        "image"
    ]
    assert media.image.shape == (3, 300, 500)
    assert torch.equal(media.image, stock[0])
    assert latents["image"].shape[2] * 8 != 300


def test_the_instruction_is_for_positive_prompts_only():
    (encoding,) = RolloutEngine(load("tiny-sana")).encode(["a red circle"], max_sequence_length=48)
    positive, negative = (encoding[f"{sign}prompt_embeds"] for sign in ("", "negative_"))
    assert positive.shape == negative.shape == (48, 32)
    masks = [encoding[f"{sign}prompt_attention_mask"].sum().item() for sign in ("", "negative_")]
    # The last 47 tokens: the prompt behind the end of the instruction, or the prompt alone.
    assert masks[1] == len("a red circle") + 1 < masks[0]
    assert (positive - negative).abs().max() > 0.1


def test_a_size_that_the_pipeline_rejects_is_its_own_error():
    with pytest.raises(ValueError, match="divisible by 32 but are 40 and 32"):
        MODEL.roll(load("tiny-sana"), False, ODE, height=40)
