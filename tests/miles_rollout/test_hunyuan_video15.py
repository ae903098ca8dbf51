"""What is particular to HunyuanVideo 1.5: a guider, channels side by side, glyphs, no callback."""

import copy
import functools

import pytest
import torch
from diffusers import ClassifierFreeGuidance, ClassifierFreeZeroStarGuidance, SkipLayerGuidance

from miles_rollout import RolloutEngine, RolloutParamsError, RolloutTrajectory, rollout
from miles_rollout.testing import tiny_hunyuan_video15
from tests.miles_rollout.models import MODELS, load, videos
from tests.miles_rollout.tiny import (
    DEBUG,
    ODE,
    PROMPTS,
    SEEDS,
    Calls,
    assert_replays,
    generators,
)

MODEL = MODELS["tiny-hunyuan-video-1-5"]


@functools.cache
def with_guider(dtype=torch.float32):
    """A pipeline whose guider a test may change."""
    return tiny_hunyuan_video15(dtype=dtype)


def stock(pipe, output_type="latent", **more):
    arguments = {"prompt": PROMPTS, "negative_prompt": ["x", "y"], **MODEL.size, **more}
    arguments.setdefault("generator", generators())
    return videos(pipe, output_type, num_inference_steps=4, **arguments)["video"]


def roll(pipe, params=None, **more):
    with rollout(pipe, params or DEBUG, SEEDS) as session:
        output = stock(pipe, **more)
    return session.trajectory, output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "how",
    [
        {"guidance_scale": 3.0, "guidance_rescale": 0.7},
        {"guidance_scale": 3.0, "use_original_formulation": True},
        {"guidance_scale": 3.0, "guidance_rescale": 0.7, "use_original_formulation": True},
        {"guidance_scale": 0.5},
        {"guidance_scale": 1.0, "use_original_formulation": True},
        {"guidance_scale": 3.0, "guidance_rescale": 0.7, "enabled": False},
    ],
    ids=["rescale", "original", "both", "below-1", "original-at-1", "disabled"],
)
def test_every_setting_of_the_guider_rolls_out_as_stock_and_replays(how, dtype, tmp_path):
    pipe = with_guider(dtype)
    pipe.guider = ClassifierFreeGuidance(**how)
    more = {} if how.get("enabled", True) else {"negative_prompt": None}
    before = stock(pipe, **more)
    _, inside = roll(pipe, ODE, **more)
    assert torch.equal(inside, before)
    trajectory, _ = roll(pipe, **more)
    assert len(trajectory.conditions[0].steps[0]) == (1 if "enabled" in how else 2)
    trajectory.save(tmp_path)
    engine = RolloutEngine(pipe)
    # Replay asks the trajectory, not the pipeline, how predictions are combined.
    pipe.guider = ClassifierFreeGuidance(guidance_scale=2.0)
    for each in (trajectory, RolloutTrajectory.load(tmp_path)):
        assert_replays(engine, each)
    alone = engine.replay(trajectory, 1, [1]).streams["video"].velocity.float()
    held = trajectory.streams["video"].debug["velocity"][[1], 1]
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(alone, held, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("guider", "message"),
    [
        (lambda: SkipLayerGuidance(skip_layer_guidance_layers=[0]), "got a SkipLayerGuidance; set"),
        (ClassifierFreeZeroStarGuidance, "got a ClassifierFreeZeroStarGuidance; set pipe.guider"),
        (
            lambda: ClassifierFreeGuidance(stop=0.5),
            r"got a guider from 0.0 to 0.5; set its start=0",
        ),
        (
            lambda: ClassifierFreeGuidance(start=0.5),
            r"covers all steps; got a guider from 0.5 to 1",
        ),
    ],
)
def test_other_guiders_are_refused_by_name(guider, message):
    pipe = with_guider()
    pipe.guider = guider()
    with Calls(pipe.transformer) as calls:
        with pytest.raises(RolloutParamsError, match=message):
            roll(pipe, ODE)
        assert len(calls) == 0


def test_a_negative_prompt_says_that_it_has_no_effect_where_the_guider_is_off():
    pipe = with_guider()
    for guider in (
        ClassifierFreeGuidance(guidance_scale=1.0),
        ClassifierFreeGuidance(guidance_scale=3.0, enabled=False),
    ):
        pipe.guider = guider
        with pytest.warns(UserWarning, match="no effect where the guider is off; got guidance_sc"):
            roll(pipe, ODE)


def generate(pipe, **how):
    engine = RolloutEngine(pipe)
    how = {**MODEL.size, "num_inference_steps": 4, "seed": 0, "decode": False, **how}
    return next(engine.generate(["a red circle"], 1, ODE, **how))


def test_the_engine_sets_the_guider_for_a_call_and_leaves_it_as_it_was():
    pipe = with_guider()
    guider = pipe.guider = ClassifierFreeGuidance(guidance_scale=6.0)
    before, config = copy.deepcopy(vars(guider)), dict(pipe.config)
    assert not generate(pipe).trajectory.guidance["do_classifier_free_guidance"]
    assert generate(pipe, negative_prompt="x").trajectory.guidance["guidance_scale"] == 6.0
    guided = generate(pipe, guidance_scale=3.0)
    assert guided.trajectory.guidance == {
        "do_classifier_free_guidance": True,
        "guidance_scale": 3.0,
        "guidance_rescale": 0.0,
        "use_original_formulation": False,
    }
    assert pipe.guider is guider
    assert vars(guider) == before
    assert dict(pipe.config) == config
    pipe.guider = ClassifierFreeGuidance(guidance_scale=3.0)
    spelled = generate(pipe, negative_prompt="")
    assert torch.equal(spelled.latents["video"], guided.latents["video"])


def test_the_engine_encodes_nothing_while_it_denoises():
    pipe = with_guider()
    pipe.guider = ClassifierFreeGuidance(guidance_scale=6.0)
    for how in ({}, {"guidance_scale": 3.0}):
        engine = RolloutEngine(pipe)
        engine.encode(["a red circle", ""])
        how = {**MODEL.size, "num_inference_steps": 2, "seed": 0, "decode": False, **how}
        with Calls(pipe.text_encoder, pipe.text_encoder_2) as calls:
            next(engine.generate(["a red circle"], 1, ODE, **how))
        assert len(calls) == 0


def test_quoted_words_are_encoded_apart_and_replayed():
    pipe = load("tiny-hunyuan-video-1-5")
    prompts = ['a sign that says "go"', "a red circle"]
    trajectory, _ = MODEL.roll(pipe, True, prompt=prompts)
    call = trajectory.conditions[0].steps[0][0]
    # Two rows: 'Text "go". ' and an end in bytes, and none.
    assert call.kwargs["encoder_attention_mask_2"].sum(1).tolist() == [len('Text "go". ') + 1, 0]
    engine = RolloutEngine(pipe)
    assert_replays(engine, trajectory)
    for row in (0, 1):
        alone = engine.replay(trajectory, 0, [row]).log_prob
        torch.testing.assert_close(alone, trajectory.log_probs[[row], 0], atol=1e-5, rtol=0)
    encoding, _ = engine.encode(prompts)
    assert encoding["prompt_embeds_2"].shape == (16, 24)


def test_condition_and_mask_stand_beside_the_latents():
    trajectory, _ = MODEL.roll(load("tiny-hunyuan-video-1-5"), False)
    for step, (call,) in trajectory.conditions[0].steps.items():
        shown = call.kwargs["hidden_states"]
        assert shown.shape == (2, 9, 2, 2, 2)
        assert torch.equal(shown[:, :4], trajectory.streams["video"].latent(step))
        assert not shown[:, 4:].any()


def test_prompts_are_as_long_as_the_pipeline_says():
    engine = RolloutEngine(load("tiny-hunyuan-video-1-5"))
    message = "got max_sequence_length=48; set pipe.tokenizer_max_length instead"
    with pytest.raises(RolloutParamsError, match=message):
        engine.encode(["a"], max_sequence_length=48)
