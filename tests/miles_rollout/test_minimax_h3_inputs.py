"""What a MiniMax H3 prompt cannot come with: refused by name, before a model runs."""

import copy
import types

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3Reference
from PIL import Image

from miles_rollout import RolloutEngine, RolloutParams, RolloutParamsError, rollout
from miles_rollout.testing import tiny_minimax_h3
from tests.miles_rollout.tiny_h3 import call, picture, references, sound

SIZE = {"height": 32, "width": 32, "num_frames": 124, "num_inference_steps": 4}
IMAGE = MiniMaxH3ImageReference(picture())
FRAMES = np.zeros((14, 32, 32, 3), dtype=np.uint8)


def image(value):
    """A request of one image reference."""
    return {"references": [MiniMaxH3ImageReference(value)]}


def video(frames=FRAMES, **how):
    """A request of one video reference."""
    return {"references": [MiniMaxH3VideoReference(frames, **how)]}


def voice(audio, **how):
    """A request of a sound beside an image."""
    return {"references": [IMAGE, MiniMaxH3AudioReference(audio, **how)]}


@pytest.fixture(name="pipe", scope="module")
def _pipe():
    return tiny_minimax_h3()


@pytest.fixture(name="engine")
def _engine(pipe):
    """With models that must not run."""
    modules = (pipe.text_encoder.model, pipe.vae.encoder, pipe.audio_vae.encoder)
    handles = [m.register_forward_pre_hook(lambda *_: pytest.fail("ran")) for m in modules]
    yield RolloutEngine(pipe)
    for handle in handles:
        handle.remove()


def refused(engine, inputs, message, **kwargs):
    """Where `generate` is called, and before the first prompt is encoded, though it is a good one."""
    with pytest.raises(RolloutParamsError, match=message):
        engine.generate(
            ["a", "b"], 1, RolloutParams(), seed=0, inputs=[{}, inputs], **{**SIZE, **kwargs}
        )


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"picture": picture()}, r"no such input; got 'picture'; choose among image, last_image, re"),
        ({"image": np.zeros((32, 32, 3))}, r"image is a PIL image; got ndarray; set image=PIL"),
        ({"image": "cat.png"}, r"image is a PIL image; got str"),
        ({"image": picture().convert("RGBA")}, r"image is an RGB image; got mode RGBA, 32 x 32; set"),
        ({"last_image": picture().convert("L")}, r"last_image is an RGB image; got mode L"),
        ({"image": Image.new("RGB", (0, 0))}, r"image is an RGB image; got mode RGB, 0 x 0"),
        (
            {"image": picture(), "references": [IMAGE]},
            r"ignores key frames beside references; got references and image; set one or the other",
        ),
        ({"references": IMAGE}, r"references are a list; got MiniMaxH3ImageReference; set refer"),
        ({"references": []}, r"references are a list; got list of 0"),
        ({"references": [picture()]}, r"references\[0\] is no reference; got Image; set it to a Min"),
        ({"references": [IMAGE, "a.mp4"]}, r"references\[1\] is no reference; got str"),
        ({"references": [MiniMaxH3Reference()]}, r"is no reference; got MiniMaxH3Reference"),
        ({"references": [IMAGE] * 10}, r"at most 9 image references; got 10; set fewer"),
        (
            {"references": [IMAGE] * 9 + [*video()["references"], *voice(sound())["references"][1:]] * 2},
            r"at most 12 references; got 13",
        ),
        (
            {"references": [MiniMaxH3AudioReference(sound())]},
            r"a sound conditions nothing on its own; got 1 audio references; set an image or video",
        ),
        (image([1, 2]), r"\[0\].image is a PIL image, an array or a tensor; got list"),
        (image(picture().convert("P")), r"\[0\].image is an RGB image; got mode P"),
        (image(picture(size=(200, 40))), r"\[0\].image is within 1:4 and 4:1; got 200 x 40"),
        (image(np.zeros((3, 32, 32))), r"\[0\].image is \[height, width, 3\]; got \[3, 32, 32\]"),
        (image(torch.zeros(32, 32, 3)), r"\[0\].image is \[3, height, width\]; got \[32, 32, 3\]"),
        (image(np.full((32, 32, 3), 200.0)), r"floats from 0 to 1; got float64 from 200 to 200"),
        (image(-torch.ones(3, 32, 32)), r"floats from 0 to 1; got float32 from -1 to -1"),
        (image(torch.full((3, 32, 32), torch.nan)), r"floats from 0 to 1; got float32 from nan"),
        (image(np.ones((32, 32, 3), dtype=np.int64)), r"is uint8, or floats .* got int64 from 1 to 1"),
        (video([]), r"\[0\].frames are PIL images, an array or a tensor; got list of 0"),
        (video([picture(), FRAMES[0]]), r"frames are PIL images, an array or a tensor; got list of 2"),
        (video([picture(), picture(size=(64, 32))]), r"frames have one size; got .*\(64, 32\)"),
        (video(FRAMES[0]), r"frames is \[frames, height, width, 3\]; got \[32, 32, 3\]"),
        (video(np.zeros((14, 32, 160, 3), np.uint8)), r"within 1:4 and 4:1; got 160 x 32"),
        (video(FRAMES[:12]), r"frames last 0.542 seconds at least; got 12 frames at 24 a second"),
        (video(FRAMES, fps=30.0), r"frames last 0.542 seconds at least; got 14 frames at 30"),
        (video(fps=0), r"the frame rate of references\[0\].frames is a positive number; got 0"),
        (video(fps=True), r"is a positive number; got True"),
        (video(fps=float("nan")), r"is a positive number; got nan"),
        (video(audio=np.zeros((1, 99))), r"\[0\].audio is a tensor of floats .* got ndarray of float64"),
        (voice(torch.zeros(1, 99, dtype=torch.int16)), r"floats from -1 to 1; got Tensor of torch.int16"),
        (voice(torch.zeros(99)), r"\[1\].audio is \[1 or 2 channels, samples\]; got \[99\]"),
        (voice(torch.zeros(3, 99)), r"channels, samples\]; got \[3, 99\]"),
        (voice(torch.zeros(2, 0)), r"channels, samples\]; got \[2, 0\]"),
        (voice(sound(), sample_rate=0), r"\[1\].sample_rate is a positive int; got 0"),
        (voice(sound(), sample_rate=32000.0), r"sample_rate is a positive int; got 32000.0"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_named(engine, inputs, message):
    refused(engine, inputs, message)
    with pytest.raises(RolloutParamsError, match=message):
        engine.encode(["a"], inputs=[inputs], **SIZE)


@pytest.mark.parametrize(
    ("inputs", "sampling", "message"),
    [
        ({"image": picture()}, {"height": 40}, r"a size that the canvas cannot have; got 40 x 32"),
        ({"image": picture()}, {"height": None}, r"cannot have; got None x 32"),
        (
            {"image": picture(size=(200, 40))},
            {"height": None, "width": None},
            r"the shape of the first key frame, within 1:4 and 4:1; got 200 x 40; set height and",
        ),
        (
            {"references": [IMAGE]},
            {"num_frames": None},
            r"references need a duration; got no num_fra",
        ),
        ({"references": [IMAGE]}, {"num_frames": 90}, r"makes 5 to 15 seconds; got 90 frames"),
        ({"image": picture()}, {"num_frames": True}, r"a frame count is a positive int; got True"),
    ],
)
def test_sizes_are_checked_where_generate_is_called(engine, inputs, sampling, message):
    refused(engine, inputs, message, **sampling)


def test_a_sound_of_another_rate_needs_torchaudio(engine, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = r"resampled by torchaudio, which is not installed; got 16000 Hz; set audio at 32000"
    refused(engine, voice(sound(), sample_rate=16000), message)
    refused(engine, video(audio=sound(), sample_rate=16000), message)


@pytest.mark.parametrize(
    ("inputs", "parts", "message"),
    [
        (
            {"image": picture()},
            {},
            r"sees image through the processor's image_processor; got a Simp",
        ),
        (
            {"references": [IMAGE]},
            {},
            r"sees references\[0\] through the processor's image_processor",
        ),
        (
            video(),
            {"image_processor": 1},
            r"sees references\[0\] through the processor's video_pro",
        ),
    ],
)
def test_a_processor_of_text_alone_takes_no_images(engine, inputs, parts, message):
    pipe = copy.copy(engine.pipe)
    pipe.processor = types.SimpleNamespace(**parts)
    refused(RolloutEngine(pipe), inputs, message + ".*without one; set the component processor")


@pytest.mark.parametrize(
    ("missing", "inputs"),
    [("transformer", {"image": picture()}), ("transformer_ref", {"references": [IMAGE]})],
)
def test_a_denoiser_that_was_not_loaded_is_named(engine, missing, inputs):
    pipe = copy.copy(engine.pipe)
    setattr(pipe, missing, None)
    refused(RolloutEngine(pipe), inputs, rf"a pipeline without {missing}; set it with pipe.load_co")


# -- a call of the pipeline itself ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image": "cat.png"}, r"image is a PIL image; got str"),
        ({"image": picture(), **references()}, r"ignores key frames beside references"),
        (
            {"condition_latents": [torch.zeros(1)]},
            r"would ignore; got condition_latents; set one of",
        ),
        (
            {"keyframes": [picture()]},
            r"no such argument, which the pipeline would ignore; got keyfr",
        ),
        (
            {"image": picture(), "normalized_references": []},
            r"which the pipeline would ignore; got normalized_references",
        ),
        ({"reference": [IMAGE]}, r"which the pipeline would ignore; got reference; set one of"),
        ({"references": [IMAGE], "num_frames": None}, r"references need a duration; got no num_fr"),
        (
            {
                "image": picture(),
                "generator": None,
                "latents": torch.zeros(1),
                "audio_latents": torch.zeros(1),
            },
            r"from the global RNG; got no generator; set generator=session.generators$",
        ),
    ],
)
def test_a_call_under_rollout_is_checked_before_anything_runs(engine, arguments, message):
    with (
        pytest.raises(RolloutParamsError, match=message),
        rollout(engine.pipe, RolloutParams(), [11]),
    ):
        call(engine.pipe, **arguments)


def test_the_canvas_of_a_key_frame_is_recorded(pipe):
    with rollout(pipe, RolloutParams(sde_type="ode"), [11]) as session:
        call(pipe, image=picture(size=(64, 32)), height=None, width=None, output=["latents"])
    request = session.trajectory.request
    assert (request["height"], request["width"], request["num_frames"]) == (32, 64, 124)


def test_an_index_beyond_the_evaluations_is_refused_before_the_denoiser_runs(pipe):
    handle = pipe.transformer.register_forward_pre_hook(lambda *_: pytest.fail("ran"))
    try:
        with (
            pytest.raises(RolloutParamsError, match=r"has 3 steps.*indices in 0\.\.2"),
            rollout(pipe, RolloutParams(sde_step_indices=[3]), [11]),
        ):
            call(pipe, image=picture())
    finally:
        handle.remove()
