"""The tiny MiniMax H3 is a real pipeline, seeded, and nothing in it is trivial."""

import itertools
import subprocess
import sys

import diffusers
import numpy as np
import pytest
import torch
import transformers

from miles_rollout import testing
from miles_rollout.loading import load_pipeline
from miles_rollout.testing import tiny_minimax_h3
from tests.miles_rollout.tiny_h3 import keyframes, picture, references

MODULES = ("transformer", "transformer_ref", "vae", "audio_vae", "text_encoder")


@pytest.fixture(scope="module")
def pipeline():
    return tiny_minimax_h3()


def film(pipeline, prompt="a red circle", seed=0, **inputs):
    return pipeline(
        prompt=prompt, height=32, width=32, num_frames=124, num_inference_steps=3,
        output_type="pt", generator=torch.Generator().manual_seed(seed),
        output=["videos", "audio", "sampling_rate"], **inputs,
    )  # fmt: skip


def test_the_classes_are_the_real_ones(pipeline):
    assert type(pipeline).__name__ == "MiniMaxH3ModularPipeline"
    for name in ("transformer", "transformer_ref"):
        assert type(getattr(pipeline, name)) is diffusers.MiniMaxH3Transformer3DModel
    assert isinstance(pipeline.processor, transformers.Qwen3VLProcessor)
    assert type(pipeline.vae) is diffusers.AutoencoderKLMiniMaxH3
    assert type(pipeline.audio_vae) is diffusers.AutoencoderKLMiniMaxH3Audio
    assert type(pipeline.text_encoder) is transformers.Qwen3VLForConditionalGeneration
    assert (pipeline.scheduler.shift, pipeline.audio_scheduler.shift) == (12.0, 3.0)
    assert not any(getattr(pipeline, name).training for name in MODULES)


def test_it_makes_five_seconds_of_video_with_stereo_sound(pipeline):
    made = film(pipeline)
    assert made["videos"].shape == (1, 124, 3, 32, 32)
    assert made["audio"].shape == (1, 2, 165600)
    assert made["sampling_rate"] == 32000
    for media in made["videos"], made["audio"]:
        assert media.dtype == torch.float32
        assert torch.isfinite(media).all()
        assert media.std() > 0.01


def test_prompt_and_noise_change_both_media(pipeline):
    made = film(pipeline)
    for other in film(pipeline, "a blue square on a green background"), film(pipeline, seed=1):
        for name in ("videos", "audio"):
            assert not torch.equal(made[name], other[name])


def test_every_kind_of_condition_changes_both_media(pipeline):
    given = references()["references"]
    forms = [{}, keyframes(), *({"references": given[:n]} for n in (1, 2, 3))]
    made = [film(pipeline, **form) for form in forms]
    for ours, theirs in itertools.combinations(made, 2):
        for name in ("videos", "audio"):
            assert (ours[name] - theirs[name]).abs().max() > 1e-5


def test_the_denoisers_differ(pipeline):
    weights = [getattr(pipeline, n).proj_in.weight for n in ("transformer", "transformer_ref")]
    assert not torch.equal(*weights)


def test_a_still_video_is_shown_to_the_text_encoder_as_pairs_of_its_image(pipeline):
    image, processor = picture(), pipeline.processor
    one = processor.image_processor(images=[image], return_tensors="pt")
    still = processor.video_processor(
        videos=[np.stack([np.asarray(image)] * 3)], do_sample_frames=False, return_tensors="pt"
    )
    assert one["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert still["video_grid_thw"].tolist() == [[2, 4, 4]]
    assert torch.equal(still["pixel_values_videos"], one["pixel_values"].repeat(2, 1))
    ids = [1, processor.image_token_id, processor.video_token_id]
    assert processor.create_mm_token_type_ids([ids]) == [[0, 1, 2]]


def test_it_depends_on_the_seed_alone(pipeline):
    again, other = tiny_minimax_h3(), tiny_minimax_h3(seed=1)
    for name in MODULES:
        weights = [dict(getattr(p, name).named_parameters()) for p in (pipeline, again, other)]
        assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
        assert any(not torch.equal(weights[0][k], weights[2][k]) for k in weights[0])


def test_no_weight_and_no_latent_statistic_is_trivial(pipeline):
    for name in MODULES:
        for key, weight in getattr(pipeline, name).named_parameters():
            assert weight.numel() == 1 or weight.std() > 0, key
    for vae in (pipeline.vae, pipeline.audio_vae):
        assert all(mean != 0 for mean in vae.config.latents_mean)
        assert all(std not in (0, 1) for std in vae.config.latents_std)


def test_half_precision_is_laid_out_as_in_the_released_model():
    pipeline = load_pipeline("tiny-minimax-h3", torch.bfloat16)
    dtypes = {name: p.dtype for name, p in pipeline.transformer.named_parameters()}
    assert dtypes["proj_in.weight"] == torch.float32
    assert torch.bfloat16 in dtypes.values()
    assert pipeline.vae.dtype == pipeline.audio_vae.dtype == torch.float32
    assert torch.isfinite(film(pipeline)["audio"]).all()


def test_importing_the_package_does_not_import_the_model():
    code = "import sys, miles_rollout.testing; print([m for m in sys.modules if 'minimax_h3' in m])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "miles_rollout.testing.minimax_h3" not in found
    assert "modular_pipelines.minimax_h3" not in found


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'tiny_nothing'"):
        _ = testing.tiny_nothing
