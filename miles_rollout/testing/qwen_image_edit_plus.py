"""A Qwen-Image-Edit-Plus pipeline of the real classes that fits into a test; random weights.

Whatever the size of a reference image, the pipeline scales it to 1024 x 1024 pixels (or as many in
another shape) for the VAE and 384 x 384 for the text encoder. So this VAE compresses 64 x 64, where
the released one compresses 8 x 8, and is thin where pixels are many: a reference costs 64 tokens
and a third of a second.
"""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPlusPipeline,
    QwenImageTransformer2DModel,
)

from miles_rollout.testing import qwen_vl, vocabulary
from miles_rollout.testing.qwen_image import SCHEDULER
from miles_rollout.testing.weights import enliven, keep_contrast

_LATENT_CHANNELS = 4
_HEAD_AXES = (4, 6, 6)
# Not 0 and 1, so that leaving them out is seen.
_LATENTS_MEAN = [0.1, -0.2, 0.3, -0.1]
_LATENTS_STD = [1.1, 0.9, 1.3, 0.7]


def tiny_qwen_image_edit_plus(
    *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> QwenImageEditPlusPipeline:
    """A ``QwenImageEditPlusPipeline`` on the CPU, without a download, in eval mode.

    It depends on ``seed`` alone and leaves the global generator alone. One token is 128 x 128 pixels.
    Set height and width: the default is as many pixels as 1024 x 1024.
    """
    tokenizer = vocabulary.edit_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = {
            "transformer": _transformer(),
            "vae": _vae(),
            "text_encoder": qwen_vl.qwen2_encoder(vocab_size=768),
        }
    keep_contrast(modules["vae"])
    generator = torch.Generator().manual_seed(seed)
    for module in modules.values():
        enliven(module.eval(), generator)
    pipeline = QwenImageEditPlusPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        tokenizer=tokenizer,
        processor=qwen_vl.qwen2_processor(tokenizer),
        **modules,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline if dtype == torch.float32 else pipeline.to(dtype)


def _transformer() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * _LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=sum(_HEAD_AXES),
        axes_dims_rope=_HEAD_AXES,
        joint_attention_dim=qwen_vl.WIDTH,
        guidance_embeds=False,
    )


def _vae() -> AutoencoderKLQwenImage:
    """Without residual blocks on the way down: they would work on a million pixels."""
    return AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=_LATENT_CHANNELS,
        dim_mult=[1] * 7,
        num_res_blocks=0,
        temperal_downsample=[False, True, True, True, True, True],
        latents_mean=_LATENTS_MEAN,
        latents_std=_LATENTS_STD,
    )
