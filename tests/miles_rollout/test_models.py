"""Every model family keeps the same promises; a new one is a row of `models.MODELS`."""

from dataclasses import replace

import pytest
import torch

from miles_rollout import (
    RolloutEngine,
    RolloutParams,
    RolloutParamsError,
    RolloutTrajectory,
)
from miles_rollout.sample_request import SampleRequest
from tests.miles_rollout.models import CASES, MODELS, load, small_references
from tests.miles_rollout.tiny import DEBUG, ODE, Calls, assert_replays

BATCHED = [case for case in CASES if MODELS[case.values[0][0]].num_prompts > 1]


@pytest.fixture(autouse=True)
def _small_references(monkeypatch):
    small_references(monkeypatch)


@pytest.fixture(name="case", params=CASES)
def _case(request):
    """A family's name, its row, and whether guidance is on."""
    name, cfg = request.param
    return name, MODELS[name], cfg


@pytest.fixture(name="batched", params=BATCHED)
def _batched(request):
    """As `case`, where a call holds several samples."""
    name, cfg = request.param
    return name, MODELS[name], cfg


@pytest.fixture(name="dtype", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def _dtype(request):
    return request.param


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def engine_call(engine, model, cfg, group_size=1, params=DEBUG, **kwargs):
    inputs = [model.inputs()] * model.num_prompts if model.inputs else None
    return list(
        engine.generate(
            model.prompts, group_size, params, seed=5, inputs=inputs,
            **{"decode": False, **model.engine_arguments(cfg), **kwargs},
        )
    )  # fmt: skip


@pytest.mark.parametrize("output_type", ["latent", "pt"])
def test_without_stochastic_steps_a_rollout_is_the_stock_call_bitwise(case, dtype, output_type):
    name, model, cfg = case
    pipe = load(name, dtype)
    schedulers = {k: v for k, v in pipe.components.items() if "scheduler" in k}
    before = model.stock(pipe, cfg, output_type)
    trajectory, inside = model.roll(pipe, cfg, ODE, output_type=output_type)
    model.roll(pipe, cfg)
    assert_equal(inside, before)
    assert_equal(model.stock(pipe, cfg, output_type), before)
    for component, scheduler in schedulers.items():
        assert getattr(pipe, component) is scheduler
    assert tuple(trajectory.streams) == model.streams
    assert not trajectory.log_probs.any()


@pytest.mark.parametrize("name", MODELS)
def test_the_denoiser_sees_the_state_where_the_adapter_says_so(name):
    """Without guidance; then calling it again on that state gives the rollout's velocity bitwise."""
    model, cfg, pipe = MODELS[name], False, load(name)
    params = RolloutParams(sde_type="ode", call_step_indices=[1], debug=True)
    trajectory, _ = model.roll(pipe, cfg, params)
    engine = RolloutEngine(pipe)
    states = {stream: held.latent(1) for stream, held in trajectory.streams.items()}
    if not engine.adapter.sees_state:
        with pytest.raises(RolloutParamsError, match="not called with the state itself"):
            engine.velocities(trajectory, 1, states)
        return
    with torch.no_grad():
        velocities = engine.velocities(trajectory, 1, states)
    for stream, held in trajectory.streams.items():
        expected = held.debug["velocity"][:, 1] * held.velocity_sign
        assert torch.equal(velocities[stream].float(), expected), stream


def test_calls_steps_and_columns_agree(case):
    name, model, cfg = case
    pipe = load(name)
    with Calls(*denoisers(pipe), rows_of=model.rows_of) as calls:
        trajectory, _ = model.roll(pipe, cfg)
    rows = model.guided_rows if cfg else model.plain_rows
    assert calls.rows == list(rows) * model.evaluations
    assert trajectory.log_probs.shape[1] == model.evaluations
    for stream in trajectory.streams.values():
        assert len(stream.sigmas) - 1 == model.evaluations
        assert stream.latents.shape[1] == model.evaluations + 1
    steps = trajectory.conditions[0].steps
    assert {step: len(made) for step, made in steps.items()} == dict.fromkeys(
        range(model.evaluations), len(rows)
    )


def denoisers(pipe):
    """The modules that denoise."""
    names = RolloutEngine(pipe).adapter.denoisers
    return [module for n in names if (module := getattr(pipe, n, None)) is not None]


def test_samples_follow_their_seeds(case):
    name, model, cfg = case
    pipe = load(name)
    first, latents = model.roll(pipe, cfg)
    again, same = model.roll(pipe, cfg)
    other, _ = model.roll(pipe, cfg, seeds=[*model.seeds[:-1], 13])
    assert_equal(latents, same)
    assert torch.equal(first.log_probs, again.log_probs)
    if model.num_prompts > 1:
        torch.testing.assert_close(first.log_probs[0], other.log_probs[0], atol=1e-5, rtol=0)
    assert not torch.equal(first.log_probs[-1], other.log_probs[-1])


def test_a_group_differs_and_starts_from_one_noise_if_asked(case):
    name, model, cfg = case
    engine = RolloutEngine(load(name))
    batches = engine_call(engine, model, cfg, group_size=3, same_noise=True)
    for stream in model.streams:
        latents = torch.cat([b.trajectory.streams[stream].latents[:1] for b in batches])
        for i in range(3):
            for j in range(i):
                assert torch.equal(latents[i, 0], latents[j, 0])
                assert not torch.equal(latents[i, -1], latents[j, -1])


@pytest.mark.parametrize("sde_type", ["sde", "cps"])
def test_replay_is_the_rollout_bitwise_with_gradient(case, dtype, sde_type):
    name, model, cfg = case
    pipe = load(name, dtype)
    engine = RolloutEngine(pipe)
    trajectory, _ = model.roll(pipe, cfg, RolloutParams(sde_type=sde_type, debug=True))
    assert_replays(engine, trajectory)
    called = {call.module for call in trajectory.conditions[0].steps[1]}
    weights = [p for n in called for p in getattr(pipe, n).parameters() if p.dim() == 2]
    gradients = torch.autograd.grad(
        engine.replay(trajectory, 1).log_prob.sum(), weights, allow_unused=True
    )
    assert sum(g.abs().sum() for g in gradients if g is not None) > 0


def test_each_row_replays_alone(batched):
    name, model, cfg = batched
    engine = RolloutEngine(load(name))
    trajectory, _ = model.roll(engine.pipe, cfg)
    for samples in ([0], [1], [1, 0]):
        for step in trajectory.replayable_steps:
            replay = engine.replay(trajectory, step, samples)
            for stream, now in replay.streams.items():
                held = trajectory.streams[stream].debug["velocity"][samples, step]
                torch.testing.assert_close(now.velocity.float(), held, atol=1e-4, rtol=0)
            torch.testing.assert_close(
                replay.log_prob, trajectory.log_probs[samples, step], atol=1e-5, rtol=0
            )


def test_a_row_replayed_with_another_rows_call_is_seen(batched):
    """What the test above rests on: cut at the wrong place, the velocity is off by far more."""
    name, model, cfg = batched
    engine = RolloutEngine(load(name))
    trajectory, _ = model.roll(engine.pipe, cfg)
    swapped = replace(trajectory, conditions=(trajectory.conditions[0].select([1, 0]),))
    for step in trajectory.replayable_steps:
        for stream, now in engine.replay(swapped, step).streams.items():
            held = trajectory.streams[stream].debug["velocity"][:, step]
            assert ((now.velocity - held).flatten(1).abs().amax(1) > 1e-3).all()


def test_a_subset_has_the_right_pairs(case):
    name, model, cfg = case
    pipe = load(name)
    steps = (0, model.evaluations - 1)
    kept = sorted({*steps, *(step + 1 for step in steps)})
    params = RolloutParams(sde_step_indices=steps, return_step_indices=kept)
    trajectory, output = model.roll(pipe, cfg, params)
    full, _ = model.roll(pipe, cfg, RolloutParams(sde_step_indices=steps))
    for stream in model.streams:
        assert trajectory.streams[stream].latent_step_indices.tolist() == kept
        assert len(trajectory.streams[stream].sigmas) == model.evaluations + 1
        for step in steps:
            pairs = zip(trajectory.pair(stream, step), full.pair(stream, step), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        final = trajectory.pair(stream, steps[-1])[1]
        if final.shape == output[stream].shape:  # where the pipeline hands latents out as they are
            assert torch.equal(final, output[stream])
        assert trajectory.streams[stream].latents.nbytes * full.streams[stream].latents.shape[
            1
        ] == (full.streams[stream].latents.nbytes * len(kept))
        for step in range(1, model.evaluations - 1):
            with pytest.raises(RolloutParamsError, match=f"step {step} .* was not stochastic"):
                trajectory.pair(stream, step)
    assert trajectory.replayable_steps == steps
    assert_replays(RolloutEngine(pipe), trajectory)


def test_the_disk_changes_nothing(case, tmp_path):
    """In bfloat16, where float32 is on the disk as well."""
    name, model, cfg = case
    pipe = load(name, torch.bfloat16)
    trajectory, _ = model.roll(pipe, cfg)
    trajectory.save(tmp_path)
    loaded = RolloutTrajectory.load(tmp_path)
    assert loaded.guidance == trajectory.guidance
    engine = RolloutEngine(pipe)
    assert_replays(engine, loaded)
    last = [model.num_prompts - 1]
    ours, theirs = (engine.replay(t, 1, last).log_prob for t in (loaded, trajectory))
    assert torch.equal(ours, theirs)


def test_decoding_is_the_pipelines_own_bitwise(case, dtype):
    name, model, cfg = case
    pipe = load(name, dtype)
    engine = RolloutEngine(pipe)
    trajectory, latents = model.roll(pipe, cfg, ODE)
    media = engine.decode(latents, **trajectory.request)
    for stream, expected in model.stock(pipe, cfg, "pt").items():
        ours = torch.stack([getattr(m, stream) for m in media])
        assert torch.equal(ours, expected.float().reshape(ours.shape)), stream


def test_the_engine_is_the_stock_call_with_the_same_embeddings(case, dtype):
    name, model, cfg = case
    engine = RolloutEngine(load(name, dtype))
    (batch,) = engine_call(engine, model, cfg, params=ODE)
    how = model.engine_arguments(cfg)
    adapter = engine.adapter
    asks = how.get(adapter.scale_argument, adapter.scale_off) > adapter.scale_off
    implied = [adapter.implied_negative] * model.num_prompts
    negative = how.pop("negative_prompt", implied if asks and implied[0] is not None else None)
    inputs = [model.inputs()] * model.num_prompts if model.inputs else None

    def encode(prompts):
        return engine.encode(prompts, inputs=inputs, **how)

    collated = engine.adapter.collate(
        encode(model.prompts), None if negative is None else encode(negative)
    )
    request = SampleRequest(
        prompts=model.prompts,
        prompt_ids=tuple(range(model.num_prompts)),
        metadata=({},) * model.num_prompts,
        group_size=1, chunk_size=model.num_prompts, seed=5, iteration=0, same_noise=False,
    )  # fmt: skip
    (rows,) = request.chunks()
    part = engine.adapter.denoising_part(engine.pipe)
    output = engine.adapter.denoise(part, collated | how, request.generators(rows))
    stock = engine.adapter.latents(output)
    assert_equal(dict(batch.latents), dict(stock))
    # Close to what the pipeline makes of the text itself: nothing is cut, shifted or left out.
    text = model.stock(engine.pipe, cfg, generator=request.generators(rows))
    tolerance = model.text_tolerance if dtype == torch.float32 else 0.3
    for stream in model.streams:
        torch.testing.assert_close(
            stock[stream].float(), text[stream].float(), atol=tolerance, rtol=0
        )


def test_joined_chunks_replay(case):
    name, model, cfg = case
    engine = RolloutEngine(load(name))
    chunks = engine_call(engine, model, cfg, group_size=2, chunk_size=model.num_prompts)
    joined = RolloutTrajectory.cat([c.trajectory for c in chunks])
    assert joined.num_samples == 2 * model.num_prompts
    assert_replays(engine, joined)


@pytest.mark.parametrize("window", [1, 2])
def test_a_shared_prefix_changes_nothing_but_the_work(case, dtype, window):
    name, model, cfg = case
    engine = RolloutEngine(load(name, dtype))
    params = RolloutParams(sde_step_indices=[window], debug=True)
    group_size, prompts = 3, model.num_prompts
    runs, counts = [], []
    for share in (False, True):
        with Calls(*denoisers(engine.pipe)) as calls:
            runs.append(
                engine_call(
                    engine, model, cfg, group_size, params, same_noise=True, share_prefix=share
                )
            )
        counts.append(len(calls))
    for ours, theirs in zip(*runs, strict=True):
        assert_equal(dict(ours.latents), dict(theirs.latents))
        assert torch.equal(ours.trajectory.log_probs, theirs.trajectory.log_probs)
        assert_replays(engine, ours.trajectory)
    a_step = len(model.guided_rows if cfg else model.plain_rows)
    chunks = prompts // len(model.seeds) * group_size
    assert counts[0] == chunks * model.evaluations * a_step
    assert counts[1] == (window + chunks * (model.evaluations - window)) * a_step
    assert type(denoisers(engine.pipe)[0]).__call__ is torch.nn.Module.__call__


def test_wrong_seeds_are_refused(case):
    name, model, cfg = case
    pipe = load(name)
    with Calls(*denoisers(pipe)) as calls:
        for count in {1, 2, 3, 4} - {model.num_prompts}:
            message = f"got {count} seeds for {model.num_prompts} rows"
            with pytest.raises(RolloutParamsError, match=message):
                model.roll(pipe, cfg, seeds=range(count))
        assert len(calls) == 3  # in the hook of the first one


def test_expanded_prompts_are_refused(batched):
    name, model, cfg = batched
    pipe = load(name)
    with Calls(*denoisers(pipe)) as calls:
        for argument in ("num_images_per_prompt", "num_videos_per_prompt"):
            with pytest.raises((RolloutParamsError, TypeError), match=argument):
                model.roll(pipe, cfg, ODE, **{argument: 2})
        assert len(calls) == 0
