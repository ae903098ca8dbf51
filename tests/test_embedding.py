"""docs/embedding.md: its loops run, and give bit for bit what the pipelines' own calls give."""

from __future__ import annotations

import copy
import re
import types
from pathlib import Path

import pytest
import torch

from miles_rollout import RolloutParams, rollout
from miles_rollout.noise import keyed_generator
from tests.miles_rollout.tiny_loop import assert_same_stream

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "embedding.md").read_text()
PROMPTS, SEEDS = ["a red circle", "a blue square on a green background"], [11, 12]
PARAMS = [
    RolloutParams(debug=True),
    RolloutParams(sde_type="ode"),
    RolloutParams(sde_type="cps", sde_step_indices=[1]),
    RolloutParams(sde_step_indices=[0, 2], return_step_indices=[0, 1, 2, 3], debug=True),
]


@pytest.fixture(scope="module")
def page():
    """All code of the page, run as it stands."""
    module = types.ModuleType("embedding")
    code = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    exec(compile(code, "docs/embedding.md", "exec"), module.__dict__)
    return module


def stock_sd3(page, generators):
    return page.parts(
        PROMPTS, guidance_scale=1.0, num_inference_steps=4, height=32, width=32,
        generator=generators, output_type="latent",
    ).images  # fmt: skip


def stock_h3(page, generator):
    """The pipeline's own blocks from the first row to the last, with a first frame."""
    part = copy.copy(page.h3)
    part._blocks = page.h3.blocks.sub_blocks["denoise"].sub_blocks["fl2va"]
    encoded = page.run_blocks(
        page.h3.blocks.sub_blocks["text_encoder"],
        prompt="a cat", output=["prompt_embeds", "text_token_tags"],
    )  # fmt: skip

    def call():
        return part(
            **encoded, height=32, width=32, num_frames=124, num_inference_steps=4,
            condition_latents=[page.frame], keyframe_anchors=("first",), generator=generator,
            output=["latents", "audio_latents"],
        )  # fmt: skip

    return part, call


def test_without_a_rollout_the_loop_is_the_stock_call_bitwise(page):
    generators = [keyed_generator("initial_noise", seed) for seed in SEEDS]
    request = {}
    image, trajectory = page.denoise(request, PROMPTS, SEEDS)
    assert torch.equal(image, stock_sd3(page, generators))
    assert trajectory is None
    assert request == {}


@pytest.mark.parametrize("params", PARAMS)
def test_the_loop_gives_the_pipelines_trajectory_bitwise(page, params):
    with rollout(page.parts, params, SEEDS) as session:
        expected = stock_sd3(page, session.generators)
    request = {}
    image, trajectory = page.denoise(request, PROMPTS, SEEDS, params)
    assert request == {}
    assert torch.equal(image, expected)
    assert_same_stream(trajectory.streams["image"], session.trajectory.streams["image"])
    assert torch.equal(trajectory.log_probs, session.trajectory.log_probs)
    assert trajectory.replayable_steps == session.trajectory.replayable_steps


def test_without_a_rollout_the_rows_are_those_of_the_stock_blocks_bitwise(page):
    _, call = stock_h3(page, keyed_generator("initial_noise", 11))
    stock = call()
    rows, trajectory = page.denoise_rows({}, page.start_rows("a cat", page.frame, 11), 11)
    assert trajectory is None
    audio = rows["audio"].reshape(2, 207, 4).permute(0, 2, 1)
    assert torch.equal(audio, stock["audio_latents"])
    assert torch.equal(rows["video"].flatten().sort()[0], stock["latents"].flatten().sort()[0])


@pytest.mark.parametrize("params", [*PARAMS, RolloutParams(sde_streams=["video"])])
def test_the_packed_loop_gives_the_pipelines_trajectory_bitwise(page, params):
    part, call = stock_h3(page, keyed_generator("initial_noise", 11))
    with rollout(part, params, [11]) as session:
        call()
    start = page.start_rows("a cat", page.frame, 11)
    _, trajectory = page.denoise_rows({}, start, 11, params)
    theirs = session.trajectory
    assert list(trajectory.streams) == list(theirs.streams) == ["video", "audio"]
    for name in trajectory.streams:
        assert_same_stream(trajectory.streams[name], theirs.streams[name])
    assert torch.equal(trajectory.log_probs, theirs.log_probs)


def test_the_conditioning_rows_matter(page):
    """What the tests above rest on: another frame is another trajectory."""
    start = page.start_rows("a cat", page.frame, 11)
    rows, _ = page.denoise_rows({}, start, 11)
    other, _ = page.denoise_rows({}, {**start, "condition_rows": start["condition_rows"] + 1}, 11)
    assert not torch.equal(rows["video"], other["video"])


def test_an_exception_in_the_denoiser_leaves_the_request_free(page):
    handle = page.parts.transformer.register_forward_hook(lambda *_: 1 / 0)
    request = {}
    with pytest.raises(ZeroDivisionError):
        page.denoise(request, PROMPTS, SEEDS, RolloutParams())
    handle.remove()
    assert request == {}
    assert page.denoise(request, PROMPTS, SEEDS, RolloutParams())[1].num_samples == 2
