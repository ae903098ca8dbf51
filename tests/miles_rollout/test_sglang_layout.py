"""SGLang's response layout: there and back bitwise, and what it cannot say or contradicts."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from miles_rollout import (
    RolloutEngine,
    RolloutParams,
    RolloutParamsError,
    RolloutTrajectory,
    rollout,
)
from miles_rollout.conditions import DenoiserCall, StreamState
from miles_rollout.pipelines import adapter_for
from miles_rollout.sglang_layout import from_sglang, to_sglang
from miles_rollout.testing import tiny_minimax_h3, tiny_sd3
from tests.miles_rollout import tiny, tiny_h3
from tests.miles_rollout.models import MODELS, load
from tests.miles_rollout.tiny import run
from tests.miles_rollout.tiny_loop import assert_same_stream
from tests.miles_rollout.tiny_sglang import qwen_calls

WINDOW = RolloutParams(sde_step_indices=[1, 3], return_step_indices=[1, 2, 3, 4])


def sd3_calls(s):
    """Both branches in one call, the negative one first."""
    both = [s.neg_cond_kwargs, s.pos_cond_kwargs]
    joined = {
        name: torch.cat([kwargs[name] for kwargs in both])
        if isinstance(value, torch.Tensor)
        else value
        for name, value in s.pos_cond_kwargs.items()
    }
    each_step = {
        "hidden_states": torch.cat([s.states["image"]] * 2),
        "timestep": s.timesteps["image"].expand(2 * s.num_samples),
    }
    return [DenoiserCall("transformer", (), each_step | joined)]


def h3_calls(s):
    """Rows of both streams, and the timestep of each row among the distinct ones."""
    c = s.pos_cond_kwargs
    rows = torch.full((len(c["token_tags"]),), s.timesteps["video"].item())
    rows[c["audio_indices"]] = s.timesteps["audio"]
    timestep, indices = torch.unique(rows, sorted=True, return_inverse=True)
    each_step = {
        "hidden_states": StreamState("video", torch.float32),
        "audio_hidden_states": StreamState("audio", torch.float32),
        "timestep": timestep,
        "timestep_indices": indices,
    }
    return [DenoiserCall("transformer", (), each_step | c)]


@functools.cache
def build(family):
    return {"sd3": tiny_sd3, "h3": tiny_minimax_h3}[family]()


def roll_sd3(pipe, params):
    with rollout(pipe, params, tiny.SEEDS) as session:
        pipe(
            tiny.PROMPTS,
            negative_prompt=["blurry", "a dot"],
            guidance_scale=3.0,
            num_inference_steps=4,
            height=32,
            width=32,
            generator=tiny.generators(),
            output_type="latent",
        )
    return session.trajectory


def there_and_back(trajectory, pipe, calls, *, branches=None, wire=False, h3=False):
    adapter = adapter_for(pipe)
    signs = {name: s.velocity_sign for name, s in trajectory.streams.items()}
    return from_sglang(
        {
            name: to_sglang(trajectory, stream=name, branches=branches, wire=wire)
            for name in trajectory.streams
        },
        params=trajectory.params,
        velocity_sign=signs,
        one_minus_sigma=["video", "audio"] if h3 else [],
        calls=calls,
        batch_axes=adapter.batch_axes,
        blocks=trajectory.conditions[0].blocks,
        guidance=trajectory.guidance,
        request=trajectory.request,
    )


def assert_replays_alike(pipe, back, trajectory):
    assert back.replayable_steps == trajectory.replayable_steps != ()
    engine = RolloutEngine(pipe)
    for step in back.replayable_steps:
        again, before = engine.replay(back, step), engine.replay(trajectory, step)
        assert torch.equal(again.log_prob, before.log_prob)
        assert torch.equal(again.log_prob, trajectory.log_probs[:, step])
        for name, stream in again.streams.items():
            assert torch.equal(stream.velocity, before.streams[name].velocity)


@pytest.mark.parametrize("wire", [False, True], ids=["tensors", "wire"])
@pytest.mark.parametrize("scale", [1.0, 3.0], ids=["plain", "cfg"])
@pytest.mark.parametrize(
    "params",
    [
        RolloutParams(debug=True),
        WINDOW,
        RolloutParams(sde_type="cps", latent_dtype="float32"),
        RolloutParams(sde_step_indices=[2], return_step_indices=[2, 3]),
    ],
    ids=["debug", "window", "cps", "one"],
)
def test_there_and_back_is_bitwise(any_pipe, params, scale, wire):
    trajectory, _ = run(any_pipe, params, scale=scale)
    branches = ("pos", "neg") if scale > 1 else None
    back = there_and_back(trajectory, any_pipe, qwen_calls, branches=branches, wire=wire)
    assert_same_stream(back.streams["image"], trajectory.streams["image"])
    assert back.params == trajectory.params
    assert (back.guidance, back.request) == (trajectory.guidance, trajectory.request)
    assert_replays_alike(any_pipe, back, trajectory)
    row = RolloutEngine(any_pipe).replay(back, back.replayable_steps[0], [1])
    expected = RolloutEngine(any_pipe).replay(trajectory, back.replayable_steps[0], [1])
    assert torch.equal(row.log_prob, expected.log_prob)
    RolloutTrajectory.cat([back, trajectory])  # one plan, one size


def test_blocks_of_guidance_in_one_call_go_to_their_branches():
    pipe = build("sd3")
    trajectory = roll_sd3(pipe, RolloutParams(debug=True))
    responses = to_sglang(trajectory, branches=("neg", "pos"))
    (call,) = trajectory.conditions[0].steps[0]
    embeds = call.kwargs["encoder_hidden_states"]
    for row, response in enumerate(responses):
        env = response["denoising_env"]
        for branch, at in (("neg", row), ("pos", 2 + row)):
            held = env[f"{branch}_cond_kwargs"]
            assert torch.equal(held["encoder_hidden_states"], embeds[at])
            assert "hidden_states" not in held
            assert "timestep" not in held
    back = there_and_back(trajectory, pipe, sd3_calls, branches=("neg", "pos"))
    assert_same_stream(back.streams["image"], trajectory.streams["image"])
    assert_replays_alike(pipe, back, trajectory)


@pytest.mark.parametrize(
    "params",
    [
        RolloutParams(debug=True),
        RolloutParams(sde_streams=["video"], sde_step_indices=[1], return_step_indices=[1, 2]),
        RolloutParams(stream_weights={"video": 0.25, "audio": 2.0}),
    ],
    ids=["both", "video", "weights"],
)
def test_streams_go_one_by_one_and_come_back_together(params):
    pipe = build("h3")
    trajectory, _ = tiny_h3.run(pipe, params, output=tiny_h3.NAMES[:2])
    video = to_sglang(trajectory, stream="video")[0]["dit_trajectory"]
    held = trajectory.streams["video"]
    assert torch.equal(video["timesteps"], held.sigmas * 1000)
    assert torch.equal(held.timesteps, 1 - held.sigmas)
    back = there_and_back(trajectory, pipe, h3_calls, h3=True)
    for name in trajectory.streams:
        assert_same_stream(back.streams[name], trajectory.streams[name])
    assert torch.equal(back.log_probs, trajectory.log_probs)
    assert_replays_alike(pipe, back, trajectory)


def test_a_response_is_what_the_server_sends(pipe):
    trajectory, _ = run(pipe, replace(WINDOW, debug=True), scale=3.0)
    held = trajectory.streams["image"]
    responses = to_sglang(trajectory, branches=("pos", "neg"))
    assert len(responses) == 2
    for row, response in enumerate(responses):
        assert response["rollout_log_probs"].shape == (4,)
        dit = response["dit_trajectory"]
        assert list(dit) == ["latents", "timesteps", "sigmas", "latent_step_indices"]
        assert torch.equal(dit["latents"], held.latents[row])
        assert dit["latent_step_indices"].tolist() == [1, 2, 3, 4]
        assert dit["latent_step_indices"].dtype == torch.int64
        assert len(dit["sigmas"]) == len(dit["timesteps"]) == 5
        assert dit["timesteps"][-1] == dit["sigmas"][-1] == 0
        debug = response["rollout_debug_tensors"]
        assert debug["rollout_noise_std_devs"].shape == (4, 1)
        assert torch.equal(debug["rollout_model_outputs"], held.debug["velocity"][row])
        env = response["denoising_env"]
        assert list(env) == ["image_kwargs", "pos_cond_kwargs", "neg_cond_kwargs", "guidance"]
        assert env["pos_cond_kwargs"]["encoder_hidden_states"].ndim == 2
        assert env["pos_cond_kwargs"]["img_shapes"] == [[(1, 4, 4)]]
        assert env["image_kwargs"] is env["guidance"] is None


def test_model_outputs_have_the_flow_matching_sign_and_come_back_as_predicted():
    pipe = build("h3")
    trajectory, _ = tiny_h3.run(pipe, RolloutParams(debug=True), output=tiny_h3.NAMES[:2])
    (response,) = to_sglang(trajectory, stream="video")
    outputs = response["rollout_debug_tensors"]["rollout_model_outputs"]
    assert torch.equal(outputs, -trajectory.streams["video"].debug["velocity"][0])


def test_responses_own_their_storage(pipe):
    trajectory, _ = run(pipe)
    before = trajectory.streams["image"].latents.clone()
    for response in to_sglang(trajectory):
        for tensor in response["dit_trajectory"].values():
            tensor.fill_(7)
        response["denoising_env"]["pos_cond_kwargs"]["encoder_hidden_states"].fill_(7)
    assert torch.equal(trajectory.streams["image"].latents, before)
    assert trajectory.streams["image"].sigmas[0] == 1
    embeds = trajectory.conditions[0].steps[0][0].kwargs["encoder_hidden_states"]
    assert not (embeds == 7).all()


def test_objects_with_the_fields_are_read_like_mappings(pipe):
    trajectory, _ = run(pipe)
    made = [
        SimpleNamespace(
            rollout_log_probs=r["rollout_log_probs"],
            dit_trajectory=SimpleNamespace(**r["dit_trajectory"]),
            denoising_env=None,
        )
        for r in to_sglang(trajectory)
    ]
    back = from_sglang({"image": made}, params=trajectory.params)
    assert_same_stream(back.streams["image"], trajectory.streams["image"])
    assert back.replayable_steps == ()


def test_a_full_capture_needs_no_indices(pipe):
    trajectory, _ = run(pipe)
    responses = to_sglang(trajectory)
    for response in responses:
        del response["dit_trajectory"]["latent_step_indices"]
    back = from_sglang({"image": responses}, params=trajectory.params)
    assert_same_stream(back.streams["image"], trajectory.streams["image"])


def test_what_was_denoised_apart_is_converted_apart_and_joined(pipe):
    prompts = (["a", "b c"], ["some longer prompt", "d"])
    chunks = [run(pipe, prompts=p, seeds=[i, i + 9])[0] for i, p in enumerate(prompts)]
    joined = RolloutTrajectory.cat(chunks)
    responses = to_sglang(joined)
    assert len(responses) == 4
    with pytest.raises(RolloutParamsError, match=r"another shape than the first sample's; .*cat"):
        from_sglang(
            {"image": responses},
            params=joined.params,
            calls=qwen_calls,
            batch_axes=adapter_for(pipe).batch_axes,
        )
    parts = [
        from_sglang(
            {"image": part},
            params=joined.params,
            calls=qwen_calls,
            batch_axes=adapter_for(pipe).batch_axes,
            guidance=joined.guidance,
            request=joined.request,
        )
        for part in (responses[:2], responses[2:])
    ]
    back = RolloutTrajectory.cat(parts)
    assert_same_stream(back.streams["image"], joined.streams["image"])
    assert_replays_alike(pipe, back, joined)


def test_states_keep_the_memory_layout_that_they_had():
    """LTX-2's states are not contiguous, and its kernels round by the layout."""
    model, pipe = MODELS["tiny-ltx2"], load("tiny-ltx2")
    trajectory, _ = model.roll(pipe, False)
    (held,) = trajectory.conditions
    assert held.axis_orders

    def ltx2_calls(s):
        (recorded,) = held.steps[s.step]
        return [replace(recorded, kwargs={**recorded.kwargs, **s.pos_cond_kwargs})]

    back = from_sglang(
        {name: to_sglang(trajectory, stream=name) for name in trajectory.streams},
        params=trajectory.params,
        calls=ltx2_calls,
        batch_axes=held.batch_axes,
        axis_orders=held.axis_orders,
        guidance=trajectory.guidance,
    )
    for name in trajectory.streams:
        assert_same_stream(back.streams[name], trajectory.streams[name])
    assert_replays_alike(pipe, back, trajectory)
