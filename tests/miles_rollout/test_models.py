"""Every model family keeps the same promises; a new one is a row of `MODELS`."""

import functools
from dataclasses import dataclass, field, replace

import pytest
import torch

from miles_rollout import (
    RolloutEngine,
    RolloutParams,
    RolloutParamsError,
    RolloutTrajectory,
    rollout,
)
from miles_rollout.loading import load_pipeline
from tests.miles_rollout.tiny import DEBUG, ODE, PROMPTS, SEEDS, Calls, assert_replays, generators

STEPS = 4
SIZE = {"height": 32, "width": 32, "num_inference_steps": STEPS, "max_sequence_length": 48}
NEGATIVE = ["blurry", "a green dot"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """What differs between families: the calls of a step, and the rows of each."""

    scale: str
    guided_rows: list[int]
    plain: dict[str, float] = field(default_factory=dict)


MODELS = {
    "tiny-qwen-image": Model(scale="true_cfg_scale", guided_rows=[2, 2]),
    "tiny-sd3": Model(scale="guidance_scale", guided_rows=[4], plain={"guidance_scale": 1.0}),
    "tiny-flux": Model(scale="true_cfg_scale", guided_rows=[2, 2]),
}
load = functools.cache(load_pipeline)


@pytest.fixture(name="model", params=MODELS)
def _model(request):
    return request.param


@pytest.fixture(name="dtype", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def _dtype(request):
    return request.param


@pytest.fixture(name="cfg", params=[False, True], ids=["plain", "cfg"])
def _cfg(request):
    return request.param


def arguments(model, cfg):
    """Of the pipeline: the family's own argument names."""
    if not cfg:
        return {**SIZE, **MODELS[model].plain}
    return {**SIZE, "negative_prompt": NEGATIVE, MODELS[model].scale: 3.0}


def call(pipe, model, cfg, output_type="latent"):
    how = arguments(model, cfg)
    return pipe(PROMPTS, **how, generator=generators(), output_type=output_type).images


def roll(pipe, model, cfg, params=DEBUG, seeds=SEEDS, output_type="latent"):
    with rollout(pipe, params, seeds) as session:
        output = call(pipe, model, cfg, output_type)
    return session.trajectory, output


@pytest.mark.parametrize("output_type", ["latent", "pt"])
def test_without_stochastic_steps_a_rollout_is_the_stock_call_bitwise(
    model, dtype, cfg, output_type
):
    pipe = load(model, dtype)
    scheduler = pipe.scheduler
    before = call(pipe, model, cfg, output_type)
    trajectory, inside = roll(pipe, model, cfg, ODE, output_type=output_type)
    roll(pipe, model, cfg)
    assert torch.equal(inside, before)
    assert torch.equal(call(pipe, model, cfg, output_type), before)
    assert pipe.scheduler is scheduler
    assert not trajectory.log_probs.any()


def test_calls_steps_and_columns_agree(model, cfg):
    pipe = load(model)
    with Calls(pipe.transformer) as calls:
        trajectory, _ = roll(pipe, model, cfg)
    rows = MODELS[model].guided_rows if cfg else [2]
    assert calls.rows == rows * STEPS
    stream = trajectory.streams["image"]
    assert len(stream.sigmas) - 1 == trajectory.log_probs.shape[1] == STEPS
    assert stream.latents.shape[1] == STEPS + 1
    steps = trajectory.conditions[0].steps
    assert {step: len(made) for step, made in steps.items()} == dict.fromkeys(
        range(STEPS), len(rows)
    )


def test_samples_follow_their_seeds(model):
    pipe = load(model)
    first, latents = roll(pipe, model, True)
    again, same = roll(pipe, model, True)
    other, _ = roll(pipe, model, True, seeds=[11, 13])
    assert torch.equal(latents, same)
    assert torch.equal(first.log_probs, again.log_probs)
    torch.testing.assert_close(first.log_probs[0], other.log_probs[0], atol=1e-5, rtol=0)
    assert not torch.equal(first.log_probs[1], other.log_probs[1])


def test_a_group_differs_and_starts_from_one_noise_if_asked(model):
    engine = RolloutEngine(load(model))
    (batch,) = engine.generate(
        PROMPTS[:1], 3, DEBUG, seed=0, chunk_size=3, same_noise=True, decode=False, **SIZE
    )
    latents = batch.trajectory.streams["image"].latents
    for i in range(3):
        for j in range(i):
            assert torch.equal(latents[i, 0], latents[j, 0])
            assert not torch.equal(latents[i, -1], latents[j, -1])


@pytest.mark.parametrize("sde_type", ["sde", "cps"])
def test_replay_is_the_rollout_bitwise_with_gradient(model, dtype, cfg, sde_type):
    pipe = load(model, dtype)
    engine = RolloutEngine(pipe)
    trajectory, _ = roll(pipe, model, cfg, RolloutParams(sde_type=sde_type, debug=True))
    assert_replays(engine, trajectory)
    weight = next(p for p in pipe.transformer.parameters() if p.dim() == 2)
    (gradient,) = torch.autograd.grad(engine.replay(trajectory, 1).log_prob.sum(), weight)
    assert gradient.abs().sum() > 0


def test_each_row_replays_alone(model, cfg):
    pipe = load(model)
    engine = RolloutEngine(pipe)
    trajectory, _ = roll(pipe, model, cfg)
    for samples in ([0], [1], [1, 0]):
        for step in range(STEPS):
            replay = engine.replay(trajectory, step, samples)
            held = trajectory.streams["image"].debug["velocity"][samples, step]
            velocity = replay.streams["image"].velocity
            torch.testing.assert_close(velocity, held, atol=1e-4, rtol=0)
            torch.testing.assert_close(
                replay.log_prob, trajectory.log_probs[samples, step], atol=1e-5, rtol=0
            )


def test_a_row_replayed_with_another_rows_call_is_seen(model, cfg):
    """What the test above rests on: cut at the wrong place, the velocity is off by far more."""
    pipe = load(model)
    engine = RolloutEngine(pipe)
    trajectory, _ = roll(pipe, model, cfg)
    swapped = replace(trajectory, conditions=(trajectory.conditions[0].select([1, 0]),))
    for step in range(STEPS):
        velocity = engine.replay(swapped, step).streams["image"].velocity
        held = trajectory.streams["image"].debug["velocity"][:, step]
        assert ((velocity - held).flatten(1).abs().amax(1) > 1e-3).all()


def test_a_subset_has_the_right_pairs(model):
    pipe = load(model)
    params = RolloutParams(sde_step_indices=[1, 3], return_step_indices=[1, 2, 3, 4])
    trajectory, output = roll(pipe, model, True, params)
    full, _ = roll(pipe, model, True, RolloutParams(sde_step_indices=[1, 3]))
    assert trajectory.streams["image"].latent_step_indices.tolist() == [1, 2, 3, 4]
    assert len(trajectory.streams["image"].sigmas) == STEPS + 1
    for step in (1, 3):
        for ours, theirs in zip(
            trajectory.pair("image", step), full.pair("image", step), strict=True
        ):
            assert torch.equal(ours, theirs)
    assert torch.equal(trajectory.pair("image", 3)[1], output)
    assert trajectory.replayable_steps == (1, 3)
    assert_replays(RolloutEngine(pipe), trajectory)
    for step in (0, 2):
        with pytest.raises(RolloutParamsError, match=f"step {step} .* was not stochastic"):
            trajectory.pair("image", step)


def test_the_disk_changes_nothing(model, dtype, tmp_path):
    pipe = load(model, dtype)
    trajectory, _ = roll(pipe, model, True)
    trajectory.save(tmp_path)
    loaded = RolloutTrajectory.load(tmp_path)
    assert loaded.guidance == trajectory.guidance
    engine = RolloutEngine(pipe)
    assert_replays(engine, loaded)
    ours, theirs = (engine.replay(t, 1, [1]).log_prob for t in (loaded, trajectory))
    assert torch.equal(ours, theirs)


def test_decoding_is_the_pipelines_own_bitwise(model, dtype, cfg):
    pipe = load(model, dtype)
    latents = call(pipe, model, cfg)
    media = RolloutEngine(pipe).decode({"image": latents}, height=32, width=32)
    images = call(pipe, model, cfg, "pt")
    assert torch.equal(torch.stack([m.image for m in media]), images.float())


def test_the_engine_is_the_stock_call_with_the_same_embeddings(model, dtype, cfg):
    pipe = load(model, dtype)
    engine = RolloutEngine(pipe)
    how = {**SIZE, **({MODELS[model].scale: 3.0} if cfg else {})}
    negative = NEGATIVE if cfg else None
    (batch,) = engine.generate(
        PROMPTS, 1, ODE, seed=5, negative_prompt=negative, decode=False, **how
    )
    encoded = engine.encode(PROMPTS, max_sequence_length=48)
    negatives = engine.encode(NEGATIVE, max_sequence_length=48) if cfg else None
    trajectory = batch.trajectory
    noise = trajectory.streams["image"].latents[:, 0].clone()
    collated = engine.adapter.collate(encoded, negatives)
    stock = pipe(**collated | how, latents=noise, output_type="latent").images
    assert torch.equal(batch.latents["image"], stock)
    # Close to what the pipeline makes of the text itself: nothing is cut, shifted or left out.
    text = pipe(PROMPTS, **arguments(model, cfg), latents=noise, output_type="latent").images
    tolerance = 1e-3 if dtype == torch.float32 else 0.3
    torch.testing.assert_close(stock, text, atol=tolerance, rtol=0)


def test_joined_chunks_replay(model):
    engine = RolloutEngine(load(model))
    chunks = list(
        engine.generate(
            [*PROMPTS, "c"], 1, DEBUG, seed=0, chunk_size=2, decode=False, negative_prompt=" ",
            **{MODELS[model].scale: 3.0}, **SIZE,
        )
    )  # fmt: skip
    joined = RolloutTrajectory.cat([c.trajectory for c in chunks])
    assert joined.num_samples == 3
    assert_replays(engine, joined)


def test_wrong_seeds_and_expanded_prompts_are_refused(model, cfg):
    pipe = load(model)
    with Calls(pipe.transformer.norm_out) as calls:
        for seeds in ([1], [1, 2, 3], [1, 2, 3, 4]):
            with pytest.raises(RolloutParamsError, match=f"got {len(seeds)} seeds for 2 rows"):
                roll(pipe, model, cfg, seeds=seeds)
        with (
            pytest.raises(RolloutParamsError, match="num_images_per_prompt"),
            rollout(pipe, ODE, SEEDS),
        ):
            pipe(PROMPTS[0], generator=generators(), num_images_per_prompt=2, **SIZE)
        assert len(calls) == 0
