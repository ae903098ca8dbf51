"""A Z-Image pipeline of the real classes that fits into a test; random weights."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import Qwen3Config, Qwen3Model

from miles_rollout.testing import vocabulary
from miles_rollout.testing.weights import enliven

_LATENT_CHANNELS = 4
_TEXT_WIDTH = 32


def tiny_z_image(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> ZImagePipeline:
    """A ``ZImagePipeline`` on the CPU, without a download, in eval mode.

    It depends on ``seed`` alone and draws 32 x 32 pixels from 4 x 4 tokens. The denoiser rounds the
    length of a prompt up to a multiple of 32, so the tokens are bytes: one prompt then fills one
    such block, and another one two. Shift, scale and the shift of the schedule are the released
    ones; set height and width, since the default is 1024.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = {
            "transformer": _transformer(),
            "vae": _vae(),
            "text_encoder": _text_encoder(),
        }
    generator = torch.Generator().manual_seed(seed)
    for module in modules.values():
        enliven(module.eval(), generator)
    pipeline = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        tokenizer=vocabulary.chat_tokenizer(words=False),
        **modules,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline if dtype == torch.float32 else pipeline.to(dtype)


def _transformer() -> ZImageTransformer2DModel:
    return ZImageTransformer2DModel(
        in_channels=_LATENT_CHANNELS,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=_TEXT_WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[160, 32, 32],
    )


def _vae() -> AutoencoderKL:
    """Scale and shift are those of FLUX.1's, which Z-Image uses."""
    return AutoencoderKL(
        sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(4, 8, 8),
        layers_per_block=1,
        latent_channels=_LATENT_CHANNELS,
        norm_num_groups=2,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )


def _text_encoder() -> Qwen3Model:
    """Two layers: the pipeline takes the state before the last one."""
    special = {token: index for index, token in enumerate(vocabulary.SPECIAL)}
    return Qwen3Model(
        Qwen3Config(
            vocab_size=768,
            hidden_size=_TEXT_WIDTH,
            intermediate_size=_TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            bos_token_id=special["<|endoftext|>"],
            eos_token_id=special["<|im_end|>"],
            pad_token_id=special["<|endoftext|>"],
        )
    )
