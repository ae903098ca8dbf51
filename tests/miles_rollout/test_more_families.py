"""What the video families, Z-Image and Sana keep beside the promises of `test_models`."""

import json
import subprocess
import sys

import pytest
import torch

from miles_rollout import RolloutParamsError, rollout
from tests.miles_rollout.models import MODELS, load
from tests.miles_rollout.test_image_families import fingerprint
from tests.miles_rollout.test_testing_qwen_klein import NAMES
from tests.miles_rollout.tiny import ODE

FAMILIES = ["tiny-wan", "tiny-wan2-2", "tiny-z-image", "tiny-sana", "tiny-hunyuan-video-1-5"]
GLYPHS = 'a sign that says "go"'
"""HunyuanVideo reads quoted words by an encoder of their own."""


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loop_of_a_subclass_is_the_one_that_runs(name):
    """A pipeline that someone changed rolls out with the change, and by its family's adapter."""
    pipe, model, marks = load(name), MODELS[name], []
    stock = type(pipe)

    class Marked(stock):
        def progress_bar(self, *args, **kwargs):
            bar = super().progress_bar(*args, **kwargs)
            bar.update = lambda n=1: marks.append("step")
            return bar

    pipe.__class__ = Marked
    try:
        trajectory, _ = model.roll(pipe, True)
    finally:
        pipe.__class__ = stock
    assert marks == ["step"] * model.evaluations
    assert trajectory.replayable_steps == tuple(range(model.evaluations))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("tiny-wan", {"height": 40}, "height must be divisible by 16, .* got 40; set height to"),
        ("tiny-wan", {"num_frames": 6}, r"num_frames must be 4 n \+ 1, .* got 6; set num_frames"),
        ("tiny-wan", {"num_frames": -3}, r"num_frames must be 4 n \+ 1, .* got -3"),
        ("tiny-z-image", {"width": 36}, "width must be divisible by 8, .* got 36; set width to"),
        ("tiny-z-image", {"num_images_per_prompt": 2}, "got num_images_per_prompt 2; set it to 1"),
        ("tiny-hunyuan-video-1-5", {"height": 40}, "height must be divisible by 16, .* got 40"),
        (
            "tiny-hunyuan-video-1-5",
            {"num_frames": 4},
            r"must be 4 n \+ 1, .* got 4; set num_frames",
        ),
        (
            "tiny-hunyuan-video-1-5",
            {"num_videos_per_prompt": 2},
            "got num_videos_per_prompt 2; set it to 1",
        ),
        ("tiny-sana", {"num_images_per_prompt": 2}, "got num_images_per_prompt 2; set it to 1"),
        ("tiny-wan", {"num_videos_per_prompt": 2}, "got num_videos_per_prompt 2; set it to 1"),
    ],
)
def test_what_a_family_cannot_roll_out_is_refused_by_name(name, kwargs, message):
    pipe, model = load(name), MODELS[name]
    with pytest.raises(RolloutParamsError, match=message), rollout(pipe, ODE, model.seeds):
        model.stock(pipe, False, **kwargs)


def test_tiny_pipelines_are_the_same_in_every_process():
    """One more process for all: trained vocabularies differed from one to the next."""
    names = [*FAMILIES, "tiny-sd3", "tiny-flux", *NAMES]
    code = (
        "import json\n"
        "from miles_rollout.loading import load_pipeline\n"
        "from tests.miles_rollout.test_image_families import fingerprint\n"
        f"print(json.dumps([fingerprint(load_pipeline(name)) for name in {names!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    here = [fingerprint(load(name)) for name in names]
    assert json.loads(done.stdout.splitlines()[-1]) == here
    assert all(len(set(ids)) > 5 for _, tokens in here for ids in tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_of_a_tiny_pipeline_is_trivial(name):
    pipe, model = load(name), MODELS[name]
    (stream,) = model.streams
    prompt = [GLYPHS] * model.num_prompts
    latents = model.stock(pipe, False, prompt=prompt)[stream]
    with torch.no_grad():
        for part in ("transformer", "transformer_2", "vae"):
            for key, weight in getattr(getattr(pipe, part, None), "named_parameters", list)():
                assert weight.numel() == 1 or weight.std() > 0, key
    encoders = [n for n in pipe.components if n.startswith("text_encoder")]
    for module in [getattr(pipe, n).get_input_embeddings() for n in encoders]:
        held = module.weight.data.clone()
        module.weight.data.copy_(held.roll(1, 1))
        changed = model.stock(pipe, False, prompt=prompt)[stream]
        module.weight.data.copy_(held)
        assert (changed - latents).abs().max() > 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_every_step_of_a_tiny_pipeline_depends_on_the_prompt_and_on_the_time(name):
    pipe, model = load(name), MODELS[name]
    (stream,) = model.streams
    trajectory, _ = model.roll(pipe, False)
    velocity = trajectory.streams[stream].debug["velocity"]
    other, _ = model.roll(pipe, False, prompt=list(reversed(model.prompts)))
    changed = other.streams[stream].debug["velocity"][:, 0] - velocity[:, 0]
    assert (changed.flatten(1).abs().amax(1) > 1e-2).all()
    spread = velocity.flatten(2).std(-1)
    assert ((spread > 0.1) & (spread < 10)).all()
