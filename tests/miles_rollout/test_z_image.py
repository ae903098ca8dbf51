"""What is particular to Z-Image: lists of rows, a clipped norm, guidance that ends by the clock."""

import pytest
import torch

from miles_rollout import RolloutEngine, RolloutParamsError, RolloutTrajectory
from tests.miles_rollout.models import MODELS, load
from tests.miles_rollout.tiny import ODE, PROMPTS, Calls, assert_replays

MODEL = MODELS["tiny-z-image"]
TRUNCATED = {"cfg_truncation": 0.2}  # the clock runs 0, .1, .25, .5
VARIANTS = [
    pytest.param({"cfg_normalization": True}, id="normalised"),
    pytest.param({"cfg_normalization": 0.9}, id="clipped-harder"),
    pytest.param(TRUNCATED, id="truncated"),
    pytest.param({"cfg_normalization": True, **TRUNCATED}, id="both"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", VARIANTS)
def test_every_form_of_guidance_rolls_out_as_stock_and_replays(how, dtype, tmp_path):
    pipe = load("tiny-z-image", dtype)
    before = MODEL.stock(pipe, True, **how)["image"]
    _, inside = MODEL.roll(pipe, True, ODE, **how)
    assert torch.equal(inside["image"], before)
    assert not torch.equal(before, MODEL.stock(pipe, True)["image"])
    trajectory, _ = MODEL.roll(pipe, True, **how)
    engine = RolloutEngine(pipe)
    assert_replays(engine, trajectory)
    trajectory.save(tmp_path)
    assert_replays(engine, RolloutTrajectory.load(tmp_path))


@pytest.mark.parametrize("how", VARIANTS)
def test_every_form_of_guidance_replays_row_by_row(how):
    engine = RolloutEngine(load("tiny-z-image"))
    trajectory, _ = MODEL.roll(engine.pipe, True, **how)
    for row in (0, 1):
        for step in range(4):
            replay = engine.replay(trajectory, step, [row])
            held = trajectory.streams["image"].debug["velocity"][[row], step]
            torch.testing.assert_close(replay.streams["image"].velocity, held, atol=1e-4, rtol=0)
            torch.testing.assert_close(
                replay.log_prob, trajectory.log_probs[[row], step], atol=1e-5, rtol=0
            )


def test_the_truncation_halves_the_calls_from_its_step_on():
    pipe = load("tiny-z-image")
    with Calls(pipe.transformer) as calls:
        MODEL.roll(pipe, True, **TRUNCATED)
        assert calls.rows == [4, 4, 2, 2]
        for count in (1, 4):
            with pytest.raises(RolloutParamsError, match=f"got {count} seeds for 2 rows"):
                MODEL.roll(pipe, True, seeds=range(count), **TRUNCATED)
        assert len(calls) == 6


def test_no_truncation_is_said_in_three_ways():
    pipe = load("tiny-z-image")
    found = [MODEL.roll(pipe, True, ODE, cfg_truncation=t)[0].guidance for t in (None, 1.0, 1.5)]
    assert (
        found
        == [
            {
                "do_classifier_free_guidance": True,
                "guidance_scale": 3.0,
                "cfg_normalization": 0.0,
                "cfg_truncation": 1.0,
            }
        ]
        * 3
    )


@pytest.mark.parametrize(
    "how", [{"cfg_normalization": True}, {"cfg_truncation": 0.2}], ids=["norm", "truncation"]
)
def test_what_has_no_effect_without_guidance_says_so(how):
    ((name, value),) = how.items()
    message = rf"{name} has no effect without guidance; got {value} and guidance_scale 0\.0; set"
    with pytest.warns(UserWarning, match=message):
        MODEL.roll(load("tiny-z-image"), False, ODE, **how)


def test_prompts_that_fill_another_number_of_blocks_share_a_call():
    """The denoiser pads a prompt to a multiple of 32 tokens: here to 32 and to 64."""
    trajectory, _ = MODEL.roll(load("tiny-z-image"), True)
    (call,) = trajectory.conditions[0].steps[0]
    images, clock, texts = call.args
    assert len(images) == len(clock) == len(texts) == 4
    assert [-(-len(text) // 32) for text in texts] == [1, 2, 1, 1]
    assert [tuple(image.shape) for image in images] == [(4, 1, 8, 8)] * 4


def test_the_scheduler_gets_the_negative_of_what_is_predicted():
    pipe = load("tiny-z-image")
    outputs = []
    handle = pipe.transformer.register_forward_hook(lambda *call: outputs.append(call[-1][0]))
    trajectory, _ = MODEL.roll(pipe, False)
    handle.remove()
    held = trajectory.streams["image"].debug["velocity"]
    for step, made in enumerate(outputs):
        assert torch.equal(held[:, step], -torch.stack(made)[:, :, 0])


def test_the_callers_prompts_are_left_as_they_were():
    """The pipeline writes its chat template into the list that it is given."""
    engine, prompts = RolloutEngine(load("tiny-z-image")), list(PROMPTS)
    engine.encode(prompts)
    assert prompts == PROMPTS
    MODEL.stock(engine.pipe, False, prompt=prompts)
    assert prompts != PROMPTS


def generate(**how):
    engine = RolloutEngine(load("tiny-z-image"))
    how = {**MODEL.size, "num_inference_steps": 4, "seed": 0, "decode": False, **how}
    return next(engine.generate(["a"], 1, ODE, **how)).trajectory


def test_a_scale_between_0_and_1_guides_as_well():
    guided = generate(guidance_scale=0.5)
    assert guided.guidance["do_classifier_free_guidance"]
    assert not generate(guidance_scale=0.0).guidance["do_classifier_free_guidance"]
    assert not generate().guidance["do_classifier_free_guidance"]
    assert generate(negative_prompt="x").guidance["guidance_scale"] == 5.0
    message = r"no effect at guidance_scale 0\.0; got 'x'; set guidance_scale > 0"
    with pytest.warns(UserWarning, match=message):
        generate(guidance_scale=0.0, negative_prompt="x")
