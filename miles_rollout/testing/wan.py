"""Wan pipelines of the real classes that fit into a test, 2.1 and 2.2; random weights."""

from __future__ import annotations

from typing import Any, Literal

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import UMT5Config, UMT5EncoderModel

from miles_rollout.testing import text
from miles_rollout.testing.weights import cast, enliven

_TEXT_WIDTH = 32
# Not 0 and 1, so that leaving them out is seen.
_LATENTS_MEAN = [0.1, -0.2, 0.3, -0.1]
_LATENTS_STD = [1.1, 0.9, 1.3, 0.7]


def tiny_wan(
    *,
    version: Literal["2.1", "2.2"] = "2.1",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> WanPipeline:
    """A ``WanPipeline`` on the CPU, without a download, in eval mode.

    It depends on ``version`` and ``seed`` alone. 2.1 has one denoiser; 2.2 has two experts, of
    which the second takes over below seven eighths of the noise. Released weights of both come with
    UniPC; here 2.1 has ``FlowMatchEulerDiscreteScheduler``, the other one that the class takes. A
    call of 32 x 32 pixels and 5 frames has two latent frames of 2 x 2 tokens. What the released
    transformer keeps in float32 stays so whatever ``dtype`` is.
    """
    tokenizer = text.t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = {"transformer": _transformer(), "vae": _vae(), "text_encoder": _umt5(tokenizer)}
        if version == "2.2":
            modules["transformer_2"] = _transformer()
    generator = torch.Generator().manual_seed(seed)
    for module in modules.values():
        enliven(module.eval(), generator)
        cast(module, dtype)
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        scheduler=_scheduler(version),
        boundary_ratio=0.875 if version == "2.2" else None,
        **modules,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _scheduler(version: str) -> Any:
    if version == "2.1":
        return FlowMatchEulerDiscreteScheduler(shift=3.0)
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def _transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=len(_LATENTS_MEAN),
        out_channels=len(_LATENTS_MEAN),
        text_dim=_TEXT_WIDTH,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=32,
    )


def _vae() -> AutoencoderKLWan:
    """Compresses 8 x 8 pixels and 4 frames, as the released one does."""
    return AutoencoderKLWan(
        base_dim=4,
        z_dim=len(_LATENTS_MEAN),
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=_LATENTS_MEAN,
        latents_std=_LATENTS_STD,
    )


def _umt5(tokenizer: Any) -> UMT5EncoderModel:
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer),
            d_model=_TEXT_WIDTH,
            d_kv=8,
            d_ff=_TEXT_WIDTH,
            num_layers=1,
            num_heads=4,
            dropout_rate=0.0,
        )
    )
