"""A MiniMax H3 pipeline of the real classes that fits into a test: video with sound.

It takes text, key frames or references. A request is one sample: 32 x 32 pixels, at least 124 frames
(5 s, the shortest that H3 makes). Its audio decoder is narrow, since the real proportions would spend
nearly all the time there.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from miles_rollout.loading import hide_progress_bars
from miles_rollout.testing import qwen3_vl_processor, vocabulary
from miles_rollout.testing.weights import cast, enliven

_TEXT = 32
_LATENT_CHANNELS = 4
# Not 0 and 1, so that leaving them out is seen; and not the same for the two media.
_VIDEO_STATISTICS = ((0.1, -0.2, 0.3, -0.1), (1.1, 0.9, 1.3, 0.7))
_AUDIO_STATISTICS = ([-0.3, 0.2, 0.1, -0.1], [0.8, 1.2, 0.9, 1.4])


# The released model's are 768, 768 x 1344 and 2048.
_CANVAS = {
    "canvas_short_edge": 32,
    "canvas_max_pixels": 32 * 64,
    "reference_image_short_edge": 64,
}


def tiny_minimax_h3(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A ``MiniMaxH3ModularPipeline`` on the CPU, without a download, in eval mode.

    Depends on ``seed`` alone and leaves the global generator alone. Call it with
    ``prompt, height=32, width=32, num_frames=124, num_inference_steps, generator, output_type="pt"``,
    and with ``image``, ``last_image`` or ``references``.
    ``dtype`` is that of the denoisers and the text encoder, but for what the released H3 keeps in
    float32; the VAEs stay in float32, which is what their blocks hand them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = {
            "transformer": _transformer(),
            "vae": _vae(),
            "audio_vae": _audio_vae(),
            "text_encoder": _text_encoder(),
            "transformer_ref": _transformer(),
        }
    generator = torch.Generator().manual_seed(seed)
    for module in modules.values():
        enliven(module, generator)
        module.eval()
    for name in ("transformer", "transformer_ref", "text_encoder"):
        cast(modules[name], dtype)
    pipeline = MiniMaxH3Blocks().init_pipeline()
    pipeline.update_components(
        **modules,
        tokenizer=vocabulary.tokenizer(),
        processor=qwen3_vl_processor.processor(vocabulary.tokenizer()),
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
        **_CANVAS,
    )
    hide_progress_bars(pipeline)
    return pipeline


def _transformer() -> MiniMaxH3Transformer3DModel:
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        hidden_size=48,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=96,
        in_channels=_LATENT_CHANNELS,
        audio_in_channels=_LATENT_CHANNELS,
        text_dim=_TEXT,
        freq_dim=32,
        time_embed_hidden_dim=48,
        time_embed_dim=32,
        rope_freq_dim=4,
    )


def _vae() -> AutoencoderKLMiniMaxH3:
    mean, std = _VIDEO_STATISTICS
    return AutoencoderKLMiniMaxH3(
        latent_channels=_LATENT_CHANNELS,
        block_out_channels=(8,) * 6,
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        latents_mean=mean,
        latents_std=std,
    )


def _audio_vae() -> AutoencoderKLMiniMaxH3Audio:
    mean, std = _AUDIO_STATISTICS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers' use of torch's old weight_norm
        return AutoencoderKLMiniMaxH3Audio(
            encoder_dim=2,
            latent_dim=16,
            latent_channels=_LATENT_CHANNELS,
            num_attention_heads=2,
            decoder_dim=128,  # halved by each of the seven upsamplings
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1,),),
            latents_mean=mean,
            latents_std=std,
        )


def _text_encoder() -> Qwen3VLForConditionalGeneration:
    special = {token: index for index, token in enumerate(vocabulary.SPECIAL)}
    text = {
        "hidden_size": _TEXT,
        "intermediate_size": _TEXT,
        "num_hidden_layers": 51,  # H3 is conditioned on the state after layer 50
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "bos_token_id": special["<|endoftext|>"],
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": special["<|endoftext|>"],
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": _TEXT,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=text,
            vision_config=vision,
            vision_start_token_id=special["<|vision_start|>"],
            vision_end_token_id=special["<|vision_end|>"],
            image_token_id=special["<|image_pad|>"],
            video_token_id=special["<|video_pad|>"],
        )
    )
