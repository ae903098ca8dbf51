"""What is particular to SD3 and FLUX.1, and that their tiny forms are seeded and not trivial."""

import json

import pytest
import torch

from miles_rollout import RolloutEngine, RolloutParamsError, rollout, testing
from tests.miles_rollout.models import MODELS, load
from tests.miles_rollout.tiny import (
    ODE,
    PROMPTS,
    SEEDS,
    assert_marks,
    assert_replays,
    generators,
    marked,
)

SIZE = {"num_inference_steps": 4, **MODELS["tiny-sd3"].size}


@pytest.mark.parametrize(
    ("model", "kwargs", "message"),
    [
        ("tiny-sd3", {"skip_guidance_layers": [0]}, r"skip_guidance_layers \[0\]; set it to None"),
        ("tiny-sd3", {"ip_adapter_image": "x"}, "got ip_adapter_image; set it to None"),
        ("tiny-flux", {"ip_adapter_image": "x"}, "got ip_adapter_image; set it to None"),
        ("tiny-flux", {"height": 36}, "height must be divisible by 8, .* got 36"),
    ],
)
def test_what_a_family_cannot_replay_is_refused_by_name(model, kwargs, message):
    pipe = load(model)
    with pytest.raises(RolloutParamsError, match=message), rollout(pipe, ODE, SEEDS):
        pipe(PROMPTS, generator=generators(), **SIZE | kwargs)


def generate(model, **kwargs):
    engine = RolloutEngine(load(model))
    return next(engine.generate(PROMPTS, 1, ODE, seed=0, decode=False, **SIZE | kwargs)).trajectory


def test_sd3_guides_with_an_empty_negative_prompt_where_a_scale_asks_for_it():
    assert not generate("tiny-sd3").guidance["do_classifier_free_guidance"]
    implied = generate("tiny-sd3", guidance_scale=3.0)
    assert implied.guidance == {"do_classifier_free_guidance": True, "guidance_scale": 3.0}
    spelled = generate("tiny-sd3", guidance_scale=3.0, negative_prompt="")
    final = [t.streams["image"].latents[:, -1] for t in (implied, spelled)]
    assert torch.equal(*final)
    assert generate("tiny-sd3", negative_prompt="x").guidance["guidance_scale"] == 7.0


def test_flux_says_that_a_negative_prompt_does_nothing_at_its_default_scale():
    with pytest.warns(UserWarning, match=r"no effect at true_cfg_scale 1\.0; got 'x'"):
        trajectory = generate("tiny-flux", negative_prompt="x")
    assert trajectory.guidance == {"do_true_cfg": False, "true_cfg_scale": 1.0}


def test_flux_replays_its_embedded_guidance():
    low, high = (generate("tiny-flux", guidance_scale=g) for g in (1.0, 30.0))
    assert not torch.equal(
        low.streams["image"].latents[:, -1], high.streams["image"].latents[:, -1]
    )


def fingerprint(pipe):
    """Of all weights and of the token ids."""
    sums = {
        f"{name}.{key}": weight.double().sum().item()
        for name, module in sorted(pipe.components.items())
        if isinstance(module, torch.nn.Module)
        for key, weight in module.state_dict().items()
    }
    ids = [
        getattr(component, "tokenizer", component)("A cat, 4k!").input_ids
        for name, component in sorted(pipe.components.items())
        if "tokenizer" in name or name == "processor"
    ]
    return json.loads(json.dumps([sums, ids]))


@pytest.mark.parametrize("model", ["tiny-sd3", "tiny-flux"])
def test_nothing_of_a_tiny_pipeline_is_trivial(model):
    pipe = load(model)
    assert pipe.vae.config.scaling_factor not in (0, 1)
    assert pipe.vae.config.shift_factor not in (0, 1)
    latents = MODELS[model].stock(pipe, False)["image"]
    with torch.no_grad():
        for name in ("transformer", "vae"):
            for key, weight in getattr(pipe, name).named_parameters():
                assert weight.numel() == 1 or weight.std() > 0, key
    # Each of the text encoders reaches the picture.
    for name in [n for n in pipe.components if n.startswith("text_encoder")]:
        weight = getattr(pipe, name).get_input_embeddings().weight.data
        held = weight.clone()
        weight.copy_(held.roll(1, 1))
        changed = MODELS[model].stock(pipe, False)["image"]
        weight.copy_(held)
        assert (changed - latents).abs().max() > 1e-4, name


@pytest.mark.parametrize("model", ["tiny-qwen-image", "tiny-sd3", "tiny-flux"])
def test_the_marks_of_a_subclass_reach_record_and_replay(model):
    pipe = marked(load(model))
    trajectory, _ = MODELS[model].roll(pipe, False)
    assert_marks(trajectory)
    assert_replays(RolloutEngine(pipe), trajectory)


def test_a_name_that_testing_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'miles_rollout.testing' has no attribute 'tiny_x'"):
        _ = testing.tiny_x
