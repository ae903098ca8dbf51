"""A FLUX.1 pipeline of the real classes that fits into a test; random weights."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import CLIPTextModel

from miles_rollout.testing import text
from miles_rollout.testing.weights import enliven

_LATENT_CHANNELS = 4
_T5_WIDTH = 48


def tiny_flux(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> FluxPipeline:
    """A ``FluxPipeline`` on the CPU, without a download, in eval mode.

    It depends on ``seed`` alone. Like FLUX.1-dev it embeds the guidance scale, shifts its schedule
    by the size of the picture, and scales and shifts its latents. Set height and width: its
    default, as in all of FLUX, is 128 latents a side.
    """
    clip, t5 = text.clip_tokenizer(), text.t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = {
            "transformer": _transformer(),
            "vae": _vae(),
            "text_encoder": CLIPTextModel(text.clip_config(clip)),
            "text_encoder_2": text.t5_encoder(t5, _T5_WIDTH),
        }
    generator = torch.Generator().manual_seed(seed)
    for module in modules.values():
        enliven(module.eval(), generator)
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=4096,
        ),
        tokenizer=clip,
        tokenizer_2=t5,
        **modules,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline if dtype == torch.float32 else pipeline.to(dtype)


def _transformer() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * _LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_T5_WIDTH,
        pooled_projection_dim=text.CLIP_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )


def _vae() -> AutoencoderKL:
    """Scale and shift are those of FLUX.1's."""
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
