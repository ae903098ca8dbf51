"""A FLUX.2-klein pipeline of the real classes that fits into a test; random weights."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles_rollout.testing import vocabulary
from miles_rollout.testing.weights import enliven

_LATENT_CHANNELS = 4
_WIDTH = 16
_LAYERS_READ = 3
_PATCH_CHANNELS = 4 * _LATENT_CHANNELS
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_flux_2_klein(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> Flux2KleinPipeline:
    """A ``Flux2KleinPipeline`` on the CPU, without a download, in eval mode.

    It depends on ``seed`` alone and leaves the global generator alone. Like the base form of klein
    it guides by an empty prompt. One token is 8 x 8 pixels. Set height and width: the default is
    128 latents a side.
    """
    tokenizer = vocabulary.tokenizer()
    tokenizer.chat_template = _CHAT
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
    pipeline = Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=4096,
            time_shift_type="exponential",
        ),
        tokenizer=tokenizer,
        **modules,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline if dtype == torch.float32 else pipeline.to(dtype)


def _transformer() -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        in_channels=_PATCH_CHANNELS,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_LAYERS_READ * _WIDTH,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )


def _vae() -> AutoencoderKLFlux2:
    """Its batch norm holds the statistics of the latents: not 0 and 1, so that they are seen."""
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(4, 8, 8),
        layers_per_block=1,
        latent_channels=_LATENT_CHANNELS,
        norm_num_groups=2,
        sample_size=32,
    )
    vae.bn.running_mean.copy_(torch.linspace(-0.3, 0.4, _PATCH_CHANNELS))
    vae.bn.running_var.copy_(torch.linspace(0.5, 1.6, _PATCH_CHANNELS))
    return vae


def _text_encoder() -> Qwen3ForCausalLM:
    """Narrow and deep: the pipeline reads the hidden states after layers 9, 18 and 27."""
    special = {token: index for index, token in enumerate(vocabulary.SPECIAL)}
    return Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=_WIDTH,
            intermediate_size=_WIDTH,
            num_hidden_layers=28,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            vocab_size=768,
            bos_token_id=special["<|endoftext|>"],
            eos_token_id=special["<|im_end|>"],
            pad_token_id=special["<|endoftext|>"],
            tie_word_embeddings=False,
        )
    )
