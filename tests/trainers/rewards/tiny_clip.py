"""A random CLIP of a few thousand weights, as a folder that `from_pretrained` reads."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

from miles_rollout import Media

WIDTH = 12
MEAN, STD = (0.48, 0.45, 0.4), (0.27, 0.26, 0.28)
WORDS = ["<pad>", "<start>", "<end>", "<unk>", "a", "red", "blue", "cat", "dog", "one", "two"]
_WORDS_START, _WORDS_END = 1, 2


def save_tokenizer(folder: Path, *, max_length: int) -> None:
    """Words, between a start and an end."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>",
        special_tokens=[("<start>", _WORDS_START), ("<end>", _WORDS_END)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<start>",
        eos_token="<end>",
        unk_token="<unk>",
        model_max_length=max_length,
    ).save_pretrained(folder)


def save_clip(folder: Path) -> Path:
    """Model, tokenizer and image processor (32 x 32 pixels) in one folder."""
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        **size,
        "intermediate_size": 24,
        "vocab_size": len(WORDS),
        "max_position_embeddings": 7,
        "bos_token_id": _WORDS_START,
        "eos_token_id": _WORDS_END,
        "pad_token_id": 0,
    }
    vision = {**size, "intermediate_size": 24, "image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPModel(config)
        for parameter in model.parameters():  # the initial weights make all pictures alike
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder, max_length=7)
    CLIPImageProcessor(
        size={"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
        image_mean=MEAN,
        image_std=STD,
    ).save_pretrained(folder)
    return folder


def random_image(seed: int, height: int = 40, width: int = 64) -> torch.Tensor:
    """Not square, and of blocks that survive being made smaller."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand(3, height // 8, width // 8, generator=generator)
    return blocks.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2)


def samples(*seeds: int) -> list[Media]:
    return [Media(image=random_image(seed)) for seed in seeds]
