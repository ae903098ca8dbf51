"""A MiniMax H3 pipeline of the real classes that fits into a test: video with sound.

It takes text, key frames or references. A request is one sample: 32 x 32 pixels, at least 124 frames
(5 s, the shortest that H3 makes). Two forms share the code: random weights, for tests of what does
not depend on the film; and pretrained weights, which show the prompts of
``miles_rollout.testing.films``, for recipes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from miles_rollout.loading import hide_progress_bars
from miles_rollout.testing import qwen3_vl_processor, vocabulary
from miles_rollout.testing.weights import cast, enliven

WEIGHTS = Path(__file__).parent / "data" / "minimax_h3.safetensors"

_TEXT = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What differs between the two forms."""

    layers: int
    heads: int
    head: int
    hidden: int
    ffn: int
    video_channels: int
    audio_channels: int
    encoder_rates: tuple[int, ...]
    """Their product is the number of audio samples a latent, 1/40 of the sampling rate."""
    decoder_rates: tuple[int, ...]
    decoder_kernels: tuple[int, ...]
    audio_decoder: int
    """Halved by each of the upsamplings."""
    sampling_rate: int
    text_residual: float
    """Scale of what each of the 51 layers of the text encoder adds to a token."""


# The audio decoder is narrow: the real proportions would spend nearly all the time there.
RANDOM = Sizes(
    layers=2, heads=2, head=24, hidden=48, ffn=96, video_channels=4, audio_channels=4,
    encoder_rates=(2, 4, 4, 5, 5), decoder_rates=(5, 5, 2, 2, 2, 2, 2),
    decoder_kernels=(9, 9, 4, 4, 4, 4, 4), audio_decoder=128, sampling_rate=32000,
    text_residual=1.0,
)  # fmt: skip
# A quarter of H3's sampling rate, which makes decoding four times as fast. And the usual scale for
# a text encoder as deep as this, with which a random one keeps the words apart.
PRETRAINED = Sizes(
    layers=3, heads=2, head=32, hidden=64, ffn=128, video_channels=3, audio_channels=2,
    encoder_rates=(2, 4, 5, 5), decoder_rates=(5, 5, 8),
    decoder_kernels=(9, 9, 16), audio_decoder=64, sampling_rate=8000,
    text_residual=102**-0.5,
)  # fmt: skip

Statistics = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each latent channel."""

# Of the random form. Not 0 and 1, so that leaving them out is seen; and not the same for the two.
_VIDEO_STATISTICS = ((0.1, -0.2, 0.3, -0.1), (1.1, 0.9, 1.3, 0.7))
_AUDIO_STATISTICS = ([-0.3, 0.2, 0.1, -0.1], [0.8, 1.2, 0.9, 1.4])


# The released model's are 768, 768 x 1344 and 2048.
_CANVAS = {
    "canvas_short_edge": 32,
    "canvas_max_pixels": 32 * 64,
    "reference_image_short_edge": 64,
}


def tiny_minimax_h3(
    *, pretrained: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Any:
    """A ``MiniMaxH3ModularPipeline`` on the CPU, without a download, in eval mode.

    The random form depends on ``seed`` alone; the pretrained form ignores it. Call it with
    ``prompt, height=32, width=32, num_frames=124, num_inference_steps, generator, output_type="pt"``,
    and the random form also with ``image``, ``last_image`` or ``references``.

    In 7 evaluations (``num_inference_steps=8``) the pretrained form reaches a mean
    ``colour_and_loudness`` of 0.54 on the prompts that it was trained with (video 0.59, audio 0.49;
    samples of one prompt deviate by 0.15) and 0.46 on held-out ones (0.58 and 0.35); films that
    only pass through its decoders score 0.99. Its sound has 8 kHz, a quarter of H3's rate.

    ``dtype`` is that of the denoisers and the text encoder, but for what the released H3 keeps in
    float32; the VAEs stay in float32, which is what their blocks hand them.
    """
    if pretrained:
        return load(WEIGHTS, dtype=dtype)
    return build(RANDOM, _VIDEO_STATISTICS, _AUDIO_STATISTICS, seed=seed, dtype=dtype)


def load(weights: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The pretrained form with the weights of this file."""
    tensors = load_file(weights)
    video, audio = (
        tuple(tensors.pop(f"{name}.latents_{part}").tolist() for part in ("mean", "std"))
        for name in ("vae", "audio_vae")
    )
    pipeline = build(PRETRAINED, video, audio, seed=0, dtype=torch.float32)
    for name, module in trained_modules(pipeline).items():
        for key, parameter in module.named_parameters():
            parameter.data.copy_(tensors.pop(f"{name}.{key}"))
    assert not tensors
    for name in ("transformer", "transformer_ref", "text_encoder"):
        cast(getattr(pipeline, name), dtype)
    return pipeline


def trained_modules(pipeline: Any) -> dict[str, nn.Module]:
    """The modules whose weights the file holds. The encoders are those of the seed.

    Text to video asks nothing of the encoders of the VAEs, and all that of text is told apart.
    """
    return {
        "transformer": pipeline.transformer,
        "vae.post_quant_conv": pipeline.vae.post_quant_conv,
        "vae.decoder": pipeline.vae.decoder,
        "audio_vae.dec_in_proj": pipeline.audio_vae.dec_in_proj,
        "audio_vae.decoder": pipeline.audio_vae.decoder,
    }


def build(
    sizes: Sizes, video: Statistics, audio: Statistics, *, seed: int, dtype: torch.dtype
) -> Any:
    """The pipeline in these sizes with random weights; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = {
            "transformer": _transformer(sizes),
            "vae": _vae(sizes, video),
            "audio_vae": _audio_vae(sizes, audio),
            "text_encoder": _text_encoder(),
            "transformer_ref": _transformer(sizes),
        }
    generator = torch.Generator().manual_seed(seed)
    for module in modules.values():
        enliven(module, generator)
        module.eval()
    for layer in modules["text_encoder"].model.language_model.layers:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight.data.mul_(sizes.text_residual)
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


def _transformer(sizes: Sizes) -> MiniMaxH3Transformer3DModel:
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=sizes.heads,
        attention_head_dim=sizes.head,
        hidden_size=sizes.hidden,
        num_layers=sizes.layers,
        num_refiner_layers=1,
        ffn_dim=sizes.ffn,
        in_channels=sizes.video_channels,
        audio_in_channels=sizes.audio_channels,
        text_dim=_TEXT,
        freq_dim=32,
        time_embed_hidden_dim=48,
        time_embed_dim=32,
        rope_freq_dim=4,
    )


def _vae(sizes: Sizes, statistics: Statistics) -> AutoencoderKLMiniMaxH3:
    mean, std = statistics
    return AutoencoderKLMiniMaxH3(
        latent_channels=sizes.video_channels,
        block_out_channels=(8,) * 6,
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        latents_mean=tuple(mean),
        latents_std=tuple(std),
    )


def _audio_vae(sizes: Sizes, statistics: Statistics) -> AutoencoderKLMiniMaxH3Audio:
    mean, std = statistics
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers' use of torch's old weight_norm
        return AutoencoderKLMiniMaxH3Audio(
            encoder_dim=2,
            encoder_rates=sizes.encoder_rates,
            latent_dim=16,
            latent_channels=sizes.audio_channels,
            num_attention_heads=2,
            decoder_dim=sizes.audio_decoder,
            decoder_rates=sizes.decoder_rates,
            decoder_kernel_sizes=sizes.decoder_kernels,
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1,),),
            sampling_rate=sizes.sampling_rate,
            latents_mean=list(mean),
            latents_std=list(std),
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
