"""A Sana pipeline of the real classes that fits into a test; random weights."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
)
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

from miles_rollout.testing.weights import enliven

_LATENT_CHANNELS = 4
_TEXT_WIDTH = 32


def tiny_sana(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> SanaPipeline:
    """A ``SanaPipeline`` on the CPU, without a download, in eval mode.

    It depends on ``seed`` alone. Its VAE makes 8 x 8 pixels of a latent one, so 32 x 32 pixels are
    16 tokens; ask for them with ``use_resolution_binning=False``, since the bins of the pipeline
    start at 512 pixels. The schedule is the released one: DPM over flow sigmas, shifted by 3.
    """
    tokenizer = gemma_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = {
            "transformer": _transformer(),
            "vae": _vae(),
            "text_encoder": _text_encoder(tokenizer),
        }
    generator = torch.Generator().manual_seed(seed)
    for module in modules.values():
        enliven(module.eval(), generator)
    pipeline = SanaPipeline(
        tokenizer=tokenizer,
        scheduler=DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        **modules,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline if dtype == torch.float32 else pipeline.to(dtype)


def gemma_tokenizer() -> GemmaTokenizer:
    """Bytes, and printable ASCII character by character; nothing is merged."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\n"]
    tokens += [chr(code) for code in range(33, 127)]
    return GemmaTokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        model_max_length=2048,
        add_bos_token=True,
    )


def _transformer() -> SanaTransformer2DModel:
    return SanaTransformer2DModel(
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=_TEXT_WIDTH,
        mlp_ratio=2.0,
        sample_size=16,
        patch_size=1,
    )


def _vae() -> AutoencoderDC:
    """The scale is that of Sana's."""
    return AutoencoderDC(
        latent_channels=_LATENT_CHANNELS,
        attention_head_dim=4,
        encoder_block_types=("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(4, 4, 8, 8),
        decoder_block_out_channels=(4, 4, 8, 8),
        encoder_layers_per_block=(1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        encoder_qkv_multiscales=((), (), (), (5,)),
        decoder_qkv_multiscales=((), (), (), (5,)),
        scaling_factor=0.41407,
    )


def _text_encoder(tokenizer: GemmaTokenizer) -> Gemma2Model:
    return Gemma2Model(
        Gemma2Config(
            vocab_size=len(tokenizer),
            hidden_size=_TEXT_WIDTH,
            intermediate_size=_TEXT_WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=4096,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
