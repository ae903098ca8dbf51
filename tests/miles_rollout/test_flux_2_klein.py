"""What is particular to FLUX.2-klein: its batch norm, its empty negative prompt, its references."""

import diffusers
import pytest
import torch

from miles_rollout import RolloutEngine, RolloutParamsError, rollout
from miles_rollout.loading import load_pipeline
from tests.miles_rollout.models import load, picture
from tests.miles_rollout.tiny import (
    DEBUG,
    ODE,
    PROMPTS,
    SEEDS,
    Calls,
    assert_marks,
    assert_replays,
    generators,
    marked,
)

NAME = "tiny-flux-2-klein"
SIZE = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 48}
TOKENS = 16
A, B = picture(96, 64, seed=1), picture(64, 64, seed=2)


def call(pipe, **kwargs):
    how = {"output_type": "latent", "generator": generators(), "guidance_scale": 3.0, **SIZE}
    return pipe(prompt=PROMPTS, **how | kwargs).images


def roll(pipe, **kwargs):
    with rollout(pipe, DEBUG, SEEDS) as session:
        call(pipe, **kwargs)
    return session.trajectory


def generate(engine, prompts=PROMPTS, params=DEBUG, **kwargs):
    return list(
        engine.generate(prompts, 1, params, **{"seed": 0, "decode": False, **SIZE, **kwargs})
    )


def test_final_latents_are_the_final_state_with_the_batch_norm_undone():
    pipe = load(NAME)
    (batch,) = generate(RolloutEngine(pipe))
    state = batch.trajectory.streams["image"].latents[:, -1]
    grid = state.view(2, 4, 4, 16).permute(0, 3, 1, 2)
    norm = pipe.vae.bn
    std = (norm.running_var + pipe.vae.config.batch_norm_eps).sqrt()
    undone = grid * std.view(1, -1, 1, 1) + norm.running_mean.view(1, -1, 1, 1)
    expected = torch.nn.functional.pixel_shuffle(undone, 2)
    torch.testing.assert_close(batch.latents["image"], expected)
    assert (expected - torch.nn.functional.pixel_shuffle(grid, 2)).abs().max() > 0.1


def test_a_scale_above_1_guides_by_an_empty_prompt_or_by_the_one_given():
    engine = RolloutEngine(load(NAME))
    (plain,) = generate(engine)
    assert plain.trajectory.guidance == {"do_true_cfg": False, "guidance_scale": 1.0}
    (implied,) = generate(engine, guidance_scale=3.0)
    (spelled,) = generate(engine, guidance_scale=3.0, negative_prompt="")
    (other,) = generate(engine, guidance_scale=3.0, negative_prompt="a green dot")
    assert implied.trajectory.guidance == {"do_true_cfg": True, "guidance_scale": 3.0}
    assert torch.equal(implied.latents["image"], spelled.latents["image"])
    assert (implied.latents["image"] - other.latents["image"]).abs().max() > 1e-2
    # As in a call of the pipeline, at its own scale.
    (default,) = generate(engine, negative_prompt="")
    assert default.trajectory.guidance["guidance_scale"] == 4.0
    assert roll(load(NAME), guidance_scale=4.0).guidance == default.trajectory.guidance


def test_distilled_weights_are_never_guided():
    load(NAME)  # a skip where diffusers is too old
    pipe = load_pipeline(NAME)
    pipe.register_to_config(is_distilled=True)
    with Calls(pipe.transformer) as calls:
        trajectory = roll(pipe, guidance_scale=4.0)
    assert calls.rows == [2, 2]
    assert trajectory.guidance == {"do_true_cfg": False, "guidance_scale": 1.0}
    assert_replays(RolloutEngine(pipe), trajectory)
    with pytest.warns(UserWarning, match=r"no effect on a distilled model; got 3\.0"):
        roll(pipe)


def shown(trajectory):
    """The tokens of the references, as the denoiser was shown them in each call."""
    calls = [made for step in trajectory.conditions[0].steps.values() for made in step]
    held = [made.kwargs["hidden_states"][:, TOKENS:] for made in calls]
    assert all(torch.equal(held[0], other) for other in held)
    return held[0]


def test_references_keep_their_order_and_are_never_scored():
    pipe = load(NAME)
    engine = RolloutEngine(pipe)
    alone = {id(i): shown(roll(pipe, image=[i])) for i in (A, B)}
    finals = []
    for image in ([A, B], [B, A]):
        before = call(pipe, image=image)
        with rollout(pipe, ODE, SEEDS):
            assert torch.equal(call(pipe, image=image), before)
        trajectory = roll(pipe, image=image)
        expected = torch.cat([alone[id(i)] for i in image], dim=1)
        assert expected.shape[1] == 12 * 8 + 8 * 8
        torch.testing.assert_close(shown(trajectory), expected)
        assert trajectory.streams["image"].num_elements.tolist() == [TOKENS * 16] * 2
        assert_replays(engine, trajectory)
        finals.append(before)
    assert (finals[0] - finals[1]).abs().max() > 1e-2


def test_each_prompt_is_generated_with_its_own_references():
    pipe = load(NAME)
    engine = RolloutEngine(pipe)
    alone = {id(i): shown(roll(pipe, image=[i]))[:1] for i in (A, B)}
    images = [[B], [A, B]]
    inputs = [{"image": image} for image in images]
    for batch in generate(engine, inputs=inputs, chunk_size=1, guidance_scale=3.0):
        expected = torch.cat([alone[id(i)] for i in images[batch.group_ids.item()]], dim=1)
        torch.testing.assert_close(shown(batch.trajectory), expected)
        assert_replays(engine, batch.trajectory)
    # One set of references for all rows of a call, and a single image without a list.
    (together,) = generate(engine, inputs=[{"image": B}] * 2)
    torch.testing.assert_close(shown(together.trajectory), torch.cat([alone[id(B)]] * 2))
    with Calls(pipe.transformer) as calls:
        for given in (inputs, [{"image": B}, {}]):
            message = "rows of a call share their reference images; got 2 .* set chunk_size=1"
            with pytest.raises(RolloutParamsError, match=message):
                generate(engine, inputs=given)
        assert len(calls) == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"height": 36}, "height must be divisible by 8, .* got 36"),
        ({"num_images_per_prompt": 2}, "one seed a row; got num_images_per_prompt 2"),
    ],
)
def test_bad_requests_are_refused_before_a_model_runs(kwargs, message):
    pipe = load(NAME)
    with (
        Calls(pipe.transformer, pipe.text_encoder) as calls,
        pytest.raises(RolloutParamsError, match=message),
        rollout(pipe, ODE, SEEDS),
    ):
        call(pipe, **kwargs)
    assert len(calls) == 0


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (picture(96, 32, seed=3), "does not fit: Image too small: .* got <PIL.Image.Image"),
        (torch.zeros(3, 64, 64), "does not fit: Image must be a PIL.Image.Image, got"),
    ],
)
def test_references_that_do_not_fit_are_refused_before_a_model_runs(image, message):
    engine = RolloutEngine(load(NAME))
    with Calls(engine.pipe.transformer, engine.pipe.text_encoder) as calls:
        with pytest.raises(RolloutParamsError, match=message):
            generate(engine, inputs=[{"image": [A]}, {"image": [A, image]}], chunk_size=1)
        assert len(calls) == 0


def test_the_form_with_a_cache_is_refused_by_name():
    load(NAME)  # a skip where diffusers is too old
    pipe = diffusers.Flux2KleinKVPipeline(**load_pipeline(NAME).components)
    message = (
        "pipeline: .* a cache of the references .* got Flux2KleinKVPipeline; set another pipeline"
    )
    with Calls(pipe.transformer, pipe.text_encoder) as calls:
        with pytest.raises(RolloutParamsError, match=message), rollout(pipe, ODE, SEEDS):
            pipe(prompt=PROMPTS, generator=generators(), **SIZE)
        with pytest.raises(RolloutParamsError, match=message):
            RolloutEngine(pipe)
        assert len(calls) == 0


def test_the_marks_of_a_subclass_reach_record_and_replay():
    pipe = marked(load(NAME))
    stock = call(pipe)
    with rollout(pipe, ODE, SEEDS):
        assert torch.equal(call(pipe), stock)
    trajectory = roll(pipe)
    assert_marks(trajectory)
    assert_replays(RolloutEngine(pipe), trajectory)
