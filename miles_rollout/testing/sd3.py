"""A Stable Diffusion 3.5 pipeline of the real classes that fits into a test; random weights."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextModelWithProjection

from miles_rollout.testing import text
from miles_rollout.testing.weights import enliven

_LATENT_CHANNELS = 4
# Above that of both CLIPs side by side: the pipeline pads these, and cuts them if it is below.
_T5_WIDTH = 80


def tiny_sd3(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> StableDiffusion3Pipeline:
    """A ``StableDiffusion3Pipeline`` on the CPU, without a download, in eval mode.

    It depends on ``seed`` alone and draws 32 x 32 pixels. Like SD3.5 it has normalised queries and
    keys, a block with two attentions, a shift of 3, and latents that are scaled and shifted.
    """
    clip, t5 = text.clip_tokenizer(), text.t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = {
            "transformer": _transformer(),
            "vae": _vae(),
            "text_encoder": CLIPTextModelWithProjection(text.clip_config(clip)),
            "text_encoder_2": CLIPTextModelWithProjection(text.clip_config(clip)),
            "text_encoder_3": text.t5_encoder(t5, _T5_WIDTH),
        }
    generator = torch.Generator().manual_seed(seed)
    for module in modules.values():
        enliven(module.eval(), generator)
    pipeline = StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        tokenizer=clip,
        tokenizer_2=text.clip_tokenizer(),
        tokenizer_3=t5,
        **modules,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline if dtype == torch.float32 else pipeline.to(dtype)


def _transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=_T5_WIDTH,
        pooled_projection_dim=2 * text.CLIP_WIDTH,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def _vae() -> AutoencoderKL:
    """Scale and shift are those of SD3's."""
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
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )
