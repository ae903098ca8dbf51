"""Tiny Qwen-VL text encoders of the real classes, and processors that do without torchvision."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)

from miles_rollout.testing import vocabulary

WIDTH = 32
"""Of the hidden states."""

_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class _AnyPart:
    """Without torchvision transformers has no class to compare a processor's parts with."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
        """Every part is taken as it is, also a video processor of None."""
        return type(argument)


class ImageProcessor3(_AnyPart, Qwen3VLProcessor):
    """A ``Qwen3VLProcessor`` for text and images."""


class ImageProcessor2(_AnyPart, Qwen2VLProcessor):
    """A ``Qwen2VLProcessor`` for text and images."""


def qwen3_processor(tokenizer: Any) -> Qwen3VLProcessor:
    """Patches of 16 pixels, merged 2 x 2, as in Qwen3-VL."""
    return ImageProcessor3(image_processor(16), tokenizer, chat_template=_CHAT)


def qwen2_processor(tokenizer: Any) -> Qwen2VLProcessor:
    """Patches of 14 pixels, merged 2 x 2, as in Qwen2.5-VL."""
    return ImageProcessor2(image_processor(14), tokenizer, chat_template=_CHAT)


def qwen3_encoder(vocab_size: int) -> Qwen3VLForConditionalGeneration:
    """Two layers of text and one of vision; draws from the global generator."""
    text = _text(vocab_size) | {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    }
    vision = _VISION | {"deepstack_visual_indexes": [0]}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, **_special_ids())
    )


def qwen2_encoder(vocab_size: int) -> Qwen2_5_VLForConditionalGeneration:
    """Two layers of text and one of vision; draws from the global generator."""
    text = _text(vocab_size) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [4, 2, 2],
        },
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=_VISION, **_special_ids())
    )


_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": WIDTH,
}


def _text(vocab_size: int) -> dict[str, Any]:
    ids = {token: index for index, token in enumerate(vocabulary.SPECIAL)}
    return {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": vocab_size,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": False,
    }


def _special_ids() -> dict[str, int]:
    ids = {token: index for index, token in enumerate(vocabulary.SPECIAL)}
    names = ("vision_start", "vision_end", "image_pad", "video_pad")
    arguments = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {a: ids[f"<|{name}|>"] for a, name in zip(arguments, names, strict=True)}


def image_processor(patch_size: int, **kwargs: Any) -> Any:
    """The one that works on PIL images; older versions of transformers have no other.

    It takes small pictures as they are: Qwen-Image-2.1 needs a patch for every latent.
    """
    name = "Qwen2VLImageProcessor"
    cls = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    small = {"min_pixels": (2 * patch_size) ** 2}
    return cls(patch_size=patch_size, merge_size=2, **small, **kwargs)
