"""The tiny Qwen-Image is a real pipeline, seeded, and nothing in it is trivial."""

import json

import diffusers
import pytest
import torch
import transformers
from torch import Tensor

from miles_rollout.testing import qwen_image, shapes, tiny_qwen_image, vocabulary
from miles_rollout.testing.shape_score import score

LORA_TARGETS = [
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
]


@pytest.fixture(scope="module")
def random():
    return tiny_qwen_image()


@pytest.fixture(scope="module")
def pretrained():
    return tiny_qwen_image(pretrained=True)


@pytest.fixture(params=["random", "pretrained"])
def pipeline(request):
    return request.getfixturevalue(request.param)


def weights(pipeline) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value
        for name, module in qwen_image.weight_modules(pipeline).items()
        for key, value in module.state_dict().items()
    }


def draw(pipeline, prompts: list[str], *, scale: float = 1.0, steps: int = 4) -> Tensor:
    return pipeline(
        prompts,
        negative_prompt=[" "] * len(prompts) if scale > 1 else None,
        true_cfg_scale=scale,
        num_inference_steps=steps,
        height=32,
        width=32,
        generator=[torch.Generator().manual_seed(i) for i in range(len(prompts))],
        output_type="pt",
    ).images


def velocity(pipeline, prompt: str, sigma: float) -> Tensor:
    embeds, mask = pipeline.encode_prompt(prompt)
    with torch.no_grad():
        return pipeline.transformer(
            hidden_states=torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0)),
            timestep=torch.tensor([sigma]),
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, 4, 4)]],
            return_dict=False,
        )[0]


def test_every_component_is_of_the_real_class(pipeline):
    assert type(pipeline) is diffusers.QwenImagePipeline
    assert type(pipeline.transformer) is diffusers.QwenImageTransformer2DModel
    assert type(pipeline.vae) is diffusers.AutoencoderKLQwenImage
    assert type(pipeline.text_encoder) is transformers.Qwen2_5_VLForConditionalGeneration
    assert type(pipeline.tokenizer) is transformers.Qwen2Tokenizer
    assert type(pipeline.scheduler) is diffusers.FlowMatchEulerDiscreteScheduler
    assert {name: pipeline.scheduler.config[name] for name in qwen_image.SCHEDULER} == (
        qwen_image.SCHEDULER
    )


def test_every_module_is_in_eval_mode(pipeline):
    for module in qwen_image.weight_modules(pipeline).values():
        assert not any(part.training for part in module.modules())


def test_the_random_form_is_small_and_the_pretrained_one_larger(random, pretrained):
    assert 0.1e6 < sum(weight.numel() for weight in weights(random).values()) < 0.6e6
    assert 1e6 < sum(weight.numel() for weight in weights(pretrained).values()) < 3e6


def test_the_data_is_small():
    files = [file for file in qwen_image.WEIGHTS.parent.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 6e6


@pytest.mark.parametrize("target", LORA_TARGETS)
def test_lora_finds_its_targets(pipeline, target):
    for block in pipeline.transformer.transformer_blocks:
        assert isinstance(block.get_submodule(target), torch.nn.Linear)


def test_the_random_form_depends_on_the_seed_alone(random):
    again, other = weights(tiny_qwen_image()), weights(tiny_qwen_image(seed=1))
    for name, weight in weights(random).items():
        assert torch.equal(weight, again[name])
        assert not torch.equal(weight, other[name])


def test_no_weight_is_trivial(random):
    for name, weight in weights(random).items():
        assert weight.numel() == 1 or weight.std() > 0, name


def test_the_dtype_reaches_every_module():
    for pipeline in (tiny_qwen_image(dtype=torch.bfloat16), tiny_qwen_image()):
        dtypes = {weight.dtype for weight in weights(pipeline).values()}
        assert dtypes == {pipeline.transformer.dtype}


def test_prompt_and_timestep_matter(pipeline):
    base = velocity(pipeline, "a red circle on a blue background", 0.5)
    prompt = velocity(pipeline, "a red square on a blue background", 0.5)
    timestep = velocity(pipeline, "a red circle on a blue background", 0.6)
    assert (prompt - base).std() > 0.01 * base.std()
    assert (timestep - base).std() > 0.01 * base.std()


def test_guidance_matters(random):
    prompts = ["a red circle on a blue background"]
    assert not torch.equal(draw(random, prompts), draw(random, prompts, scale=4.0))


def test_the_latents_are_not_standard(pipeline):
    mean, std = pipeline.vae.config.latents_mean, pipeline.vae.config.latents_std
    assert len(mean) == len(std) == pipeline.vae.config.z_dim
    assert all(abs(value) > 1e-3 for value in mean)
    assert all(abs(value - 1) > 1e-3 for value in std)


def test_the_committed_vocabulary_is_the_built_one():
    assert json.loads(vocabulary.FILE.read_text(encoding="ascii")) == vocabulary.build()


def test_the_template_starts_with_as_many_tokens_as_the_pipeline_drops(random):
    start, end = random.prompt_template_encode.split("{}")
    tokens = random.tokenizer(start).input_ids
    assert len(tokens) == random.prompt_template_encode_start_idx == 34
    for prompt in ("a red circle", "Zebra", " ", "12 \u00e9\u65e5"):
        whole = random.tokenizer(start + prompt + end).input_ids
        assert whole[:34] == tokens
        assert random.tokenizer.decode(whole[34:]) == prompt + end


def test_prompts_of_different_length_give_different_numbers_of_tokens(random):
    prompts = ["a red circle", "a red circle on a blue background", "xylophone quartet"]
    _, mask = random.encode_prompt(prompts)
    short, long, unknown = mask.sum(1).tolist()
    assert (short, long) == (3 + 5, 7 + 5)
    assert unknown > long


def test_the_pretrained_form_ignores_the_seed(pretrained):
    other = weights(tiny_qwen_image(pretrained=True, seed=1))
    assert all(torch.equal(weight, other[name]) for name, weight in weights(pretrained).items())


def test_the_pretrained_form_draws_recognisably_but_not_perfectly(pretrained):
    """24 pictures from fixed noise: only another build of torch could change the score."""
    prompts = [prompt for prompt in shapes.HELD_OUT_PROMPTS[::4] for _ in range(3)]
    images = draw(pretrained, prompts, steps=10)
    scores = [score(i, shapes.parse_prompt(p)) for i, p in zip(images, prompts, strict=True)]
    assert 0.3 < sum(scores) / len(scores) < 0.85
