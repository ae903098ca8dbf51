"""LTX-2: two streams from copies of one scheduler, three guidances, video with sound."""

from dataclasses import replace

import pytest
import torch
from diffusers import LTX2ConditionPipeline, LTX2ImageToVideoPipeline, LTX2Pipeline

from miles_rollout import RolloutEngine, RolloutParams, RolloutParamsError, rollout
from miles_rollout.loading import load_pipeline
from miles_rollout.pipelines import REFUSED
from miles_rollout.pipelines.generic import GenericAdapter
from miles_rollout.sample_request import SampleRequest
from tests.miles_rollout.models import LTX2, load, ltx2
from tests.miles_rollout.tiny import DEBUG, ODE, PROMPTS, SEEDS, Calls, assert_replays, generators

STEPS = 4
SIZE = {**LTX2.size, "num_inference_steps": STEPS}
OFF = LTX2.plain
# Each guidance alone and all of them, with other scales for the sound and another rescaling.
GUIDANCES = {
    "cfg": ({"guidance_scale": 3.0, "audio_guidance_scale": 7.0}, (4,)),
    "cfg of the sound alone": ({"audio_guidance_scale": 5.0}, (4,)),
    "stg": ({"stg_scale": 1.5, "guidance_rescale": 0.3}, (2, 2)),
    "modality": ({"modality_scale": 3.0, "audio_modality_scale": 2.0}, (2, 2)),
    "stg and modality": ({"stg_scale": 1.0, "modality_scale": 3.0}, (2, 2, 2)),
    "cfg and modality, rescaled": (
        {"guidance_scale": 4.0, "modality_scale": 2.0, "audio_guidance_rescale": 0.9},
        (4, 2),
    ),
    "all, by the pipeline's defaults": (
        dict.fromkeys(OFF) | {
            "guidance_scale": 3.0, "stg_scale": 1.0, "modality_scale": 3.0, "guidance_rescale": 0.7,
            "audio_guidance_scale": 7.0, "audio_stg_scale": 1.0, "audio_modality_scale": 3.0,
            "audio_guidance_rescale": 0.7,
        },
        (4, 2, 2),
    ),
}  # fmt: skip


@pytest.fixture(name="pipe")
def _pipe():
    return load("tiny-ltx2")


@pytest.fixture(name="guidance", params=GUIDANCES)
def _guidance(request):
    return GUIDANCES[request.param]


def call(pipe, output_type="latent", **arguments):
    how = {"generator": generators(), "prompt": PROMPTS, **SIZE, **OFF, **arguments}
    return ltx2(pipe, output_type, **how)


def roll(pipe, params=DEBUG, seeds=SEEDS, **arguments):
    with rollout(pipe, params, seeds) as session:
        output = call(pipe, **arguments)
    return session.trajectory, output


def generate(pipe, params=DEBUG, **kwargs):
    (batch,) = RolloutEngine(pipe).generate(
        PROMPTS, 1, params, seed=5, **{"decode": False, **SIZE, **kwargs}
    )
    return batch


# -- guidance ------------------------------------------------------------------------------------


def test_each_guidance_replays_bitwise_and_moves_the_sample(pipe, guidance):
    scales, rows = guidance
    with Calls(pipe.transformer) as calls:
        trajectory, output = roll(pipe, **scales)
    assert calls.rows == list(rows) * STEPS
    assert_replays(RolloutEngine(pipe), trajectory)
    _, unguided = roll(pipe)
    moved = {n: (output[n] - unguided[n]).abs().max() for n in output}
    assert max(moved.values()) > 1e-2


def test_each_guidance_is_the_stock_call_without_noise(pipe, guidance):
    scales, _ = guidance
    stock = call(pipe, **scales)
    _, rolled = roll(pipe, ODE, **scales)
    assert all(torch.equal(stock[name], rolled[name]) for name in stock)


def test_a_row_is_cut_out_of_calls_of_one_and_of_two_blocks(pipe, guidance):
    scales, _ = guidance
    trajectory, _ = roll(pipe, **scales)
    engine = RolloutEngine(pipe)
    for samples in ([1], [1, 0]):
        replay = engine.replay(trajectory, 1, samples)
        expected = trajectory.log_probs[samples, 1]
        torch.testing.assert_close(replay.log_prob, expected, atol=1e-5, rtol=0)
        for name, stream in replay.streams.items():
            held = trajectory.streams[name].debug["velocity"][samples, 1]
            torch.testing.assert_close(stream.velocity, held, atol=1e-4, rtol=0)


def test_the_guidance_is_recorded_by_stream(pipe):
    trajectory, _ = roll(pipe, guidance_scale=3, audio_guidance_scale=None, stg_scale=1.0)
    assert trajectory.guidance == {
        "do_classifier_free_guidance": True,
        "do_spatio_temporal_guidance": True,
        "do_modality_isolation_guidance": False,
        "guidance_scale": 3.0, "stg_scale": 1.0, "modality_scale": 1.0, "guidance_rescale": 0.0,
        "audio_guidance_scale": 3.0, "audio_stg_scale": 1.0, "audio_modality_scale": 1.0,
        "audio_guidance_rescale": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["guidance_scale", "stg_scale", "audio_modality_scale", "audio_guidance_rescale"]
)
def test_replay_with_another_scale_is_seen(pipe, name):
    """What the tests above rest on: every recorded scale counts."""
    trajectory, _ = roll(pipe, **GUIDANCES["all, by the pipeline's defaults"][0])
    other = {**trajectory.guidance, name: trajectory.guidance[name] + 0.2}
    stream = "audio" if name.startswith("audio") else "video"
    replay = RolloutEngine(pipe).replay(replace(trajectory, guidance=other), 1)
    for held in trajectory.streams:
        same = torch.equal(
            replay.streams[held].velocity, trajectory.streams[held].debug["velocity"][:, 1]
        )
        assert same == (held != stream)


# -- streams -------------------------------------------------------------------------------------


def test_both_streams_follow_the_bent_schedule_to_its_end(pipe):
    trajectory, _ = roll(pipe)
    assert tuple(trajectory.streams) == ("video", "audio")
    video, audio = trajectory.streams.values()
    assert torch.equal(video.sigmas, audio.sigmas)
    assert video.sigmas.tolist() == pytest.approx([1, 0.7775, 0.489, 0.1, 0], abs=1e-3)
    assert torch.equal(video.timesteps, video.sigmas * 1000)
    assert video.latents.shape == (2, STEPS + 1, 80, 4)
    assert audio.latents.shape == (2, STEPS + 1, 9, 8)
    assert [s.num_elements.tolist() for s in (video, audio)] == [[320] * 2, [72] * 2]
    joint = (video.log_probs * 320 + audio.log_probs * 72) / 392
    torch.testing.assert_close(trajectory.log_probs, joint)
    assert not torch.equal(video.debug["noise"][:, 0, :9, 0], audio.debug["noise"][:, 0, :, 0])


def test_each_stream_is_replayed_from_the_state_of_the_other(pipe):
    trajectory, _ = roll(pipe)
    audio = trajectory.streams["audio"]
    other = torch.randn(audio.latents.shape, generator=torch.Generator().manual_seed(0))
    streams = {**trajectory.streams, "audio": replace(audio, latents=other)}
    engine = RolloutEngine(pipe)
    changed = engine.replay(replace(trajectory, streams=streams), 1).streams["video"]
    assert not torch.equal(changed.velocity, trajectory.streams["video"].debug["velocity"][:, 1])


def test_a_video_only_policy_replays_exactly(pipe):
    params = RolloutParams(sde_streams=["video"], sde_step_indices=[1], return_step_indices=[1, 2])
    trajectory, _ = roll(pipe, params, guidance_scale=3.0)
    assert not trajectory.streams["audio"].log_probs.any()
    replay = RolloutEngine(pipe).replay(trajectory, 1)
    assert list(replay.streams) == ["video"]
    assert torch.equal(replay.log_prob, trajectory.streams["video"].log_probs[:, 1])


def test_the_denoiser_sees_the_layout_that_the_pipeline_gave_its_latents(pipe):
    """The packed noise is a transposed view, and every own step keeps that."""
    seen = []
    handle = pipe.transformer.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["hidden_states"].stride()), with_kwargs=True
    )
    trajectory, _ = roll(pipe, RolloutParams(sde_step_indices=[2], debug=True))
    assert seen == [(320, 1, 80)] * 3 + [(320, 4, 1)]
    (recorded,) = trajectory.conditions[0].steps[2]
    assert recorded.kwargs["hidden_states"].stream == "video"
    assert_replays(RolloutEngine(pipe), trajectory)
    assert seen[-1] == seen[2]
    handle.remove()


def test_bytes_go_with_the_boundaries_kept(pipe):
    def nbytes(kept, **how):
        streams = roll(pipe, RolloutParams(return_step_indices=kept, **how))[0].streams
        return {name: stream.latents.nbytes for name, stream in streams.items()}

    for how in ({"sde_type": "ode"}, {"sde_step_indices": [1]}):
        full, part = nbytes(None, **how), nbytes([1, 2], **how)
        assert all(part[name] * (STEPS + 1) == full[name] * 2 for name in full)


# -- the engine ----------------------------------------------------------------------------------


def test_the_engine_guides_by_what_is_asked_for_alone(pipe):
    for asked, rows in (
        ({}, (2,)),
        ({"negative_prompt": "blurry"}, (4,)),
        ({"guidance_scale": 3.0}, (4,)),
        ({"audio_guidance_scale": 5.0}, (4,)),
        ({"audio_guidance_scale": 5.0, "guidance_scale": 1.0, "negative_prompt": ""}, (4,)),
        ({"stg_scale": 1.0}, (2, 2)),
        ({"modality_scale": 2.0, "negative_prompt": ""}, (4, 2)),
    ):
        with Calls(pipe.transformer) as calls:
            trajectory = generate(pipe, **asked).trajectory
        assert calls.rows == list(rows) * STEPS, asked
        assert_replays(RolloutEngine(pipe), trajectory)


def test_a_negative_prompt_that_no_scale_uses_is_told(pipe):
    both = {"guidance_scale": 1.0, "audio_guidance_scale": 1.0}
    with pytest.warns(UserWarning, match="negative_prompt has no effect at guidance_scale 1.0"):
        generate(pipe, negative_prompt="blurry", **both)


def test_the_longest_prompt_keeps_its_words_and_padding_is_not_kept(pipe):
    engine = RolloutEngine(pipe)
    short, long = engine.encode(PROMPTS, max_sequence_length=48)
    assert [len(e["embeds"]) for e in (short, long)] == [len(p) for p in PROMPTS]
    collated = engine.adapter.collate([short, long], None)
    stock, mask, _, _ = pipe.encode_prompt(PROMPTS[0], None, False, max_sequence_length=48)
    assert torch.equal(collated["prompt_attention_mask"][:1], mask)
    live = mask[0].bool()
    assert torch.equal(collated["prompt_embeds"][0, live], stock[0, live])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_media_are_those_of_the_stock_call(dtype):
    pipe = load("tiny-ltx2-3", dtype)
    engine = RolloutEngine(pipe)
    how = {**SIZE, "num_frames": 5, "frame_rate": 12.5, "guidance_scale": 3.0}
    (batch,) = engine.generate(PROMPTS, 1, ODE, seed=5, negative_prompt="blurry", **how)
    request = SampleRequest(
        prompts=PROMPTS, prompt_ids=(0, 1), metadata=({}, {}), group_size=1, chunk_size=2, seed=5,
        iteration=0, same_noise=False,
    )  # fmt: skip
    (rows,) = request.chunks()
    encoded, negative = (
        engine.encode(texts, max_sequence_length=48) for texts in (PROMPTS, ["blurry"] * 2)
    )
    stock = pipe(
        **engine.adapter.collate(encoded, negative) | how, generator=request.generators(rows),
        output_type="pt",
    )  # fmt: skip
    for media, frames, sound in zip(batch.media, stock.frames, stock.audio, strict=True):
        assert torch.equal(media.video, frames.float())
        assert torch.equal(media.audio, sound.float())
        assert media.video.shape == (5, 3, 32, 32)
        assert (media.fps, media.sampling_rate) == (12.5, 48000)
    assert batch.media[0].audio.std() > 1e-2
    # The trajectory's last states decode to the same.
    states = {name: s.latent(STEPS) for name, s in batch.trajectory.streams.items()}
    again = engine.decode(states, **batch.trajectory.request)
    for one, other in zip(again, batch.media, strict=True):
        assert torch.equal(one.video, other.video)
        assert torch.equal(one.audio, other.audio)


def test_media_are_the_same_after_the_text_encoder_has_left():
    engine = RolloutEngine(load_pipeline("tiny-ltx2", torch.bfloat16))
    (first,) = engine.generate(PROMPTS, 1, ODE, seed=5, **SIZE)
    engine.drop_text_encoders()
    (again,) = engine.generate(PROMPTS, 1, ODE, seed=5, **SIZE)
    assert engine.pipe.text_encoder is None
    for one, other in zip(first.media, again.media, strict=True):
        assert torch.equal(one.video, other.video)
        assert torch.equal(one.audio, other.audio)


def test_the_pipelines_latent_output_decodes_as_well(pipe):
    output = pipe(PROMPTS, generator=generators(), output_type="latent", **SIZE, **OFF)
    media = RolloutEngine(pipe).decode({"video": output.frames, "audio": output.audio})
    stock = call(pipe, "pt")
    for name in ("video", "audio"):
        assert torch.equal(torch.stack([getattr(m, name) for m in media]), stock[name])


def test_a_step_of_a_modified_pipeline_runs(pipe):
    seen = []

    class Marked(LTX2Pipeline):
        def convert_x0_to_velocity(self, sample, denoised_output, step_idx, scheduler=None):
            seen.append(step_idx)
            return super().convert_x0_to_velocity(sample, denoised_output, step_idx, scheduler)

    marked = Marked(**pipe.components)
    marked.set_progress_bar_config(disable=True)
    trajectory, _ = roll(marked)
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3]
    assert_replays(RolloutEngine(marked), trajectory)


# -- refused before the denoiser runs --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_frames": 8}, r"frames come in 2 n \+ 1.*got num_frames 8; set num_frames 7"),
        ({"num_frames": 0}, r"a frame count is a positive int; got 0; set num_frames"),
        ({"num_frames": True}, r"a frame count is a positive int; got True"),
        ({"num_videos_per_prompt": 2}, r"one seed a row; got num_videos_per_prompt 2; set it to 1"),
        ({"generator": None, "latents": torch.zeros(1)}, r"draws for both streams.*generator None"),
        (
            {"enable_prompt_enhancement": True},
            r"seeds the global RNG.*got enable_prompt_enhancement True; set it to False",
        ),
        (
            {"prompt": None, "prompt_embeds": torch.zeros(1), "audio_guidance_scale": 2.0},
            r"no negative one; got guidance_scale 1\.0, audio_guidance_scale 2\.0; set both to 1",
        ),
    ],
)
def test_a_request_is_checked_before_anything_runs(pipe, arguments, message):
    with Calls(pipe.text_encoder, pipe.transformer) as calls:
        with pytest.raises(RolloutParamsError, match=message):
            roll(pipe, **arguments)
        assert len(calls) == 0


def test_a_predicted_duration_is_refused(pipe):
    pipe.duration_head = torch.nn.Identity()
    try:
        with pytest.raises(RolloutParamsError, match=r"predict the duration.*got num_frames None"):
            roll(pipe, num_frames=None)
    finally:
        pipe.duration_head = None


def test_blocks_that_are_not_there_are_told(pipe):
    with pytest.warns(UserWarning, match=r"no block of 2.*got \[28\]; set spatio_temporal"):
        roll(pipe, ODE, stg_scale=1.0, spatio_temporal_guidance_blocks=[28])


def test_a_zero_that_the_pipeline_takes_for_the_videos_scale_is_told(pipe):
    with pytest.warns(UserWarning, match="got audio_stg_scale 0 and stg_scale 1.0; set audio_stg"):
        trajectory, _ = roll(pipe, stg_scale=1.0, audio_stg_scale=0.0)
    assert trajectory.guidance["audio_stg_scale"] == 1.0
    assert_replays(RolloutEngine(pipe), trajectory)


def test_an_unperturbed_transformer_and_a_random_decoder_are_refused(pipe):
    for config, name, message in (
        (pipe.transformer, "perturbed_attn", "no perturbed attention.*got stg_scale 1.0; set stg"),
        (pipe.vae, "timestep_conditioning", "fresh noise; got timestep_conditioning True"),
    ):
        held = config.config[name]
        config.register_to_config(**{name: not held})
        try:
            with pytest.raises(RolloutParamsError, match=message):
                generate(pipe, ODE, stg_scale=float(name == "perturbed_attn"), decode=True)
        finally:
            config.register_to_config(**{name: held})


@pytest.mark.parametrize("cls", [LTX2ConditionPipeline, LTX2ImageToVideoPipeline])
def test_conditioned_pipelines_are_refused_by_name(pipe, cls):
    names = cls._get_signature_keys(cls)[0]
    conditioned = cls(**{name: pipe.components.get(name) for name in names})
    for make in (lambda: RolloutEngine(conditioned), lambda: roll(conditioned)):
        with pytest.raises(
            RolloutParamsError, match=rf"its condition frames .* got {cls.__name__}; set another"
        ):
            make()
    RolloutEngine(conditioned, adapter=GenericAdapter())
    assert cls.__name__ in REFUSED
