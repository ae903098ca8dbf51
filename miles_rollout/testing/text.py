"""Tiny text encoders of the real classes for SD3 and FLUX: CLIP and T5, character by character.

Their vocabularies are written down here and never trained: CLIP's BPE trainer gives other token
ids from one process to the next.
"""

from __future__ import annotations

from transformers import (
    CLIPTextConfig,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

CLIP_WIDTH = 32


def clip_tokenizer() -> CLIPTokenizer:
    """Bytes, inside and at the end of a word, without a merge; 77 tokens as in the real one."""
    letters = sorted(bytes_to_unicode().values())
    tokens = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=[], model_max_length=77
    )


def clip_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    """Two layers, so that the last hidden state and the one before it differ."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=CLIP_WIDTH,
        intermediate_size=CLIP_WIDTH,
        projection_dim=CLIP_WIDTH,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=77,
    )


def t5_tokenizer() -> T5Tokenizer:
    """Printable ASCII, one piece a character; the rest is unknown."""
    special = ["<pad>", "</s>", "<unk>"]
    letters = [chr(code) for code in range(33, 127)]
    pieces = [(token, 0.0) for token in special] + [("\u2581", -2.0)]
    return T5Tokenizer(
        vocab=pieces + [(letter, -3.0) for letter in letters], extra_ids=0, model_max_length=512
    )


def t5_encoder(tokenizer: T5Tokenizer, width: int) -> T5EncoderModel:
    """One layer; draws its weights from the global generator, as all of transformers does."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=8,
        d_ff=width,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
    )
    return T5EncoderModel(config)
