"""LTX-2 pipelines of the real classes that fit into a test: text to video with sound, two streams.

At 32 x 32 pixels and 9 frames a sample has 80 video tokens and 9 audio tokens. As in the released
checkpoints sequences are bent by a dynamic shift that ends at 0.1, prompts are padded on the left and
the padding is replaced by learned registers, and both VAEs' latents are normalised by statistics.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
from torch import nn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaTokenizer,
    SiglipVisionConfig,
)

from miles_rollout.testing.weights import enliven

_TEXT, _TEXT_LAYERS = 32, 2
_HEADS, _VIDEO, _AUDIO = 4, 32, 16
_VIDEO_CHANNELS, _AUDIO_CHANNELS, _MEL_BINS = 4, 2, 16
_REGISTERS = 8
"""A prompt's padded length must be a multiple of it; 128 in the released ones."""
_HOP, _AUDIO_RATE = 160, 16000
_NARROW = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1]]}


def tiny_ltx2(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, version: Literal["2.0", "2.3"] = "2.0"
) -> LTX2Pipeline:
    """An ``LTX2Pipeline`` on the CPU, without a download, in eval mode; it depends on ``seed`` alone.

    ``version`` 2.3 has gated attention, prompts that are modulated by the timestep, a projection of
    the prompt for each of the two media, and a vocoder that extends the band to 48 kHz. Two blocks:
    pass ``spatio_temporal_guidance_blocks=[1]``. Frame counts are 2 n + 1.
    """
    newer = version == "2.3"
    tokenizer = _tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules: dict[str, Any] = {
            "transformer": _transformer(newer),
            "connectors": _connectors(newer),
            "vae": _vae(),
            "audio_vae": _audio_vae(),
            "vocoder": _vocoder_with_bwe() if newer else _vocoder(),
            "text_encoder": _text_encoder(len(tokenizer)),
        }
    generator = torch.Generator().manual_seed(seed)
    for module in modules.values():
        enliven(module.eval(), generator)
    for name in ("vae", "audio_vae"):
        _draw_statistics(modules[name], generator)
    if newer:
        _draw_filters(modules["vocoder"], generator)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
    pipeline = LTX2Pipeline(scheduler=scheduler, tokenizer=tokenizer, **modules)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline if dtype == torch.float32 else pipeline.to(dtype)


def _draw_statistics(vae: nn.Module, generator: torch.Generator) -> None:
    """Not 0 and 1, so that leaving them out is seen."""
    mean, std = vae.get_buffer("latents_mean"), vae.get_buffer("latents_std")
    mean.copy_(0.3 * torch.randn(mean.shape, generator=generator))
    std.copy_(0.7 + 0.6 * torch.rand(std.shape, generator=generator))


def _draw_filters(vocoder: LTX2VocoderWithBWE, generator: torch.Generator) -> None:
    """A checkpoint brings them; they start as 0, which would silence the extension."""
    stft = vocoder.mel_stft
    for basis in (stft.stft_fn.forward_basis, stft.mel_basis):
        basis.copy_(torch.rand(basis.shape, generator=generator) / basis.shape[-1])


def _tokenizer() -> GemmaTokenizer:
    """Printable ASCII, one token a character; the rest falls back to bytes."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += ["\u2581", *(chr(code) for code in range(33, 127))]
    vocab = {token: index for index, token in enumerate(tokens)}
    return GemmaTokenizer(vocab=vocab, merges=[], model_max_length=1024)


def _text_encoder(vocab_size: int) -> Gemma3ForConditionalGeneration:
    text = Gemma3TextConfig(
        vocab_size=vocab_size,
        hidden_size=_TEXT,
        intermediate_size=_TEXT,
        num_hidden_layers=_TEXT_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=32,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)


def _connectors(newer: bool) -> LTX2TextConnectors:
    video, audio = (_VIDEO, _AUDIO) if newer else (_TEXT, _TEXT)
    return LTX2TextConnectors(
        caption_channels=_TEXT,
        text_proj_in_factor=_TEXT_LAYERS + 1,
        video_connector_num_attention_heads=_HEADS,
        video_connector_attention_head_dim=video // _HEADS,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=_REGISTERS,
        video_gated_attn=newer,
        audio_connector_num_attention_heads=_HEADS,
        audio_connector_attention_head_dim=audio // _HEADS,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=_REGISTERS,
        audio_gated_attn=newer,
        rope_type="split",
        per_modality_projections=newer,
        video_hidden_dim=video,
        audio_hidden_dim=audio,
        proj_bias=newer,
    )


def _transformer(newer: bool) -> LTX2VideoTransformer3DModel:
    return LTX2VideoTransformer3DModel(
        in_channels=_VIDEO_CHANNELS,
        out_channels=_VIDEO_CHANNELS,
        num_attention_heads=_HEADS,
        attention_head_dim=_VIDEO // _HEADS,
        cross_attention_dim=_VIDEO,
        vae_scale_factors=(2, 8, 8),
        gated_attn=newer,
        cross_attn_mod=newer,
        audio_in_channels=_AUDIO_CHANNELS * _MEL_BINS // 4,
        audio_out_channels=_AUDIO_CHANNELS * _MEL_BINS // 4,
        audio_num_attention_heads=_HEADS,
        audio_attention_head_dim=_AUDIO // _HEADS,
        audio_cross_attention_dim=_AUDIO,
        audio_gated_attn=newer,
        audio_cross_attn_mod=newer,
        num_layers=2,
        caption_channels=_TEXT,
        rope_type="split",
        use_prompt_embeddings=not newer,
        perturbed_attn=True,
    )


def _vae() -> AutoencoderKLLTX2Video:
    """A factor of 2 in time and 8 in space; 8 and 32 in the released ones."""
    return AutoencoderKLLTX2Video(
        latent_channels=_VIDEO_CHANNELS,
        block_out_channels=(8,),
        down_block_types=("LTX2VideoDownBlock3D",),
        decoder_block_out_channels=(8,),
        layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatiotemporal",),
        upsample_type=("spatiotemporal",),
        upsample_residual=(True,),
        upsample_factor=(2,),
        decoder_causal=False,
    )


def _audio_vae() -> AutoencoderKLLTX2Audio:
    """Its statistics are those of a packed token: latent channels x latent mel bins."""
    return AutoencoderKLLTX2Audio(
        base_channels=_AUDIO_CHANNELS * _MEL_BINS // 4,
        ch_mult=(1, 1, 2),
        num_res_blocks=1,
        resolution=32,
        latent_channels=_AUDIO_CHANNELS,
        sample_rate=_AUDIO_RATE,
        mel_hop_length=_HOP,
        mel_bins=_MEL_BINS,
    )


def _vocoder() -> LTX2Vocoder:
    """24 kHz from 100 spectra a second."""
    return LTX2Vocoder(
        in_channels=2 * _MEL_BINS,
        hidden_channels=16,
        upsample_kernel_sizes=[20, 12, 8],
        upsample_factors=[10, 6, 4],
        output_sampling_rate=24000,
        **_NARROW,
    )


def _vocoder_with_bwe() -> LTX2VocoderWithBWE:
    """16 kHz from 100 spectra a second, and 48 kHz from 200 of what that makes."""
    return LTX2VocoderWithBWE(
        in_channels=2 * _MEL_BINS,
        hidden_channels=16,
        upsample_kernel_sizes=[16, 11, 8],
        upsample_factors=[8, 5, 4],
        bwe_in_channels=2 * _MEL_BINS,
        bwe_hidden_channels=16,
        bwe_upsample_kernel_sizes=[20, 12, 8],
        bwe_upsample_factors=[10, 6, 4],
        filter_length=160,
        hop_length=80,
        window_length=160,
        num_mel_channels=_MEL_BINS,
        **_NARROW,
        **{f"bwe_{name}": value for name, value in _NARROW.items()},
    )
