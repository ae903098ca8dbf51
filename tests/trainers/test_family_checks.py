"""A config and its model family agree, or one line says why not, before a model is loaded."""

from pathlib import Path
from typing import Any

import pytest

import trainers.build
from miles_rollout.testing import tiny_qwen_image
from tests.tiny_run import tiny_config, trainer_of
from trainers.build import build_trainer, read_inputs
from trainers.config import TrainConfig
from trainers.config_loader import ConfigError, load
from trainers.family_checks import makes_video
from trainers.video_file import VideoFileError

H3 = ("model.pipeline=tiny-minimax-h3", "rollout.num_inference_steps=4")
SD3 = ("model.pipeline=tiny-sd3",)
FLUX = ("model.pipeline=tiny-flux",)
COSMOS3 = ("model.pipeline=tiny-cosmos3", "rollout.num_frames=5")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("rollout.num_frames=124",),
            "rollout.num_frames: this pipeline takes no such argument; got 124; leave it out; it "
            "takes attention_kwargs, guidance_scale, height",
        ),
        (
            ("rollout.sampling={guidence_scale: 2}",),
            "rollout.sampling.guidence_scale: this pipeline takes no such argument; got 2; did you "
            "mean guidance_scale?; it takes",
        ),
        (
            (*SD3, "rollout.true_cfg_scale=4", "rollout.negative_prompt=' '"),
            "rollout.true_cfg_scale: this pipeline takes no such argument; got 4.0; guidance goes "
            "by guidance_scale here",
        ),
        (
            (*FLUX, "rollout.guidance_scale=3.5", "rollout.negative_prompt=' '"),
            "rollout.negative_prompt: has no effect at true_cfg_scale 1.0; got ' '; set "
            "true_cfg_scale above 1 or negative_prompt null",
        ),
        (
            (*SD3, "rollout.guidance_scale=0.5", "rollout.negative_prompt=x"),
            "rollout.negative_prompt: has no effect at guidance_scale 0.5; got 'x'; set "
            "guidance_scale above 1 or negative_prompt null",
        ),
        (
            ("model.pipeline=tiny-wan", "rollout.num_frames=6"),
            "rollout: num_frames must be 4 n + 1, or the pipeline rounds it; got 6; set num_frames "
            "to a multiple of 4, plus 1",
        ),
        (
            (*H3, "rollout.guidance_scale=4"),
            "rollout: MiniMax H3 is guidance-distilled, with one conditional call a step; got "
            "guidance_scale=4.0; set guidance_scale=1, or leave it out",
        ),
        (
            (*H3, "eval.num_inference_steps=1"),
            "eval: MiniMax H3 counts grid points, the last one clean, so N drive N - 1 evaluations; "
            "got num_inference_steps=1",
        ),
        (
            (*H3, "rollout.window={type: fixed, steps: [3]}"),
            "rollout: window.steps: step 3 does not exist; got 3 steps; set steps within 0..2",
        ),
        (
            (*H3, "rollout.sde_type=cps", "rollout.window={type: fixed, steps: [2]}"),
            "rollout: cps has no density in the last step 2, which ends at sigma 0",
        ),
        (
            (*H3, "rollout.window={type: random, size: 4}"),
            "do not fit; got 3 steps; set starts within 0..-1 or a smaller size",
        ),
        (
            (*H3, "rollout.chunk_size=2"),
            "rollout.chunk_size: this pipeline takes one sample a call; got 2; set 1 or null",
        ),
        (
            (*H3, "eval.chunk_size=32"),
            "eval.chunk_size: this pipeline takes one sample a call; got 32; set 1 or null",
        ),
        (
            (*H3, "rollout.sde_streams=[video, sound]"),
            "rollout.sde_streams: no such stream; got sound; choose among video, audio",
        ),
        (
            (*H3, "rollout.stream_weights={image: 1}"),
            "rollout.stream_weights: no such stream; got image; choose among video, audio",
        ),
        (
            (*H3, "rollout.stream_weights={video: 1}"),
            "rollout.stream_weights: no weight for the stochastic stream audio; got {'video': 1.0}; "
            "add it, with 0 to leave it out",
        ),
        (
            (*H3, "rollout.stream_weights={video: 1, audio: 1}", "rollout.sde_streams=[video]"),
            "rollout.stream_weights: has no effect on audio, which is not stochastic",
        ),
        (
            (*COSMOS3, "rollout.sde_streams=[video, audio]"),
            "rollout.sde_streams: no such stream; got audio; choose among video",
        ),
        (
            (
                *COSMOS3,
                "rollout.sampling={enable_sound: true}",
                "rollout.stream_weights={video: 1}",
            ),
            "rollout.stream_weights: no weight for the stochastic stream audio",
        ),
        (
            (*COSMOS3, "rollout.num_frames=6"),
            "num_frames must be of the form 4 n + 1, or the pipeline cuts it; got 6; set num_frames=5",
        ),
        (
            ("model.pipeline=tiny-cosmos3-modular", "rollout.chunk_size=2"),
            "rollout.chunk_size: this pipeline takes one sample a call; got 2; set 1 or null",
        ),
        (
            ("model.denoisers=[transformer_2]",),
            "model.denoisers: this pipeline has no such denoiser; got transformer_2; choose among "
            "transformer",
        ),
    ],
)
def test_a_mistake_is_told_without_a_model(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(trainers.build, "load_pipeline", None)
    with pytest.raises(ConfigError) as caught:
        load(TrainConfig, [], overrides)
    (line,) = str(caught.value).splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.guidance_scale=-1", "guidance_scale must be >= 0 or null; got -1"),
        ("rollout.num_frames=0", "num_frames must be at least 1; got 0"),
        ("rollout.sampling={height: 64}", "sampling.height has a key of its own; got 64; set roll"),
        ("rollout.sde_streams=[]", "sde_streams must name one or more streams, each once; got []"),
        ("rollout.sde_streams=[image, image]", "one or more streams, each once; got ['image', "),
        ("rollout.stream_weights={}", "stream_weights must be >= 0, one a stream; got {}"),
        ("rollout.stream_weights={image: -1}", "stream_weights must be >= 0, one a stream; got"),
        ("rollout.stream_weights={image: 0}", "all are 0, so nothing is trained; got"),
        ("rollout.stream_weights=elements", "rollout.stream_weights: input should be 'element'"),
        ("model.denoisers=[]", "denoisers must name one or more, each once; got []"),
        ("eval.chunk_size=0", "chunk_size must be at least 1; got 0"),
    ],
)
def test_what_no_family_takes(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(TrainConfig, [], [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        (*SD3, "rollout.guidance_scale=4.5"),
        (*SD3, "rollout.guidance_scale=4.5", "rollout.negative_prompt=blurry"),
        (*FLUX, "rollout.guidance_scale=3.5"),
        (
            *FLUX,
            "rollout.guidance_scale=3.5",
            "rollout.true_cfg_scale=2",
            "rollout.negative_prompt=x",
        ),
        ("model.pipeline=tiny-z-image", "rollout.guidance_scale=0.5", "rollout.negative_prompt=x"),
        ("model.pipeline=tiny-wan2-2", "rollout.sampling={guidance_scale_2: 4}"),
        ("model.pipeline=tiny-hunyuan-video-1-5", "rollout.guidance_scale=6"),
        ("rollout.sampling={max_sequence_length: 64}",),
        (*H3, "rollout.guidance_scale=1", "rollout.num_frames=124"),
        (*H3, "rollout.stream_weights={audio: 1}", "rollout.sde_streams=[audio]"),
        (*H3, "rollout.stream_weights={video: 1, audio: 0}"),
        (*H3, "rollout.window={type: random, size: 3}"),
    ],
)
def test_what_a_family_takes(overrides: tuple[str, ...]) -> None:
    load(TrainConfig, [], overrides)


def test_chunks_of_one_sample_are_resolved_and_written_down() -> None:
    config = load(TrainConfig, [], [*H3, "rollout.num_prompts=2", "rollout.group_size=3"])
    assert (config.rollout.chunk_size, config.rollout.num_chunks, config.eval.rows) == (1, 6, 1)
    image = load(TrainConfig, [])
    assert (image.rollout.chunk_size, image.rollout.rows, image.eval.rows) == (None, 6, 32)


def test_a_name_that_says_nothing_is_checked_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, "model.pipeline=someone/else", "rollout.num_frames=9")
    pipe = tiny_qwen_image()
    monkeypatch.setattr(trainers.build, "load_pipeline", lambda *_: pipe)
    encoded: list[Any] = []
    pipe.text_encoder.register_forward_pre_hook(lambda *_: encoded.append(1))
    with pytest.raises(ConfigError, match=r"rollout\.num_frames: this pipeline takes no such arg"):
        build_trainer(config, read_inputs(config))
    assert not encoded


@pytest.mark.parametrize("key", ["height", "width"])
def test_a_size_that_the_pipeline_would_round_stops_before_encoding(
    tmp_path: Path, key: str
) -> None:
    with pytest.raises(ConfigError, match=f"rollout: {key} must be divisible by .*; got 36"):
        trainer_of(tiny_config(tmp_path, f"rollout.{key}=36"))


def test_a_class_without_an_adapter_cannot_be_trained(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(ConfigError, match=r"this pipeline class has no adapter, .*; got '"):
        load(TrainConfig, [], [f"model.pipeline={tmp_path}"])


def test_videos_want_pyav_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setattr(trainers.build, "load_pipeline", None)
    config = tiny_config(tmp_path)
    read_inputs(config)
    h3 = load(
        TrainConfig, [], [*H3, f"data.train={config.data.train}", f"data.eval={config.data.eval}"]
    )
    with pytest.raises(VideoFileError, match="needs PyAV"):
        read_inputs(h3)


def test_one_frame_is_a_picture() -> None:
    from miles_rollout.families import find_adapter

    config = load(TrainConfig, [], [*H3])
    adapter = find_adapter("tiny-minimax-h3")
    assert adapter is not None
    assert makes_video(config.rollout, adapter)
    image = find_adapter("tiny-sd3")
    assert image is not None
    assert not makes_video(config.rollout, image)
