"""The tiny Cosmos3 is a real pipeline, seeded, nothing in it is trivial, and both forms are one."""

import diffusers
import pytest
import torch

from miles_rollout.loading import load_pipeline
from miles_rollout.testing import tiny_cosmos3, tiny_cosmos3_distilled, tiny_cosmos3_modular
from tests.miles_rollout.tiny_cosmos3 import GUIDED, SIZE, call, conditions

MODULES = ("transformer", "vae", "sound_tokenizer")


@pytest.fixture(scope="module")
def pipeline():
    return tiny_cosmos3()


def test_the_classes_are_the_real_ones(pipeline):
    assert type(pipeline) is diffusers.Cosmos3OmniPipeline
    assert type(pipeline.transformer) is diffusers.Cosmos3OmniTransformer
    assert type(pipeline.vae) is diffusers.AutoencoderKLWan
    assert type(pipeline.sound_tokenizer) is diffusers.Cosmos3AVAEAudioTokenizer
    assert type(pipeline.scheduler) is diffusers.UniPCMultistepScheduler
    assert type(tiny_cosmos3_modular()) is diffusers.Cosmos3OmniModularPipeline
    assert type(tiny_cosmos3_distilled()) is diffusers.Cosmos3DistilledModularPipeline
    assert not any(getattr(pipeline, name).training for name in MODULES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", conditions())
def test_both_forms_make_the_same_latents_bitwise(kind, dtype):
    assert_same("latent", kind, dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("policy_sound", torch.float32), ("t2va", torch.bfloat16)]
)
def test_both_forms_make_the_same_media_bitwise(kind, dtype):
    assert_same("pt", kind, dtype)


def assert_same(output_type, kind, dtype):
    names = ("tiny-cosmos3", "tiny-cosmos3-modular")
    ours, theirs = (
        call(load_pipeline(name, dtype), output_type, **conditions()[kind]) for name in names
    )
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
        assert ours[name].std() > 0.01


def test_a_second_of_sound_is_a_second(pipeline):
    made = call(pipeline, "pt", enable_sound=True, **SIZE | {"num_frames": 25})
    assert made["video"].shape == (25, 3, 64, 64)
    assert made["audio"].shape == (2, 27 * 320)  # 25 / 24 s at 25 latents a second, rounded up


def test_prompts_noise_and_guidance_change_all_modalities(pipeline):
    kind = conditions()["policy_sound"]
    made = call(pipeline, **kind)
    assert made.keys() == {"video", "audio", "action"}
    others = [
        {"prompt": "a dog"},
        {"negative_prompt": "a dog"},
        {"guidance_scale": 1.0},
        {"generator": torch.Generator().manual_seed(1)},
    ]
    for changed in others:
        other = call(pipeline, **kind | changed)
        for name in made:
            assert not torch.equal(made[name], other[name]), (changed, name)


def test_modalities_see_each_other(pipeline):
    kind = conditions()["policy_sound"]
    latents = {
        "latents": torch.zeros(1, 4, 2, 3, 4),
        "sound_latents": torch.zeros(6, 6),
        "action_latents": torch.zeros(4, 12),
    }
    noise = {name: torch.randn(z.shape, generator=_seeded()) for name, z in latents.items()}
    base = call(pipeline, **kind, **noise)
    for name in latents:
        other = call(pipeline, **kind, **{**noise, name: noise[name] * 0.5})
        assert all(not torch.equal(base[stream], other[stream]) for stream in base), name


def test_it_depends_on_the_seed_alone(pipeline):
    again, other = tiny_cosmos3(), tiny_cosmos3(seed=1)
    for name in MODULES:
        weights = [dict(getattr(p, name).named_parameters()) for p in (pipeline, again, other)]
        assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
        assert any(not torch.equal(weights[0][k], weights[2][k]) for k in weights[0])


def test_no_weight_and_no_latent_statistic_is_trivial(pipeline):
    for name in MODULES:
        for key, weight in getattr(pipeline, name).named_parameters():
            assert weight.numel() == 1 or weight.std() > 0, key
    assert all(mean != 0 for mean in pipeline.vae.config.latents_mean)
    assert all(std not in (0, 1) for std in pipeline.vae.config.latents_std)


def test_half_precision_is_laid_out_as_in_the_released_model():
    pipeline = load_pipeline("tiny-cosmos3", torch.bfloat16)
    dtypes = {name: p.dtype for name, p in pipeline.transformer.named_parameters()}
    assert dtypes["time_embedder.linear_1.weight"] == torch.float32
    assert dtypes["proj_in.weight"] == torch.bfloat16
    assert pipeline.vae.dtype == pipeline.sound_tokenizer.dtype == torch.bfloat16


def test_the_distilled_form_adds_noise_of_its_own():
    pipeline = tiny_cosmos3_distilled()
    given = {"prompt": "a dog", **SIZE, "output": "latents", "output_type": "latent"}
    latents = torch.randn(1, 4, 2, 4, 4, generator=_seeded())
    first, again, other = (
        pipeline(**given, latents=latents, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(pipeline.scheduler.timesteps) == 4
    assert GUIDED.keys().isdisjoint(given)


def _seeded():
    return torch.Generator().manual_seed(9)
