"""Qwen-Image: packed latents [B, tokens, channels], true CFG with a norm rescale per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding
from miles_rollout.pipelines.common import check_sizes, even_sigmas
from miles_rollout.pipelines.two_calls import TwoCallAdapter, pad, true_cfg


@final
class QwenImageAdapter(TwoCallAdapter):
    """``QwenImagePipeline``: text to image, one stream, one or two denoiser calls a step."""

    streams: ClassVar[tuple[str, ...]] = ("image",)
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    batch_axes: ClassVar[Mapping[str, int | None]] = {
        "hidden_states": 0,
        "timestep": 0,
        "guidance": 0,
        "encoder_hidden_states": 0,
        "encoder_hidden_states_mask": 0,
        "img_shapes": 0,
        "attention_kwargs": None,
    }
    sampling: ClassVar[frozenset[str]] = frozenset(
        {
            "height",
            "width",
            "num_inference_steps",
            "sigmas",
            "true_cfg_scale",
            "guidance_scale",
            "attention_kwargs",
        }
    )
    scale_argument: ClassVar[str | None] = "true_cfg_scale"
    implied_negative: ClassVar[str | None] = None
    refused: ClassVar[Mapping[str, str]] = {
        # diffusers 0.42 repeats masks in another order than embeddings.
        "num_images_per_prompt": (
            "num_images_per_prompt pairs prompts with other prompts' masks; set it to 1 and repeat "
            "the prompt in the list instead"
        )
    }

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse sizes that the pipeline would round."""
        check_sizes(request, pipe.vae_scale_factor * 2, "height", "width")

    def base_sigmas(self, num_inference_steps: int) -> list[float] | None:
        """Even ones."""
        return even_sigmas(num_inference_steps)

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """CFG is on with a scale above 1 and a negative prompt, and off without either."""
        return true_cfg(request, default=4.0)

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """``neg + scale (pos - neg)``, rescaled to the norm of pos for each token."""
        if not step.guidance["do_true_cfg"]:
            return {"image": step.outputs[0][0]}
        positive, negative = step.outputs[0][0], step.outputs[1][0]
        scale = step.guidance["true_cfg_scale"]
        return {"image": guided(positive, negative, scale)}

    def encode(
        self,
        pipe: Any,
        prompt: str,
        max_sequence_length: int | None,
        inputs: Mapping[str, Any],
    ) -> Encoding:
        """The prompt alone: nothing is padded, so every token is live."""
        embeds, _ = pipe.encode_prompt(
            prompt=prompt, max_sequence_length=max_sequence_length or 512
        )
        return {"embeds": embeds[0]}

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """Pad to the longest prompt; the mask tells the rest apart."""
        embeds, mask = pad(encodings)
        arguments: dict[str, Any] = {"prompt_embeds": embeds, "prompt_embeds_mask": mask}
        if negatives is None:
            arguments["true_cfg_scale"] = 1.0
        else:
            embeds, mask = pad(negatives)
            arguments |= {"negative_prompt_embeds": embeds, "negative_prompt_embeds_mask": mask}
        return arguments

    def latents(self, output: Any) -> dict[str, Tensor]:
        """Packed [B, tokens, channels]."""
        return {"image": output.images}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Unpack, undo the latent statistics, decode, and map to 0..1."""
        side = pipe.default_sample_size * pipe.vae_scale_factor
        height, width = (request.get(name) or side for name in ("height", "width"))
        return decoded(pipe, latents["image"], height, width)


def guided(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """``neg + scale (pos - neg)``, rescaled to the norm of pos for each token; [rows, tokens, ..]."""
    combined = negative + scale * (positive - negative)
    positive_norm = torch.norm(positive, dim=-1, keepdim=True)
    combined_norm = torch.norm(combined, dim=-1, keepdim=True)
    return combined * (positive_norm / combined_norm)


def decoded(pipe: Any, latents: Tensor, height: int, width: int) -> list[Media]:
    """Packed latents [rows, tokens, channels] as pictures of this size in pixels."""
    config = pipe.vae.config
    unpacked = pipe._unpack_latents(latents, height, width, pipe.vae_scale_factor)
    unpacked = unpacked.to(pipe.vae.dtype)
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(unpacked.device, unpacked.dtype)
        for values in (config.latents_mean, config.latents_std)
    )
    pixels = pipe.vae.decode(unpacked / (1.0 / std) + mean, return_dict=False)[0][:, :, 0]
    images = pipe.image_processor.postprocess(pixels, output_type="pt")
    return [Media(image=image.float()) for image in images]
