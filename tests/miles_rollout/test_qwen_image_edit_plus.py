"""What is particular to Qwen-Image-Edit-Plus: each prompt has its own references, in their order."""

import numpy as np
import pytest
import torch

from miles_rollout import RolloutEngine, RolloutParamsError, rollout
from tests.miles_rollout.models import load, picture
from tests.miles_rollout.tiny import (
    DEBUG,
    ODE,
    Calls,
    assert_marks,
    assert_replays,
    generators,
    marked,
)

NAME = "tiny-qwen-image-edit-plus"
SIZE = {"height": 128, "width": 256, "num_inference_steps": 2}
TOKENS = 2
REFERENCE_TOKENS = {(96, 64): 54, (64, 64): 64}
A, B = picture(96, 64, seed=1), picture(64, 64, seed=2)


def call(pipe, image, prompt="make it blue", **kwargs):
    how = {"output_type": "latent", "generator": generators(1), **SIZE}
    return pipe(image=image, prompt=prompt, **how | kwargs).images


def roll(pipe, image, **kwargs):
    with rollout(pipe, DEBUG, [11]) as session:
        call(pipe, image, **kwargs)
    return session.trajectory


def shown(trajectory, step=0):
    """The tokens of the references, as the denoiser was shown them in each of its calls."""
    calls = trajectory.conditions[0].steps[step]
    held = [made.kwargs["hidden_states"][:, TOKENS:] for made in calls]
    assert all(torch.equal(held[0], other) for other in held)
    return held[0]


@pytest.fixture(name="tokens", scope="module")
def _tokens():
    """What each reference becomes by itself."""
    pipe = load(NAME)
    return {id(image): shown(roll(pipe, [image])) for image in (A, B)}


def test_references_keep_their_order(tokens):
    pipe = load(NAME)
    finals = []
    for image in ([A, B], [B, A]):
        trajectory = roll(pipe, image, negative_prompt=" ", true_cfg_scale=3.0)
        expected = torch.cat([tokens[id(i)] for i in image], dim=1)
        assert expected.shape[1] == sum(REFERENCE_TOKENS[i.size] for i in image)
        for step in range(2):
            torch.testing.assert_close(shown(trajectory, step), expected)
        assert_replays(RolloutEngine(pipe), trajectory)
        # Only the generated tokens are a state, and only they are scored.
        assert trajectory.streams["image"].num_elements.tolist() == [TOKENS * 16]
        finals.append(trajectory.streams["image"].latents[:, -1])
    assert (finals[0] - finals[1]).abs().max() > 1e-2


def test_each_prompt_is_generated_with_its_own_references(tokens):
    engine = RolloutEngine(load(NAME))
    prompts = ["make it blue", "put the second one on the first one"]
    images = [[B], [A, B]]
    inputs = [{"image": image} for image in images]
    how = {"seed": 3, "decode": False, **SIZE}
    with Calls(engine.pipe.text_encoder) as encoded:
        batches = list(engine.generate(prompts, 2, DEBUG, inputs=inputs, **how))
    assert len(encoded) == 2
    assert [(b.group_ids.item(), b.sample_ids.item()) for b in batches] == [
        (0, 0), (1, 0), (0, 1), (1, 1),
    ]  # fmt: skip
    for batch in batches:
        group = batch.group_ids.item()
        expected = torch.cat([tokens[id(i)] for i in images[group]], dim=1)
        torch.testing.assert_close(shown(batch.trajectory), expected)
        assert_replays(engine, batch.trajectory)
    for group in (0, 1):
        (alone,) = engine.generate(
            [prompts[group]], 1, DEBUG, inputs=[inputs[group]], prompt_ids=[group], **how
        )
        assert torch.equal(alone.latents["image"], batches[group].latents["image"])


def test_a_negative_prompt_sees_the_references_too():
    engine = RolloutEngine(load(NAME))
    one, two = engine.encode([" ", " "], inputs=[{"image": [A]}, {"image": [A, B]}])
    assert len(two["embeds"]) > len(one["embeds"]) + 100
    assert two["image"] == [A, B]


@pytest.mark.parametrize(
    ("image", "kwargs", "message"),
    [
        (None, {}, "edits reference images, .* got image of NoneType; set image="),
        ([], {}, "got image of nothing"),
        ([A, np.zeros((64, 64, 3))], {}, "got image of Image, ndarray"),
        ([A], {"prompt": ["a", "b"]}, "one sample a call; got 2 prompts"),
        ([A], {"num_images_per_prompt": 2}, "one seed a row; got num_images_per_prompt 2"),
        ([A], {"height": 192}, "height must be divisible by 128, .* got 192"),
    ],
)
def test_bad_requests_are_refused_before_a_model_runs(image, kwargs, message):
    pipe = load(NAME)
    with (
        Calls(pipe.transformer, pipe.text_encoder) as calls,
        pytest.raises(RolloutParamsError, match=message),
        rollout(pipe, ODE, [11]),
    ):
        call(pipe, image, **kwargs)
    assert len(calls) == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, r"got image of NoneType; set image=, or inputs=\[\{\"image\": \[\.\.\.\]\}\]"),
        ({"inputs": [{"picture": A}]}, "no such input; got 'picture'; choose among image"),
        ({"inputs": [{"image": [A]}] * 2}, "one entry of inputs a prompt; got 2 for 1 prompts"),
        ({"inputs": [{"image": [A]}], "chunk_size": 2}, "one sample a call; got chunk_size 2"),
        ({"inputs": [{"image": [A]}], "max_sequence_length": 8}, "never cut; got 8"),
    ],
)
def test_bad_requests_of_the_engine_are_refused(kwargs, message):
    engine = RolloutEngine(load(NAME))
    with pytest.raises(RolloutParamsError, match=message):
        next(engine.generate(["a"], 1, ODE, seed=0, **SIZE, **kwargs))


def test_a_length_that_nothing_is_cut_to_warns():
    with pytest.warns(UserWarning, match="max_sequence_length has no effect, .* got 64"):
        roll(load(NAME), [A], max_sequence_length=64)


def test_the_last_reference_gives_the_size_and_decoding_is_told():
    pipe = load(NAME)
    trajectory = roll(pipe, [B, A], height=None, width=None)
    # 1024 x 1024 pixels in the shape of A are 1248 x 832, and a token is 128 x 128.
    assert (trajectory.request["width"], trajectory.request["height"]) == (1152, 768)
    assert trajectory.streams["image"].latents.shape[2] == REFERENCE_TOKENS[A.size]


def test_the_marks_of_a_subclass_reach_record_and_replay():
    pipe = marked(load(NAME))
    stock = call(pipe, [A])
    with rollout(pipe, ODE, [11]):
        assert torch.equal(call(pipe, [A]), stock)
    trajectory = roll(pipe, [A])
    assert_marks(trajectory)
    assert_replays(RolloutEngine(pipe), trajectory)
