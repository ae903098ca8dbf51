"""The tiny MiniMax H3 is a real pipeline in both forms, seeded, and nothing in it is trivial."""

import itertools
import subprocess
import sys

import diffusers
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from miles_rollout import testing
from miles_rollout.loading import load_pipeline
from miles_rollout.testing import films, minimax_h3, tiny_minimax_h3
from miles_rollout.testing.film_score import color_score, loudness_score
from tests.miles_rollout.tiny_h3 import keyframes, picture, references

MODULES = ("transformer", "transformer_ref", "vae", "audio_vae", "text_encoder")


@pytest.fixture(scope="module")
def pipeline():
    return tiny_minimax_h3()


@pytest.fixture(scope="module")
def pretrained():
    return tiny_minimax_h3(pretrained=True)


@pytest.fixture(params=["pipeline", "pretrained"])
def either(request):
    return request.getfixturevalue(request.param)


def film(pipeline, prompt="a red circle", seed=0, **inputs):
    return pipeline(
        prompt=prompt, height=32, width=32, num_frames=124, num_inference_steps=3,
        output_type="pt", generator=torch.Generator().manual_seed(seed),
        output=["videos", "audio", "sampling_rate"], **inputs,
    )  # fmt: skip


def test_the_classes_are_the_real_ones(either):
    pipeline = either
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
    assert one["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert still["video_grid_thw"].tolist() == [[2, 2, 2]]
    assert torch.equal(still["pixel_values_videos"], one["pixel_values"].repeat(2, 1))
    ids = [1, processor.image_token_id, processor.video_token_id]
    assert processor.create_mm_token_type_ids([ids]) == [[0, 1, 2]]


def test_it_depends_on_the_seed_alone(pipeline):
    again, other = tiny_minimax_h3(), tiny_minimax_h3(seed=1)
    for name in MODULES:
        weights = [dict(getattr(p, name).named_parameters()) for p in (pipeline, again, other)]
        assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
        assert any(not torch.equal(weights[0][k], weights[2][k]) for k in weights[0])


def test_no_weight_and_no_latent_statistic_is_trivial(either):
    for name in MODULES:
        for key, weight in getattr(either, name).named_parameters():
            assert weight.numel() == 1 or weight.std() > 0, key
    for vae in (either.vae, either.audio_vae):
        assert all(mean != 0 for mean in vae.config.latents_mean)
        assert all(std not in (0, 1) for std in vae.config.latents_std)


def test_the_pretrained_form_ignores_the_seed(pretrained):
    other = load_pipeline("tiny-minimax-h3-pretrained")
    third = tiny_minimax_h3(pretrained=True, seed=1)
    for name in MODULES:
        weights = dict(getattr(pretrained, name).named_parameters())
        for again in (other, third):
            for key, weight in getattr(again, name).named_parameters():
                assert torch.equal(weight, weights[key]), key


def test_the_pretrained_form_makes_five_seconds_of_film_from_its_seed(pretrained):
    made, again, other = (film(pretrained, films.TRAIN_PROMPTS[0], seed) for seed in (0, 0, 1))
    assert made["videos"].shape == (1, 124, 3, 32, 32)
    assert made["audio"].shape == (1, 2, 207 * pretrained.audio_vae.hop_length)
    assert made["sampling_rate"] == 8000
    assert 207 * pretrained.audio_vae.hop_length / made["sampling_rate"] == pytest.approx(
        124 / pretrained.fps, abs=0.01
    )
    for name in ("videos", "audio"):
        assert torch.equal(made[name], again[name])
        assert not torch.equal(made[name], other[name])


def test_the_file_holds_every_trained_weight_and_the_statistics(pretrained):
    stored = load_file(minimax_h3.WEIGHTS)
    for name, vae in (("vae", pretrained.vae), ("audio_vae", pretrained.audio_vae)):
        for part in ("mean", "std"):
            values = stored.pop(f"{name}.latents_{part}")
            assert values.tolist() == list(vae.config[f"latents_{part}"])
    trained = {
        f"{name}.{key}": weight
        for name, module in minimax_h3.trained_modules(pretrained).items()
        for key, weight in module.named_parameters()
    }
    assert set(stored) == set(trained)
    assert all(torch.equal(stored[key].float(), weight) for key, weight in trained.items())


def test_the_statistics_are_those_of_the_films(pretrained):
    generator = torch.Generator().manual_seed(1)
    themes = [films.parse_prompt(prompt) for prompt in films.TRAIN_PROMPTS] * 20
    shown = [films.loose(theme, generator) for theme in themes]
    for draw, vae, axes in (
        (films.video_latents, pretrained.vae, (0, 2, 3, 4)),
        (films.audio_latents, pretrained.audio_vae, (0, 1, 3)),
    ):
        latents = torch.stack([draw(one) for one in shown])
        for found, name in ((latents.mean(axes), "mean"), (latents.std(axes), "std")):
            assert torch.allclose(found, torch.tensor(vae.config[f"latents_{name}"]), atol=0.06)


def test_the_decoders_show_and_sound_what_the_latents_say(pretrained):
    generator = torch.Generator().manual_seed(0)
    for prompt in films.HELD_OUT_PROMPTS:
        theme = films.parse_prompt(prompt)
        one = films.named(theme, generator)
        with torch.no_grad():
            video = pretrained.vae.decode(films.video_latents(one)[None]).sample[0].movedim(0, 1)
            audio = pretrained.audio_vae.decode(films.audio_latents(one)).sample[:, 0]
        scale, shift = (
            torch.tensor(v).view(3, 1, 1) for v in (pretrained.pixel_std, pretrained.pixel_mean)
        )
        assert color_score((video * scale + shift).clamp(0, 1), theme) > 0.9
        assert loudness_score(audio, 8000, theme) > 0.8


def test_the_weights_are_small():
    assert minimax_h3.WEIGHTS.stat().st_size < 1.2e6


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
