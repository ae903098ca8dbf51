"""A Qwen-Image-2.1 pipeline of the real classes that fits into a test; random weights."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)

from miles_rollout.testing import qwen_vl, vocabulary
from miles_rollout.testing.qwen_image import SCHEDULER
from miles_rollout.testing.weights import enliven

_LATENT_CHANNELS = 4
_HEAD_AXES = (4, 6, 6)
# Not 0 and 1, so that leaving them out is seen.
_LATENTS_MEAN = [0.1, -0.2, 0.3, -0.1]
_LATENTS_STD = [1.1, 0.9, 1.3, 0.7]


def tiny_qwen_image_2_1(
    *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> QwenImage21Pipeline:
    """A ``QwenImage21Pipeline`` on the CPU, without a download, in eval mode.

    It depends on ``seed`` alone and leaves the global generator alone. One token is 16 x 16 pixels,
    sizes are multiples of 32, and a picture has a fourth channel, alpha, as in the released model.
    Set height and width, or ``output_resolution``: the default is 1024.
    """
    tokenizer = vocabulary.tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = {
            "transformer": _transformer(),
            "vae": _vae(),
            "text_encoder": qwen_vl.qwen3_encoder(vocab_size=768),
        }
    generator = torch.Generator().manual_seed(seed)
    for module in modules.values():
        enliven(module.eval(), generator)
    pipeline = QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        processor=qwen_vl.qwen3_processor(tokenizer),
        **modules,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline if dtype == torch.float32 else pipeline.to(dtype)


def _transformer() -> QwenImage21Transformer2DModel:
    return QwenImage21Transformer2DModel(
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=sum(_HEAD_AXES),
        num_attention_heads=2,
        context_in_dim=qwen_vl.WIDTH,
        axes_dims_rope=_HEAD_AXES,
    )


def _vae() -> AutoencoderKLQwenImage21:
    """Five levels: the pipeline takes for granted that 16 pixels are one latent."""
    return AutoencoderKLQwenImage21(
        base_dim=4,
        decoder_base_dim=6,
        z_dim=_LATENT_CHANNELS,
        dim_mult=[1, 2, 2, 2, 2],
        num_res_blocks=1,
        latents_mean=_LATENTS_MEAN,
        latents_std=_LATENTS_STD,
    )
