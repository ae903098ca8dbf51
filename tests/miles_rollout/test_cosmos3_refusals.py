"""What a Cosmos3 rollout refuses by name, before the denoiser runs."""

import copy
import functools

import pytest
import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers.pipelines.cosmos import mixed_precision

from miles_rollout import RolloutParams, RolloutParamsError, RolloutStateError, rollout
from miles_rollout.loading import load_pipeline
from tests.miles_rollout.tiny_cosmos3 import PROMPT, SIZE, call, conditions, run

load = functools.cache(load_pipeline)


@pytest.fixture(name="pipe", params=["tiny-cosmos3", "tiny-cosmos3-modular"])
def _pipe(request):
    yield from _idle(load(request.param))


@pytest.fixture(name="standard")
def _standard():
    yield from _idle(load("tiny-cosmos3"))


@pytest.fixture(name="modular")
def _modular():
    yield from _idle(load("tiny-cosmos3-modular"))


def _idle(pipe):
    handles = [
        module.register_forward_pre_hook(lambda *_: pytest.fail("ran"))
        for module in (pipe.transformer, pipe.vae.encoder)
    ]
    yield pipe
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ["a", "b"]}, "drop all prompts but the first; got 2 in prompt; set one prompt"),
        ({"negative_prompt": ["a", "b"]}, "one sample a call.*got 2 in negative_prompt"),
        ({"num_frames": 7}, r"the form 4 n \+ 1, or the pipeline cuts it; got 7; set num_frames=5"),
        ({"num_frames": True}, "a frame count is a positive int; got True; set num_frames"),
        ({"sound_latents": torch.zeros(6, 6)}, "never denoised; got sound_latents; set enable_sou"),
        ({"action_latents": torch.zeros(4, 12)}, "never denoised; got action_latents; set action"),
        (
            {"generator": None, "latents": torch.zeros(1, 4, 2, 4, 4), "enable_sound": True},
            "global RNG; got neither a generator nor sound_latents; set generator=session",
        ),
        ({"generator": None}, "initial noise would come from the global RNG"),
    ],
)
def test_a_request_is_checked_before_anything_runs(pipe, arguments, message):
    with pytest.raises(RolloutParamsError, match=message):
        run(pipe, **SIZE | arguments)


def test_actions_need_noise_too(pipe):
    latents = torch.zeros(1, 4, 2, 3, 4)
    with pytest.raises(RolloutParamsError, match="neither a generator nor action_latents"):
        run(pipe, **conditions()["policy"], generator=None, latents=latents)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_images_per_prompt": 2}, "pipeline would ignore; got num_images_per_prompt; set one"),
        ({"callback_on_step_end": print}, "no such argument.*got callback_on_step_end"),
        ({"enable_safety_check": False}, "no such argument.*got enable_safety_check"),
        (
            {"control_videos": {"edge": torch.zeros(5, 3, 8, 8)}},
            "chunk after chunk.*; got control_",
        ),
        ({"state": PipelineState()}, "a state hides its arguments; got a state; set them as arg"),
    ],
)
def test_what_the_modular_pipeline_would_only_warn_of_is_refused(modular, arguments, message):
    with pytest.raises(RolloutParamsError, match=message):
        run(modular, **SIZE, **arguments)


def test_a_state_by_position_is_refused(modular):
    with (
        pytest.raises(RolloutParamsError, match="a state hides its arguments"),
        rollout(modular, RolloutParams(), [1]) as session,
    ):
        modular(PipelineState(), prompt=PROMPT, generator=session.generators, **SIZE)


def test_an_argument_that_the_standard_pipeline_lacks_is_its_own_error(standard):
    with pytest.raises(TypeError, match="num_images_per_prompt"):
        run(standard, **SIZE, num_images_per_prompt=2)


def test_the_safety_checker_is_refused_where_it_is_active(standard):
    guarded = copy.copy(standard)
    vars(guarded)["safety_checker"] = object()
    with pytest.raises(
        RolloutParamsError, match="without the safety checker; got an active one; set enable_safety"
    ):
        run(guarded, **SIZE)


def test_a_safety_checker_that_is_off_for_the_call_is_no_matter():
    guarded = copy.copy(load("tiny-cosmos3"))
    vars(guarded)["safety_checker"] = object()
    run(guarded, **SIZE, enable_safety_check=False)


def test_the_modular_safety_checker_is_refused_where_it_is_active(modular):
    guarded = copy.copy(modular)
    guarded._is_safety_checker_enabled = True
    with pytest.raises(
        RolloutParamsError, match=r"active one; set pipe.disable_safety_checker\(\)"
    ):
        run(guarded, **SIZE)


def test_steps_in_mixed_precision_are_refused(pipe, monkeypatch):
    """As of an FP8 checkpoint, whose policy is read from its config."""
    monkeypatch.setattr(mixed_precision, "_is_modelopt_fp8_backend", lambda *_: True)
    with pytest.raises(RolloutParamsError, match=r"another precision.*set mixed_precision_format="):
        run(pipe, **SIZE, mixed_precision_format="fp8")


def test_two_seeds_for_one_sample_are_refused():
    with pytest.raises(RolloutParamsError, match="got 2 seeds for 1 rows; pass 1 seeds"):
        run(load("tiny-cosmos3"), **SIZE, seeds=[1, 2])


def test_a_feature_cache_is_refused(standard, monkeypatch):
    monkeypatch.setattr(standard.transformer, "_cache_config", object(), raising=False)
    with pytest.raises(RolloutParamsError, match="a cache changes what transformer computes"):
        run(standard, **SIZE)


def test_an_interrupted_loop_is_told():
    def stop(pipe, step, _t, tensors):
        pipe._interrupt = step == 1
        return tensors

    pipe = load("tiny-cosmos3")
    with pytest.raises(RolloutStateError, match="'video' was interrupted after 2 of 4 steps"):
        run(pipe, **SIZE, callback_on_step_end=stop)
    call(pipe, **SIZE)
