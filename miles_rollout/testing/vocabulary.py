"""The tiny tokenizer's vocabulary: bytes, and whole words for the sentences that matter.

Qwen-Image drops a fixed number of tokens from the front of its chat template, 34, counted with
the real tokenizer; Qwen-Image-Edit-Plus drops 64. The words of the templates are therefore single
tokens here as well, so that exactly the user's prompt and the template's end are left. Any other
word falls back to bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from miles_rollout.testing import shapes

FILE = Path(__file__).parent / "data" / "tokenizer.json"

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""First in the vocabulary, in this order."""

_SPACE = "\u0120"  # how byte-level BPE spells a space

_AFTER_SPACE = (
    "the image by detailing color shape size texture quantity text spatial relationships of "
    "objects and background a an on in with photo picture cat dog robot "
    f"{' '.join(shapes.PALETTE)} {' '.join(shapes.SHAPES)}"
).split()
_AT_START = ["Describe", "system", "user", "assistant"]
# Behind all others, which keep the tokens that Qwen-Image was pretrained with.
_LATER = ["no", "soft", "loud", "rising", "fading", "sound"]

_EDIT_AFTER_SPACE = (
    "( key features input then explain how user instruction should alter or modify Generate new "
    "that meets requirements while maintaining consistency original where appropriate"
)
_EDIT_AT_START = ["color", "'s", "),"]


def build(after_space: Sequence[str] = (), at_start: Sequence[str] = ()) -> dict[str, Any]:
    """The vocabulary and the merges, the same on every machine; with more words if asked for.

    Each word is merged letter by letter from its front. Words after a space come first: a merge
    inside of one can then never win over the merge that extends it from its space.
    """
    tokens = [*SPECIAL, *sorted(bytes_to_unicode().values())]
    merges: dict[tuple[str, str], None] = {}
    spaced = [_SPACE + word for word in (*_AFTER_SPACE, *after_space)]
    later = [_SPACE + word for word in _LATER]
    for word in [*spaced, *_AT_START, *at_start, *later]:
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
    tokens += [left + right for left, right in merges]
    return {
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": [list(merge) for merge in merges],
    }


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's, for pipelines that do not write it out themselves."""


def tokenizer(*, words: bool = True) -> Qwen2Tokenizer:
    """A real ``Qwen2Tokenizer`` over the committed vocabulary.

    Without ``words`` every byte is a token, so that short prompts of different length stay so
    where a pipeline rounds lengths up.
    """
    data = json.loads(FILE.read_text(encoding="ascii"))
    return _tokenizer(data if words else {**data, "merges": []})


def edit_tokenizer() -> Qwen2Tokenizer:
    """One with the words of Qwen-Image-Edit-Plus's template as well, and so with other ids."""
    return _tokenizer(build(_EDIT_AFTER_SPACE.split(), _EDIT_AT_START))


def _tokenizer(data: dict[str, Any]) -> Qwen2Tokenizer:
    return Qwen2Tokenizer(
        vocab=data["vocab"],
        merges=[tuple(merge) for merge in data["merges"]],
        model_max_length=131072,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL[1:]),
    )


def chat_tokenizer(*, words: bool = True) -> Qwen2Tokenizer:
    """The same with a chat template."""
    made = tokenizer(words=words)
    made.chat_template = CHAT_TEMPLATE
    return made
