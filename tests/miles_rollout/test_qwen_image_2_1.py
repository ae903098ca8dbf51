"""What is particular to Qwen-Image-2.1: its cache, its reference images, its own schedule."""

import pytest
import torch

from miles_rollout import RolloutEngine, RolloutParams, RolloutParamsError, rollout
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

NAME = "tiny-qwen-image-2-1"
SIZE = {"height": 64, "width": 64, "num_inference_steps": 4}


def call(pipe, **kwargs):
    how = {"use_kv_cache": False, "output_type": "latent", "generator": generators(), **SIZE}
    return pipe(PROMPTS, **how | kwargs).images


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"use_kv_cache": True}, "cache that the first one fills, .* set use_kv_cache=False"),
        ({"height": 48}, "height must be divisible by 32, .* got 48"),
        ({"output_resolution": 40}, "output_resolution must be divisible by 32, .* got 40"),
        ({"num_images_per_prompt": 2}, "one seed a row; got num_images_per_prompt 2"),
    ],
)
@pytest.mark.parametrize("params", [ODE, DEBUG], ids=["ode", "sde"])
def test_what_replay_would_get_wrong_is_refused_before_the_denoiser_runs(params, kwargs, message):
    pipe = load(NAME)
    with (
        Calls(pipe.transformer, pipe.text_encoder) as calls,
        pytest.raises(RolloutParamsError, match=message),
        rollout(pipe, params, SEEDS),
    ):
        call(pipe, **kwargs)
    assert len(calls) == 0


def test_the_cache_is_refused_where_it_is_not_spelled_out_either():
    pipe = load(NAME)
    message = "use_kv_cache True, the pipeline's default"
    with pytest.raises(RolloutParamsError, match=message), rollout(pipe, ODE, SEEDS):
        pipe(PROMPTS, generator=generators(), **SIZE)


def test_a_denoiser_that_never_uses_the_cache_needs_no_argument():
    load(NAME)  # a skip where diffusers is too old
    pipe = load_pipeline(NAME)
    pipe.transformer.register_to_config(causal_condition=False)
    with rollout(pipe, DEBUG, SEEDS) as session:
        call(pipe, use_kv_cache=True)
    assert_replays(RolloutEngine(pipe), session.trajectory)


def test_cached_and_uncached_calls_are_one_model():
    """Why leaving the cache out changes nothing but rounding."""
    pipe = load(NAME)
    gap = (call(pipe, use_kv_cache=True) - call(pipe)).abs().max()
    assert gap < 1e-5


def test_reference_images_are_kept_in_order_and_never_scored():
    pipe = load(NAME)
    engine = RolloutEngine(pipe)
    wide, tall = picture(96, 32, 1), picture(32, 96, 2)
    how = {"output_resolution": 64, "true_cfg_scale": 3.0, "negative_prompt": ["blurry", "dot"]}
    finals = []
    for image in ([wide, tall], [tall, wide]):
        before = call(pipe, image=image, **how)
        with rollout(pipe, ODE, SEEDS):
            assert torch.equal(call(pipe, image=image, **how), before)
        with rollout(pipe, DEBUG, SEEDS) as session:
            call(pipe, image=image, **how)
        trajectory = session.trajectory
        assert_replays(engine, trajectory)
        call_0 = trajectory.conditions[0].steps[0][0]
        # Behind 2 x 6 and 6 x 2 tokens of the references, the generated ones: 4 x 4.
        assert call_0.kwargs["hidden_states"].shape == (2, 12 + 12 + 16, 4)
        shapes = [(1, i.height // 16, i.width // 16) for i in image]
        assert [tuple(shape) for shape in call_0.kwargs["img_shapes"][0]] == [*shapes, (1, 4, 4)]
        assert trajectory.streams["image"].num_elements.tolist() == [16 * 4] * 2
        finals.append(before)
    assert (finals[0] - finals[1]).abs().max() > 1e-2


def test_the_size_of_a_reference_is_the_default_and_decoding_knows_it():
    pipe = load(NAME)
    how = {"height": None, "width": None, "output_resolution": 64, "image": picture(96, 48, 3)}
    with rollout(pipe, ODE, SEEDS) as session:
        latents = call(pipe, **how)
    request = session.trajectory.request
    assert (request["height"], request["width"]) == (32, 96)
    media = RolloutEngine(pipe).decode({"image": latents}, **request)
    assert media[0].image.shape == (4, 32, 96)
    assert media[0].rgb.shape == (3, 32, 96)
    expected = call(pipe, output_type="pt", **how)
    assert torch.equal(torch.stack([m.image for m in media]), expected)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"inputs": [{"image": 1}] * 2}, "no such input; got 'image'; leave inputs out"),
        ({"max_sequence_length": 8}, "prompts are never cut; got 8"),
        ({"use_kv_cache": False}, "no such sampling argument; got use_kv_cache"),
    ],
)
def test_what_the_engine_cannot_pass_on_is_refused(kwargs, message):
    engine = RolloutEngine(load(NAME))
    with pytest.raises(RolloutParamsError, match=message):
        next(engine.generate(PROMPTS, 1, ODE, seed=0, **SIZE, **kwargs))


def test_alone_in_its_call_a_sample_is_the_same_in_any_company():
    engine = RolloutEngine(load(NAME))

    def finals(prompts, chunk_size):
        batches = engine.generate(
            prompts, 1, ODE, seed=0, chunk_size=chunk_size, decode=False, **SIZE
        )
        return torch.cat([b.latents["image"] for b in batches])

    alone, together = finals(PROMPTS[:1], 1)[0], finals(PROMPTS, 2)[0]
    assert torch.equal(finals(PROMPTS, 1)[0], alone)
    # The stock pipeline's doing: the longer prompt moves the picture of the shorter one.
    assert (together - alone).abs().max() > 1e-3


def test_a_number_of_steps_beside_the_pipelines_own_sigmas_warns():
    load(NAME)  # a skip where diffusers is too old
    pipe = load_pipeline(NAME)
    pipe.register_to_config(sample_sigmas=[1.0, 0.6, 0.3])
    with (
        pytest.warns(UserWarning, match="num_inference_steps has no effect .* got 4 for 3"),
        rollout(pipe, RolloutParams(), SEEDS) as session,
    ):
        call(pipe)
    assert session.trajectory.num_steps == 3
    for quiet in ({"num_inference_steps": 3}, {"sigmas": [1.0, 0.5]}):
        with rollout(pipe, RolloutParams(), SEEDS):
            call(pipe, **quiet)


def test_the_marks_of_a_subclass_reach_record_and_replay():
    pipe = marked(load(NAME))
    stock = call(pipe)
    with rollout(pipe, ODE, SEEDS):
        assert torch.equal(call(pipe), stock)
    with rollout(pipe, DEBUG, SEEDS) as session:
        call(pipe)
    assert_marks(session.trajectory)
    assert_replays(RolloutEngine(pipe), session.trajectory)
