"""The tiny Qwen-Image-2.1, Qwen-Image-Edit-Plus and FLUX.2-klein are seeded and not trivial."""

import pytest
import torch

from miles_rollout.testing import qwen_vl, vocabulary
from tests.miles_rollout.models import MODELS, load, picture

NAMES = ["tiny-qwen-image-2-1", "tiny-qwen-image-edit-plus", "tiny-flux-2-klein"]


def statistics(pipe):
    """Mean and std of the latents, wherever the VAE keeps them."""
    vae = pipe.vae
    if hasattr(vae, "bn"):
        return vae.bn.running_mean, vae.bn.running_var.sqrt()
    return torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_them_is_trivial(name):
    pipe, model = load(name), MODELS[name]
    mean, std = statistics(pipe)
    assert mean.abs().min() > 1e-3
    assert (std - 1).abs().min() > 1e-3
    for part in ("transformer", "vae", "text_encoder"):
        for key, weight in getattr(pipe, part).named_parameters():
            assert weight.numel() == 1 or weight.std() > 0, key
    pixels = model.stock(pipe, False, "pt")["image"].float()
    assert pixels.std() > 0.05
    weight = pipe.text_encoder.get_input_embeddings().weight.data
    held = weight.clone()
    weight.copy_(held.roll(1, 1))
    changed = model.stock(pipe, False, "pt")["image"].float()
    weight.copy_(held)
    assert (changed - pixels).abs().max() > 1e-2


def test_exactly_the_templates_are_dropped():
    """As with the real tokenizer: the fixed counts of the pipelines fit these vocabularies."""
    edit = load("tiny-qwen-image-edit-plus")
    ids = edit.tokenizer(edit.prompt_template_encode.format("a cat")).input_ids
    left = ids[edit.prompt_template_encode_start_idx :]
    assert edit.tokenizer.decode(left) == "a cat<|im_end|>\n<|im_start|>assistant\n"
    assert max(vocabulary.edit_tokenizer().get_vocab().values()) < 768
    qwen = load("tiny-qwen-image-2-1")
    ids = qwen.processor.tokenizer(qwen.prompt_template_t2i.format("a cat")).input_ids
    left = qwen.processor.tokenizer.decode(ids[qwen._drop_idx :])
    assert left == "<|im_start|>user\na cat<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("make", [qwen_vl.qwen2_processor, qwen_vl.qwen3_processor])
def test_a_processor_puts_as_many_tokens_as_patches(make):
    processor = make(vocabulary.tokenizer())
    image = picture(96, 64, seed=1)
    made = processor(text=["<|vision_start|><|image_pad|><|vision_end|>a"], images=[image])
    frames, rows, columns = made["image_grid_thw"][0].tolist()
    token = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert made["input_ids"][0].count(token) == frames * rows * columns // 4
    patch = processor.image_processor.patch_size
    assert abs(rows * patch - 64) <= patch
    assert abs(columns * patch - 96) <= patch
