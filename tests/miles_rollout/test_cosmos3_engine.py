"""Cosmos3 through the engine: token ids, conditions per prompt, media of every modality."""

import functools

import peft
import pytest
import torch

from miles_rollout import RolloutEngine, RolloutParams, RolloutParamsError, RolloutTrajectory
from miles_rollout.loading import load_pipeline
from miles_rollout.noise import keyed_noise
from miles_rollout.sample_request import Row, SampleRequest
from miles_rollout.testing import tiny_cosmos3, tiny_cosmos3_distilled
from tests.miles_rollout.tiny import ODE, assert_replays
from tests.miles_rollout.tiny_cosmos3 import (
    GUIDED,
    PROMPT,
    SIZE,
    STEPS,
    STREAMS,
    action,
    call,
    conditions,
    frames,
)

INPUTS = ("image", "video", "action")
load = functools.cache(load_pipeline)


@pytest.fixture(name="engine", params=["tiny-cosmos3", "tiny-cosmos3-modular"])
def _engine(request):
    return RolloutEngine(load(request.param))


def generate(engine, kind="t2v", params=None, prompts=(PROMPT,), group_size=1, **kwargs):
    """Conditions go with the prompt, the rest is sampling."""
    given = {**conditions()[kind], "num_inference_steps": STEPS, "decode": False, **kwargs}
    inputs = {name: given.pop(name) for name in INPUTS if name in given}
    params = RolloutParams(debug=True) if params is None else params
    return list(
        engine.generate(
            list(prompts), group_size, params, seed=5,
            **{"inputs": [inputs] * len(prompts), **given},
        )
    )  # fmt: skip


def generator():
    """Of the first row of `generate`."""
    request = SampleRequest(
        prompts=(PROMPT,), prompt_ids=(0,), metadata=({},), group_size=1, chunk_size=1, seed=5,
        iteration=0, same_noise=False,
    )  # fmt: skip
    return request.generators([Row(0, 0)])[0]


@pytest.mark.parametrize("kind", ["t2i", "t2va", "v2v", "policy_sound", "inverse_dynamics"])
def test_generate_is_the_stock_call_with_media_of_every_modality(engine, kind):
    (batch,) = generate(engine, kind, ODE, decode=True, **GUIDED)
    (media,) = batch.media
    latents = call(engine.pipe, generator=generator(), **conditions()[kind])
    stock = call(engine.pipe, "pt", generator=generator(), **conditions()[kind])
    assert batch.latents.keys() == stock.keys()
    for name, ours in batch.latents.items():
        assert torch.equal(ours, latents[name] if name == "video" else latents[name][None]), name
    picture = media.image[None] if kind == "t2i" else media.video
    assert torch.equal(picture, stock["video"])
    for name in ("audio", "action"):
        ours = getattr(media, name)
        assert (ours is None) == (name not in stock)
        assert ours is None or torch.equal(ours, stock[name])
    assert media.fps == (None if kind == "t2i" else 24.0)
    assert media.sampling_rate == (8000 if "audio" in stock else None)


def test_bfloat16_decodes_bitwise():
    engine = RolloutEngine(load("tiny-cosmos3", torch.bfloat16))
    (batch,) = generate(engine, "t2va", ODE, decode=True, **GUIDED)
    (media,) = batch.media
    stock = call(engine.pipe, "pt", generator=generator(), **conditions()["t2va"])
    assert torch.equal(media.video, stock["video"])
    assert torch.equal(media.audio, stock["audio"].float())


def test_every_prompt_is_tokenized_once_for_all_its_samples(engine, monkeypatch):
    texts = []
    tokenizer = engine.pipe.text_tokenizer
    stock = tokenizer.apply_chat_template

    def spy(messages, **kwargs):
        texts.append(messages[-1]["content"])
        return stock(messages, **kwargs)

    monkeypatch.setattr(tokenizer, "apply_chat_template", spy)
    batches = generate(engine, prompts=["a cat", "a dog"], group_size=3, **GUIDED)
    assert [batch.prompts for batch in batches] == 3 * [["a cat"], ["a dog"]]
    assert len(texts) == 4  # each prompt with the negative one
    assert [text.split(".")[0] for text in texts] == ["a cat", "blurry", "a dog", "blurry"]
    assert "tokenize_prompt" not in vars(engine.pipe)
    assert "decode_sound" not in vars(engine.pipe)


def test_sound_is_decoded_only_where_it_is_asked_for(engine, monkeypatch):
    decoded = []
    stock = engine.pipe.sound_tokenizer.decode
    monkeypatch.setattr(
        engine.pipe.sound_tokenizer, "decode", lambda z: decoded.append(z) or stock(z)
    )
    generate(engine, "t2va", ODE)
    assert not decoded
    generate(engine, "t2va", ODE, decode=True)
    assert len(decoded) == 1


def test_samples_of_a_group_differ_and_start_from_one_noise_if_asked(engine):
    first, second = generate(engine, "policy_sound", group_size=2, same_noise=True)
    for name in STREAMS["policy_sound"]:
        ours, theirs = (b.trajectory.streams[name].latents[0] for b in (first, second))
        assert torch.equal(ours[0], theirs[0])
        assert not torch.equal(ours[-1], theirs[-1])


def test_each_prompt_has_conditions_of_its_own(engine):
    inputs = [{"image": frames(1, seed)} for seed in (1, 2)]
    size = {**SIZE, "num_frames": 9}
    batches = generate(engine, prompts=["a cat", "a dog"], inputs=inputs, **size)
    anchors = [b.trajectory.streams["video"].latents[0, 0, 0, :, 0] for b in batches]
    assert not torch.equal(*anchors)
    for batch, given in zip(batches, inputs, strict=True):
        stock = call(engine.pipe, prompt="a", num_inference_steps=1, **size, **given)
        assert torch.equal(
            batch.trajectory.streams["video"].latents[0, 0, 0, :, 0], stock["video"][0, :, 0]
        )


def test_guidance_is_on_only_where_it_is_asked_for(engine):
    def calls_of(**given):
        (batch,) = generate(engine, **given)
        return {len(made) for made in batch.trajectory.conditions[0].steps.values()}

    assert calls_of() == {1}
    assert calls_of(guidance_scale=4.0) == {2}
    assert calls_of(negative_prompt="blurry") == {2}
    implied, empty = (
        generate(engine, guidance_scale=4.0, **given)[0].latents["video"]
        for given in ({}, {"negative_prompt": ""})
    )
    assert torch.equal(implied, empty)


def test_joined_and_saved_trajectories_replay_exactly(tmp_path):
    engine = RolloutEngine(load("tiny-cosmos3"))
    batches = generate(engine, "policy_sound", prompts=["a cat", "a dog in the rain"], **GUIDED)
    joined = RolloutTrajectory.cat([b.trajectory for b in batches])
    assert joined.streams["action"].mask.shape == (2, 4, 12)
    joined.save(tmp_path / "t")
    loaded = RolloutTrajectory.load(tmp_path / "t")
    for trajectory in (joined, loaded):
        assert_replays(engine, trajectory)
        one = engine.replay(trajectory, 2, [1])
        assert torch.equal(one.log_prob, joined.log_probs[1:, 2])


def test_a_lora_moves_the_log_prob_of_every_stream():
    pipe = tiny_cosmos3()
    targets = ["add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    with torch.random.fork_rng(devices=[]):
        pipe.transformer.add_adapter(peft.LoraConfig(r=2, target_modules=targets))
    engine = RolloutEngine(pipe)
    (batch,) = generate(engine, "policy_sound", **GUIDED)
    before = engine.replay(batch.trajectory, 2)
    assert torch.equal(before.log_prob, batch.trajectory.log_probs[:, 2])
    before.log_prob.sum().backward()
    gradients = [p.grad for n, p in pipe.transformer.named_parameters() if "lora_B" in n]
    assert all(g is not None and g.abs().sum() > 0 for g in gradients)
    for name, parameter in pipe.transformer.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * keyed_noise([0], parameter.shape, "test_lora", name)[0]
    after = engine.replay(batch.trajectory, 2)
    for name, stream in before.streams.items():
        assert (after.streams[name].log_prob - stream.log_prob).abs() > 1e-6


def test_a_distilled_pipeline_generates_without_guidance():
    engine = RolloutEngine(tiny_cosmos3_distilled())
    given = {
        "prompts": [PROMPT],
        "group_size": 1,
        "params": ODE,
        "seed": 5,
        "decode": False,
        **SIZE,
    }
    (batch,) = engine.generate(**given)
    plain = {"negative_prompt": None, "guidance_scale": None, "num_inference_steps": None}
    stock = call(engine.pipe, generator=generator(), **SIZE, **plain)
    assert torch.equal(batch.latents["video"], stock["video"])
    assert batch.trajectory.num_steps == 4
    with pytest.raises(RolloutParamsError, match="guidance-distilled; got a negative prompt"):
        list(engine.generate(**given, negative_prompt="blurry"))


# -- refused before the denoiser runs -------------------------------------------------------------

BAD = [
    ({"chunk_size": 2}, "takes one sample a call; got chunk_size 2; set 1"),
    ({"max_sequence_length": 9}, "prompts are never cut; got 9; set max_sequence_length=None"),
    ({"num_videos_per_prompt": 2}, "no such sampling argument; got num_videos_per_prompt"),
    ({"output_type": "pil"}, "no such sampling argument; got output_type"),
    ({"inputs": [{"mask": 1}]}, "no such input; got 'mask'; choose among action, image, video"),
    ({"num_frames": 6}, r"form 4 n \+ 1, or the pipeline cuts it; got 6; set num_frames=5"),
    ({"num_frames": 0}, "a frame count is a positive int; got 0"),
    ({"num_frames": 1, "image": frames(1)}, "an image has no effect on a single frame"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_what_cannot_be_generated_is_refused(engine, arguments, message):
    handle = engine.pipe.transformer.register_forward_hook(lambda *_: pytest.fail("ran"))
    try:
        with pytest.raises(RolloutParamsError, match=message):
            generate(engine, **arguments)
    finally:
        handle.remove()


def test_the_pipelines_own_refusals_stay(engine):
    with pytest.raises(ValueError, match="multiples of 16"):
        generate(engine, height=40)
    with pytest.raises(ValueError, match="has to be None if action"):
        generate(engine, "policy", num_frames=5)
    wide = action("policy", image=frames(1))
    wide.raw_action_dim = 30
    with pytest.raises(ValueError, match="raw_action_dim=30 exceeds"):
        generate(engine, "policy", action=wide)
