"""Qwen-Image-2.1: one sequence of text, reference images and the picture; packed latents.

The pipeline keeps the keys and values of text and references from its first step. A later call then
computes with what an earlier one left behind, so a rollout goes without that cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding
from miles_rollout.pipelines.common import check_sizes, even_sigmas, refuse
from miles_rollout.pipelines.refusals import EXPANDED
from miles_rollout.pipelines.two_calls import TwoCallAdapter, pad, true_cfg


@final
class QwenImage21Adapter(TwoCallAdapter):
    """``QwenImage21Pipeline``: text to image, one stream, one or two denoiser calls a step.

    The picture stands behind the padded prompt, so its position depends on the longest prompt of a
    call: with ``chunk_size=1`` a sample is the same in any company. Reference images work in a call
    of the pipeline; it does not take them together with embeddings, so the engine has no such input.
    """

    streams: ClassVar[tuple[str, ...]] = ("image",)
    cuts_prompts: ClassVar[bool] = False
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    batch_axes: ClassVar[Mapping[str, int | None]] = {
        "hidden_states": 0,
        "timestep": 0,
        "encoder_hidden_states": 0,
        "encoder_hidden_states_mask": 0,
        "img_shapes": 0,
        "img_mask": 0,
        "attention_kwargs": None,
    }
    sampling: ClassVar[frozenset[str]] = frozenset(
        {
            "height",
            "width",
            "output_resolution",
            "num_inference_steps",
            "sigmas",
            "true_cfg_scale",
            "attention_kwargs",
        }
    )
    scale_argument: ClassVar[str | None] = "true_cfg_scale"
    implied_negative: ClassVar[str | None] = None
    refused: ClassVar[Mapping[str, str]] = {"num_images_per_prompt": EXPANDED}
    fixed: ClassVar[Mapping[str, Any]] = {"use_kv_cache": False}

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse the cache, and sizes that the pipeline would round."""
        if request.get("use_kv_cache", True) and pipe.transformer.config.causal_condition:
            refuse(
                "a later denoiser call depends on a cache that the first one fills, so that "
                "replay would differ",
                "use_kv_cache True, the pipeline's default",
                "use_kv_cache=False",
            )
        check_sizes(request, pipe.vae_scale_factor * 2, "height", "width", "output_resolution")
        own, steps = pipe.config.sample_sigmas, request.get("num_inference_steps", 40)
        if own is not None and request.get("sigmas") is None and steps not in (40, len(own)):
            warnings.warn(
                f"rollout: num_inference_steps has no effect beside the pipeline's sample_sigmas; "
                f"got {steps} for {len(own)} of those; set sigmas= to choose others",
                stacklevel=2,
            )

    def resolve_request(self, pipe: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        """With a size: of the last reference image's shape, or square."""
        from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_dimensions

        side, image = request.get("output_resolution", 1024), request.get("image")
        width = height = side
        if image is not None:
            last = image[-1] if isinstance(image, list) else image
            shape = last.size if isinstance(last.size, tuple) else last.shape[1::-1]
            width, height, _ = calculate_dimensions(side * side, shape[0] / shape[1])
        height, width = request.get("height") or height, request.get("width") or width
        return {**request, "height": height, "width": width}

    def base_sigmas(self, num_inference_steps: int) -> list[float] | None:
        """Even ones."""
        return even_sigmas(num_inference_steps)

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """CFG is on with a scale above 1 and a negative prompt, and off without either."""
        return true_cfg(request, default=1.0)

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """``neg + scale (pos - neg)`` of the last tokens: text and references stand in front."""
        tokens = step.states["image"].shape[1]
        velocity, *negative = (output[0][:, -tokens:] for output in step.outputs)
        if step.guidance["do_true_cfg"]:
            velocity = negative[0] + step.guidance["true_cfg_scale"] * (velocity - negative[0])
        return {"image": velocity}

    def encode(
        self, pipe: Any, prompt: str, max_sequence_length: int | None, inputs: Mapping[str, Any]
    ) -> Encoding:
        """The prompt alone: nothing is padded, so every token is live."""
        if max_sequence_length is not None:
            refuse("prompts are never cut", max_sequence_length, "max_sequence_length=None")
        return {"embeds": pipe.encode_prompt(prompt=prompt)[0][0]}

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """Pad to the longest prompt; the mask tells the rest apart."""
        embeds, mask = pad(encodings)
        arguments = {**self.fixed, "prompt_embeds": embeds, "prompt_embeds_mask": mask}
        if negatives is None:
            return arguments | {"true_cfg_scale": 1.0}
        embeds, mask = pad(negatives)
        return arguments | {"negative_prompt_embeds": embeds, "negative_prompt_embeds_mask": mask}

    def latents(self, output: Any) -> dict[str, Tensor]:
        """Packed [B, tokens, channels]."""
        return {"image": output.images}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Unpack, undo the latent statistics, decode, and map to 0..1; the fourth channel is alpha."""
        config = pipe.vae.config
        size = self.resolve_request(pipe, request)
        unpacked = pipe._unpack_latents(
            latents["image"], size["height"], size["width"], pipe.vae_scale_factor
        )
        unpacked = unpacked.to(pipe.vae.dtype)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(unpacked.device, unpacked.dtype)
            for values in (config.latents_mean, config.latents_std)
        )
        pixels = pipe.vae.decode(unpacked * std + mean, return_dict=False)[0][:, :, 0]
        images = pipe.image_processor.postprocess(pixels, output_type="pt")
        return [Media(image=image.float()) for image in images]
