"""MiniMax H3 through the engine: encode, generate, decode, and replay of both streams."""

from dataclasses import replace

import peft
import pytest
import torch

from miles_rollout import RolloutEngine, RolloutParams, RolloutParamsError, RolloutTrajectory
from miles_rollout.noise import keyed_noise
from miles_rollout.testing import tiny_minimax_h3
from miles_rollout.transitions import flow_step
from tests.miles_rollout.tiny_h3 import POINTS, PROMPT, STREAMS

SIZE = {"height": 32, "width": 32, "num_frames": 124, "num_inference_steps": POINTS}
NOISY = RolloutParams(debug=True)


def engine_of(dtype):
    """With a LoRA that does something."""
    pipe = tiny_minimax_h3(dtype=dtype)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_k", "to_v"])
    with torch.random.fork_rng(devices=[]):
        pipe.transformer.add_adapter(config)
    set_lora(pipe.transformer, 0.05)
    return RolloutEngine(pipe)


def set_lora(module, scale):
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            noise = keyed_noise([0], parameter.shape, "test_lora", name)[0]
            parameter.data = noise * scale


@pytest.fixture(scope="module")
def engines():
    return {dtype: engine_of(dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.fixture(name="any_engine", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def _any_engine(engines, request):
    return engines[request.param]


@pytest.fixture(name="engine")
def _engine(engines):
    return engines[torch.float32]


def generate(engine, params=NOISY, prompts=(PROMPT,), group_size=1, **kwargs):
    kwargs.setdefault("decode", False)
    return list(engine.generate(list(prompts), group_size, params, seed=5, **SIZE | kwargs))


@pytest.fixture(name="trajectory")
def _trajectory(engine):
    return generate(engine)[0].trajectory


def test_replay_is_the_rollout_bitwise_with_gradients(any_engine):
    trajectory = generate(any_engine)[0].trajectory
    assert trajectory.replayable_steps == (0, 1, 2)
    for step in range(3):
        replay = any_engine.replay(trajectory, step)
        for name in STREAMS:
            stream, now = trajectory.streams[name], replay.streams[name]
            assert torch.equal(now.velocity, stream.debug["velocity"][:, step])
            assert torch.equal(now.mean, stream.debug["mean"][:, step])
            assert torch.equal(now.log_prob, stream.log_probs[:, step])
        assert torch.equal(replay.log_prob, trajectory.log_probs[:, step])
        any_engine.pipe.transformer.zero_grad()
        replay.log_prob.sum().backward()
        gradients = [
            p.grad for n, p in any_engine.pipe.transformer.named_parameters() if "lora_" in n
        ]
        assert any(g is not None and g.abs().sum() > 0 for g in gradients)


def test_replay_moves_with_the_weights_by_what_the_density_says(engine, trajectory):
    set_lora(engine.pipe.transformer, 0.5)
    try:
        replay = engine.replay(trajectory, 1)
    finally:
        set_lora(engine.pipe.transformer, 0.05)
    for name in STREAMS:
        stream, now = trajectory.streams[name], replay.streams[name]
        x, x_next = (t.double() for t in trajectory.pair(name, 1))
        scored = flow_step(
            "sde", x, -now.velocity.detach().double(), sigma=stream.sigmas[1].double(),
            sigma_next=stream.sigmas[2].double(), noise_level=0.7, next_sample=x_next,
        )  # fmt: skip
        moved = now.log_prob - stream.log_probs[:, 1]
        assert moved.abs() > 1e-6
        assert now.log_prob.item() == pytest.approx(scored.log_prob.item(), abs=1e-5)


def test_each_stream_is_replayed_from_the_state_of_the_other(engine, trajectory):
    audio = trajectory.streams["audio"]
    other = replace(audio, latents=torch.randn(audio.latents.shape, generator=_seeded()))
    changed = replace(trajectory, streams={**trajectory.streams, "audio": other})
    mean = engine.replay(changed, 1).streams["video"].mean
    assert not torch.equal(mean, engine.replay(trajectory, 1).streams["video"].mean)


def test_a_video_only_policy_still_replays_exactly(engine):
    params = RolloutParams(sde_streams=["video"], sde_step_indices=[1], return_step_indices=[1, 2])
    trajectory = generate(engine, params)[0].trajectory
    assert trajectory.streams["audio"].latents.shape[1] == 2
    replay = engine.replay(trajectory, 1)
    assert list(replay.streams) == ["video"]
    assert torch.equal(replay.log_prob, trajectory.streams["video"].log_probs[:, 1])
    with pytest.raises(RolloutParamsError, match="step 0 was not recorded"):
        engine.replay(trajectory, 0)


def test_stream_weights_decide_the_joint_log_prob_in_replay_too(engine):
    params = RolloutParams(stream_weights={"video": 0.25, "audio": 2.0})
    trajectory = generate(engine, params)[0].trajectory
    replay = engine.replay(trajectory, 0)
    video, audio = (replay.streams[name].log_prob for name in STREAMS)
    assert torch.equal(replay.log_prob, trajectory.log_probs[:, 0])
    assert torch.allclose(replay.log_prob, 0.25 * video + 2.0 * audio)


def test_joined_and_saved_trajectories_replay_exactly(engine, tmp_path):
    batches = generate(engine, prompts=[PROMPT, "a cat"])
    assert [len(b.prompts) for b in batches] == [1, 1]
    joined = RolloutTrajectory.cat([b.trajectory for b in batches])
    joined.save(tmp_path / "t")
    loaded = RolloutTrajectory.load(tmp_path / "t")
    for trajectory in (joined, loaded):
        assert torch.equal(engine.replay(trajectory, 2).log_prob, joined.log_probs[:, 2])
        one = engine.replay(trajectory, 2, [1])
        assert torch.equal(one.log_prob, joined.log_probs[1:, 2])


def test_generate_is_the_stock_call_with_media_of_both_streams(engine):
    (batch,) = generate(engine, RolloutParams(sde_type="ode"), decode=True)
    (media,) = batch.media
    with torch.no_grad():
        latents = {"latents": torch.empty(0), "audio_latents": torch.empty(0)}
        stock = engine.pipe(
            prompt=PROMPT, **SIZE, output_type="pt", generator=_generator_of(engine),
            output=[*latents, "videos", "audio", "sampling_rate"],
        )  # fmt: skip
    assert torch.equal(batch.latents["video"], stock["latents"])
    assert torch.equal(batch.latents["audio"][0], stock["audio_latents"])
    assert torch.equal(media.video, stock["videos"][0])
    assert torch.equal(media.audio, stock["audio"][0])
    assert (media.fps, media.sampling_rate) == (24, stock["sampling_rate"])


def test_samples_of_a_group_differ_in_both_streams(engine):
    first, second = generate(engine, RolloutParams(), group_size=2)
    for name in STREAMS:
        assert not torch.equal(first.latents[name], second.latents[name])
    assert torch.cat([first.sample_ids, second.sample_ids]).tolist() == [0, 1]


def test_a_prompt_is_encoded_once_and_a_step_is_one_call(engine):
    counts = {"transformer": 0, "text_encoder": 0}

    def count(name):
        def hook(*_):
            counts[name] += 1

        return hook

    handles = [
        engine.pipe.transformer.register_forward_pre_hook(count("transformer")),
        engine.pipe.text_encoder.model.register_forward_pre_hook(count("text_encoder")),
    ]
    generate(engine, RolloutParams(), prompts=["a dog"], group_size=2)
    for handle in handles:
        handle.remove()
    assert counts == {"transformer": 2 * (POINTS - 1), "text_encoder": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"guidance_scale": 4.0}, "guidance-distilled, with one conditional call a step; got guid"),
        ({"negative_prompt": "bad"}, "guidance-distilled; got a negative prompt; set none"),
        ({"num_inference_steps": 1}, "N drive N - 1 evaluations; got num_inference_steps=1"),
        ({"chunk_size": 2}, "takes one sample a call; got chunk_size 2; set 1"),
        ({"max_sequence_length": 9}, "prompts are never cut; got 9; set max_sequence_length=None"),
        ({"fps": 12}, "no such sampling argument; got fps"),
    ],
)
@pytest.mark.filterwarnings("ignore:RolloutEngine.generate")
def test_what_cannot_be_generated_is_refused(engine, arguments, message):
    with pytest.raises(RolloutParamsError, match=message):
        generate(engine, **arguments)


def test_a_scale_of_one_is_no_guidance(engine):
    generate(engine, RolloutParams(sde_type="ode"), guidance_scale=1.0)


def _seeded():
    return torch.Generator().manual_seed(9)


def _generator_of(engine):
    """The generator that the engine gave the row."""
    from miles_rollout.sample_request import Row, SampleRequest

    request = SampleRequest(
        prompts=(PROMPT,), prompt_ids=(0,), metadata=({},), group_size=1, chunk_size=1, seed=5,
        iteration=0, same_noise=False,
    )  # fmt: skip
    return request.generators([Row(0, 0)])[0]
