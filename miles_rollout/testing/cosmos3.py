"""Cosmos3 pipelines of the real classes that fit into a test: video, sound and actions.

A request is one sample. Its sizes are multiples of 16 pixels and 4 n + 1 frames; an action request
has a canvas of 256 pixels at least. All share one denoiser with a head for each modality.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    Cosmos3AVAEAudioTokenizer,
    Cosmos3DistilledBlocks,
    Cosmos3DistilledModularPipeline,
    Cosmos3OmniBlocks,
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from torch import nn

from miles_rollout.loading import hide_progress_bars
from miles_rollout.testing import vocabulary
from miles_rollout.testing.weights import enliven

_CHANNELS = 4
_SOUND_CHANNELS = 6
# Not 0 and 1, so that leaving them out is seen.
_MEAN, _STD = [0.1, -0.2, 0.3, -0.1], [1.1, 0.9, 1.3, 0.7]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_cosmos3(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> Cosmos3OmniPipeline:
    """A ``Cosmos3OmniPipeline`` on the CPU, without a download, in eval mode.

    Depends on ``seed`` alone and leaves the global generator alone. Call it with ``prompt,
    height=64, width=64, num_frames=5, num_inference_steps, generator``, and ``enable_sound=True`` or
    an ``action`` condition. ``dtype`` is that of all modules, but for what the released models keep
    in float32.
    """
    pipeline = Cosmos3OmniPipeline(
        **_modules(seed, dtype), scheduler=_scheduler(), enable_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tiny_cosmos3_modular(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The same model as a ``Cosmos3OmniModularPipeline``."""
    return _filled(Cosmos3OmniBlocks().init_pipeline(), _modules(seed, dtype), _scheduler())


def tiny_cosmos3_distilled(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A ``Cosmos3DistilledModularPipeline``: a fixed schedule of four sigmas, no guidance.

    Its scheduler adds noise of its own to every step, as that of the released models does.
    """
    modules = _modules(seed, dtype)
    del modules["sound_tokenizer"]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0, stochastic_sampling=True)
    pipeline = Cosmos3DistilledModularPipeline(Cosmos3DistilledBlocks())
    pipeline.update_components(distilled_sigmas=[1.0, 0.94, 0.83, 0.6])
    return _filled(pipeline, modules, scheduler)


def _filled(pipeline: Any, modules: dict[str, Any], scheduler: Any) -> Any:
    pipeline.update_components(**modules, scheduler=scheduler, enable_safety_checker=False)
    hide_progress_bars(pipeline)
    return pipeline


def _scheduler() -> UniPCMultistepScheduler:
    """Flow sigmas, without the Karras spacing of some releases, at which numpy warns."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )


def _modules(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    tokenizer = vocabulary.tokenizer()
    tokenizer.chat_template = _TEMPLATE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules: dict[str, nn.Module] = {
            "transformer": _transformer(len(tokenizer)),
            "vae": _vae(),
            "sound_tokenizer": _sound_tokenizer(),
        }
    generator = torch.Generator().manual_seed(seed)
    for module in modules.values():
        enliven(module, generator)
        module.eval()
        _cast(module, dtype)
    return {**modules, "text_tokenizer": tokenizer}


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """As loading in this dtype does: some parts stay in float32."""
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, parameter in module.named_parameters():
        if not kept & set(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def _transformer(vocabulary_size: int) -> Cosmos3OmniTransformer:
    return Cosmos3OmniTransformer(
        hidden_size=24,
        head_dim=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        intermediate_size=48,
        vocab_size=vocabulary_size,
        rope_axes_dim=[2, 2, 2],
        latent_channel=_CHANNELS,
        latent_patch_size=2,
        patch_latent_dim=4 * _CHANNELS,
        sound_gen=True,
        sound_dim=_SOUND_CHANNELS,
        action_gen=True,
        action_dim=12,  # wider than an embodiment's 9 or 10, so that there is padding
    )


def _vae() -> AutoencoderKLWan:
    """Of Wan 2.2's kind: residual, 16 pixels to a latent."""
    return AutoencoderKLWan(
        base_dim=2,
        decoder_base_dim=4,
        z_dim=_CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
        latents_mean=_MEAN,
        latents_std=_STD,
    )


def _sound_tokenizer() -> Cosmos3AVAEAudioTokenizer:
    """8 kHz stereo, 320 samples to a latent: 25 latents a second, as the denoiser counts them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers' use of torch's old weight_norm
        return Cosmos3AVAEAudioTokenizer(
            sampling_rate=8000,
            vocoder_input_dim=_SOUND_CHANNELS,
            dec_dim=4,
            dec_c_mults=(1, 2, 2),
            dec_strides=(4, 8, 10),
            enc_dim=4,
            enc_latent_dim=2 * _SOUND_CHANNELS,
            enc_c_mults=(1, 1),
            enc_strides=(4, 20),
            enc_num_blocks=1,
            enc_n_fft=16,
            enc_hop_length=4,
        )
