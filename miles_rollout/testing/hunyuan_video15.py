"""A HunyuanVideo 1.5 pipeline of the real classes that fits into a test; random weights."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    T5Config,
    T5EncoderModel,
)

from miles_rollout.testing import vocabulary
from miles_rollout.testing.weights import enliven

_LATENT_CHANNELS = 4
_TEXT_WIDTH = 32
_GLYPH_WIDTH = 24
_IMAGE_WIDTH = 16


def tiny_hunyuan_video15(
    *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> HunyuanVideo15Pipeline:
    """A ``HunyuanVideo15Pipeline`` on the CPU, without a download, in eval mode.

    It depends on ``seed`` alone. A call of 32 x 32 pixels and 5 frames has two latent frames of
    2 x 2 tokens. Prompts of up to 48 tokens, glyphs of up to 16 bytes and 4 image tokens stand for
    the released 1000, 256 and 729, and the system message is short. The guider is the released
    kind at scale 6.
    """
    tokenizer = vocabulary.chat_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = {
            "transformer": _transformer(),
            "vae": _vae(),
            "text_encoder": _text_encoder(),
            "text_encoder_2": _byt5(),
        }
    generator = torch.Generator().manual_seed(seed)
    for module in modules.values():
        enliven(module.eval(), generator)
    pipeline = HunyuanVideo15Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        tokenizer=tokenizer,
        tokenizer_2=ByT5Tokenizer(extra_ids=0),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
        **modules,
    )
    pipeline.tokenizer_max_length = 48
    pipeline.tokenizer_2_max_length = 16
    pipeline.vision_num_semantic_tokens = 4
    pipeline.system_message = "Describe the color and shape of the objects"
    # The tokens in front of the prompt, which the pipeline cuts off.
    front = f"<|im_start|>system\n{pipeline.system_message}<|im_end|>\n<|im_start|>user\n"
    pipeline.prompt_template_encode_start_idx = len(tokenizer(front).input_ids)
    # In diffusers 0.42 the VAE's attention mask does not fit a batch of several videos.
    pipeline.vae.enable_slicing()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline if dtype == torch.float32 else pipeline.to(dtype)


def _transformer() -> HunyuanVideo15Transformer3DModel:
    return HunyuanVideo15Transformer3DModel(
        in_channels=2 * _LATENT_CHANNELS + 1,
        out_channels=_LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=_TEXT_WIDTH,
        text_embed_2_dim=_GLYPH_WIDTH,
        image_embed_dim=_IMAGE_WIDTH,
        rope_axes_dim=(4, 6, 6),
        task_type="t2v",
    )


def _vae() -> AutoencoderKLHunyuanVideo15:
    """Compresses 16 x 16 pixels and 4 frames, and scales, as the released one does."""
    return AutoencoderKLHunyuanVideo15(
        latent_channels=_LATENT_CHANNELS,
        block_out_channels=(8, 8, 8, 8, 8),
        layers_per_block=1,
        scaling_factor=1.03682,
    )


def _text_encoder() -> Qwen2_5_VLTextModel:
    """Three layers: the pipeline takes the state before the last two."""
    special = {token: index for index, token in enumerate(vocabulary.SPECIAL)}
    return Qwen2_5_VLTextModel(
        Qwen2_5_VLTextConfig(
            vocab_size=768,
            hidden_size=_TEXT_WIDTH,
            intermediate_size=_TEXT_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [4, 2, 2],
            },
            bos_token_id=special["<|endoftext|>"],
            eos_token_id=special["<|im_end|>"],
            pad_token_id=special["<|endoftext|>"],
        )
    )


def _byt5() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=384,
            d_model=_GLYPH_WIDTH,
            d_kv=8,
            d_ff=_GLYPH_WIDTH,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
        )
    )
