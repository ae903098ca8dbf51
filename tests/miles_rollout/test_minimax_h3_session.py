"""Two streams with a scheduler each, rows written in place, a modular pipeline."""

import copy

import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3LoopSchedulerStep

from miles_rollout import (
    RolloutEngine,
    RolloutParams,
    RolloutParamsError,
    RolloutStateError,
    rollout,
)
from miles_rollout.testing import tiny_minimax_h3
from tests.miles_rollout.tiny_h3 import NAMES, STREAMS, call, run

ODE = RolloutParams(sde_type="ode")


@pytest.fixture(scope="module")
def _pipes():
    return {dtype: tiny_minimax_h3(dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.fixture(name="pipe")
def _pipe(_pipes):
    yield from _unchanged(_pipes[torch.float32])


@pytest.fixture(name="any_pipe", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def _any_pipe(_pipes, request):
    yield from _unchanged(_pipes[request.param])


def _state(pipe):
    hooks = [len(pipe.transformer._forward_pre_hooks), len(pipe.transformer._forward_hooks)]
    return type(pipe), pipe.scheduler, pipe.audio_scheduler, dict(pipe.config), hooks


def _unchanged(pipe):
    before = _state(pipe)
    yield pipe
    assert _state(pipe) == before


def test_a_deterministic_rollout_is_the_stock_call_bitwise(any_pipe):
    stock = call(any_pipe)
    trajectory, rolled = run(any_pipe, ODE)
    for name in NAMES:
        assert torch.equal(stock[name], rolled[name]), name
        assert stock[name].dtype == rolled[name].dtype
    assert trajectory.num_steps == 3
    assert not trajectory.log_probs.any()
    again = call(any_pipe)
    assert all(torch.equal(stock[name], again[name]) for name in NAMES)


def test_the_stock_call_is_the_same_after_a_noisy_rollout(pipe):
    before = call(pipe, output=NAMES[:2])
    _, noisy = run(pipe, output=NAMES[:2])
    after = call(pipe, output=NAMES[:2])
    for name in NAMES[:2]:
        assert not torch.equal(before[name], noisy[name])
        assert torch.equal(before[name], after[name])


def test_each_stream_has_its_own_schedule_and_clock(pipe):
    trajectory, _ = run(pipe)
    assert tuple(trajectory.streams) == STREAMS
    for name, shift in zip(STREAMS, (12.0, 3.0), strict=True):
        scheduler = MiniMaxH3Scheduler(shift=shift)
        scheduler.set_timesteps(4)
        stream = trajectory.streams[name]
        assert torch.equal(stream.sigmas, scheduler.sigmas)
        assert torch.equal(stream.timesteps[:-1], scheduler.timesteps)
        assert stream.timesteps[-1] == 1
        assert stream.velocity_sign == -1
        assert stream.sde_step_indices == (0, 1, 2)
        assert stream.log_probs.all()
    assert trajectory.streams["video"].latents.shape == (1, 4, 37, 16)
    assert trajectory.streams["audio"].latents.shape == (1, 4, 414, 4)


def test_the_final_states_are_what_is_decoded(pipe):
    trajectory, output = run(pipe, output=NAMES[:2])
    audio = trajectory.streams["audio"].latent(3)[0]
    assert torch.equal(audio.reshape(2, 207, 4).permute(0, 2, 1), output["audio_latents"])
    video = trajectory.streams["video"].latent(3)
    assert video.flatten().sort()[0].equal(output["latents"].flatten().sort()[0])


def test_the_joint_log_prob_is_the_mean_over_all_elements(pipe):
    trajectory, _ = run(pipe)
    video, audio = (trajectory.streams[name] for name in STREAMS)
    counts = [stream.num_elements.item() for stream in (video, audio)]
    assert counts == [37 * 16, 414 * 4]
    expected = (video.log_probs * counts[0] + audio.log_probs * counts[1]) / sum(counts)
    assert torch.allclose(trajectory.log_probs, expected, rtol=1e-6)
    weighted, _ = run(pipe, RolloutParams(stream_weights={"video": 1.0, "audio": 0.5}))
    assert torch.equal(weighted.streams["video"].log_probs, video.log_probs)
    assert torch.allclose(weighted.log_probs, video.log_probs + 0.5 * audio.log_probs)


def test_a_stream_that_is_not_stochastic_takes_its_own_step_and_is_kept(pipe):
    params = RolloutParams(sde_streams=["video"], sde_step_indices=[1], debug=True)
    trajectory, _ = run(pipe, params)
    audio = trajectory.streams["audio"]
    assert audio.sde_step_indices == ()
    assert not audio.log_probs.any()
    assert audio.latent_step_indices.tolist() == [0, 1, 2, 3]
    for step in range(3):
        scheduler = MiniMaxH3Scheduler(shift=3.0)
        scheduler.set_timesteps(4)
        own = scheduler.step(
            audio.debug["velocity"][:, step], scheduler.timesteps[step], audio.latent(step)
        ).prev_sample
        assert torch.equal(own, audio.latent(step + 1))
    assert torch.equal(trajectory.log_probs[:, 1], trajectory.streams["video"].log_probs[:, 1])


def test_streams_draw_noise_of_their_own(pipe):
    both, _ = run(pipe, RolloutParams(debug=True))
    noise = [both.streams[name].debug["noise"][0, 0].flatten()[:500] for name in STREAMS]
    assert not torch.equal(*noise)
    other, _ = run(pipe, RolloutParams(debug=True), seeds=[12])
    again, _ = run(pipe, RolloutParams(debug=True))
    for name in STREAMS:
        assert torch.equal(both.streams[name].latents, again.streams[name].latents)
        assert not torch.equal(both.streams[name].latents, other.streams[name].latents)


def test_snapshots_own_their_storage_and_nothing_is_kept_twice(pipe):
    trajectory, _ = run(pipe)
    tensors = {}
    for stream in trajectory.streams.values():
        tensors[id(stream.latents)] = stream.latents
    for step, (call_,) in trajectory.conditions[0].steps.items():
        assert call_.kwargs["hidden_states"].stream == "video", step
        assert call_.kwargs["audio_hidden_states"].stream == "audio"
        for value in call_.kwargs.values():
            if isinstance(value, torch.Tensor):
                tensors[id(value)] = value
    storages = {t.untyped_storage().data_ptr() for t in tensors.values()}
    assert len(storages) == len(tensors)
    assert all(
        t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in tensors.values()
    )


def test_a_step_of_a_modified_block_runs(pipe):
    seen = []

    class Marked(MiniMaxH3LoopSchedulerStep):
        def __call__(self, components, block_state, i, t):
            seen.append(i)
            return super().__call__(components, block_state, i, t)

    marked = copy.copy(pipe)
    marked._blocks = pipe.blocks
    loop = marked._blocks.sub_blocks["denoise"].sub_blocks["t2va"].sub_blocks["denoise"]
    loop.sub_blocks["update"] = Marked()
    run(marked, output=NAMES[:2])
    assert seen == [0, 1, 2]


def test_conditioning_rows_are_neither_stepped_nor_scored(pipe):
    block = pipe.blocks.sub_blocks["denoise"].sub_blocks["fl2va"]
    encoder, part = copy.copy(pipe), copy.copy(pipe)
    encoder._blocks = pipe.blocks.sub_blocks["text_encoder"]
    encoded = encoder(prompt="a cat", output=["prompt_embeds", "text_token_tags"])
    part._blocks = block
    anchor = torch.randn(1, 4, 1, 2, 2, generator=torch.Generator().manual_seed(3))
    seen = []

    def look(_, __, kwargs):
        seen.append(kwargs["hidden_states"][0, :1].clone())

    handle = pipe.transformer.register_forward_pre_hook(look, with_kwargs=True)
    with rollout(part, RolloutParams(), [11]) as session:
        part(
            **encoded, height=32, width=32, num_frames=124, num_inference_steps=4,
            condition_latents=[anchor], keyframe_anchors=("first",),
            generator=session.generators[0],
        )  # fmt: skip
    handle.remove()
    video = session.trajectory.streams["video"]
    assert video.latents.shape == (1, 4, 37, 16)
    assert video.num_elements.item() == 37 * 16
    assert len(seen) == 3
    assert all(torch.equal(rows, seen[0]) for rows in seen)
    for (call_,) in session.trajectory.conditions[0].steps.values():
        assert call_.kwargs["hidden_states"].stream == "video"
        assert torch.equal(call_.kwargs["hidden_states"].front[0], seen[0])
    replay = RolloutEngine(pipe).replay(session.trajectory, 1)
    assert torch.equal(replay.log_prob, session.trajectory.log_probs[:, 1])


def test_an_interrupted_loop_leaves_nothing_behind(pipe):
    handle = pipe.transformer.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(pipe)
    handle.remove()
    run(pipe, output=NAMES[:2])


def test_two_calls_in_one_scope_are_refused(pipe):
    def twice():
        with rollout(pipe, ODE, [11]):
            call(pipe, output=NAMES[:2])
            call(pipe, output=NAMES[:2])

    with pytest.raises(RolloutStateError, match="called twice in one scope"):
        twice()


def test_fewer_kept_boundaries_are_fewer_bytes_in_proportion(pipe):
    def nbytes(kept):
        params = RolloutParams(sde_type="ode", return_step_indices=kept)
        streams = run(pipe, params, output=NAMES[:2])[0].streams
        return sum(stream.latents.nbytes for stream in streams.values())

    assert nbytes([1, 2]) * 4 == nbytes(None) * 2


# -- refused before the denoiser runs -------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"guidance_scale": 4.0},
            r"guidance-distilled.*got guidance_scale=4.0; set guidance_scale=1",
        ),
        ({"true_cfg_scale": 1.5}, r"guidance-distilled"),
        ({"num_inference_steps": 1}, r"N drive N - 1 evaluations; got num_inference_steps=1; set"),
        ({"num_inference_steps": None}, r"got num_inference_steps=None"),
        ({"num_step": 3}, r"no such argument, which the pipeline would ignore; got num_step; set"),
        ({"callback_on_step_end": print}, r"no such argument.*got callback_on_step_end"),
        ({"height": 33}, r"a size that the canvas cannot have; got 33 x 32; set both"),
        ({"height": None}, r"a size that the canvas cannot have; got None x 32"),
        ({"num_frames": 90}, r"makes 5 to 15 seconds; got 90 frames at 24 a second; set"),
        ({"num_frames": 0}, r"a frame count is a positive int; got 0; set"),
        ({"generator": None, "latents": torch.zeros(1)}, r"noise of one stream.*global RNG"),
        ({"generator": None}, r"initial noise would come from the global RNG"),
    ],
)
def test_a_request_is_checked_before_anything_runs(pipe, arguments, message):
    handle = pipe.text_encoder.register_forward_pre_hook(lambda *_: pytest.fail("ran"))
    try:
        with pytest.raises(RolloutParamsError, match=message):
            run(pipe, **arguments)
    finally:
        handle.remove()


def test_an_index_beyond_the_evaluations_is_refused_before_the_denoiser_runs(pipe):
    handle = pipe.transformer.register_forward_pre_hook(lambda *_: pytest.fail("ran"))
    try:
        with pytest.raises(RolloutParamsError, match=r"has 3 steps.*indices in 0\.\.2"):
            run(pipe, RolloutParams(sde_step_indices=[3]))
    finally:
        handle.remove()


def test_two_seeds_for_one_sample_are_refused(pipe):
    with pytest.raises(RolloutParamsError, match="got 2 seeds for 1 rows; pass 1 seeds"):
        run(pipe, seeds=[1, 2])


def test_schedules_of_different_length_are_refused(pipe):
    audio = pipe.audio_scheduler

    class Longer(MiniMaxH3Scheduler):
        def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None):
            super().set_timesteps(num_inference_steps + 1, device)

    pipe.audio_scheduler = Longer(shift=3.0)
    try:
        with pytest.raises(
            RolloutParamsError, match="got 3 steps for 'video' and 4 for 'audio'; give both"
        ):
            run(pipe)
    finally:
        pipe.audio_scheduler = audio


def test_a_rounded_frame_count_is_said_and_recorded(pipe):
    with pytest.warns(UserWarning, match=r"got num_frames=125, taken as 141"):
        trajectory, _ = run(pipe, ODE, num_frames=125, output=NAMES[:2])
    assert trajectory.request["num_frames"] == 141
    assert trajectory.request["height"] == 32
