"""Qwen-Image: packed latents [B, tokens, channels], true CFG with a norm rescale per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from miles_rollout.errors import RolloutParamsError
from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding, PipelineAdapter


@final
class QwenImageAdapter(PipelineAdapter):
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

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse sizes that the pipeline would round, and its own expansion of prompts."""
        multiple = pipe.vae_scale_factor * 2
        for side in ("height", "width"):
            if request.get(side) is not None and request[side] % multiple:
                raise RolloutParamsError(
                    f"rollout: {side} must be divisible by {multiple}, or the pipeline rounds it; "
                    f"got {request[side]}; set {side} to a multiple of {multiple}"
                )
        if request.get("num_images_per_prompt", 1) != 1:
            # diffusers 0.42 repeats masks in another order than embeddings.
            raise RolloutParamsError(
                "rollout: num_images_per_prompt pairs prompts with other prompts' masks; got "
                f"{request['num_images_per_prompt']}; repeat the prompt in the list instead"
            )

    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """The latents' batch: the guidance branches are calls of their own."""
        return len(kwargs["hidden_states"])

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """CFG is on with a scale above 1 and a negative prompt, and off without either."""
        scale = float(request["true_cfg_scale"])
        negative = ("negative_prompt", "negative_prompt_embeds")
        has_negative = any(request.get(name) is not None for name in negative)
        do_true_cfg = scale > 1 and has_negative
        return {"do_true_cfg": do_true_cfg, "true_cfg_scale": scale if do_true_cfg else 1.0}

    def blocks(self, guidance: Mapping[str, float | bool]) -> dict[str, int]:
        """One: the guidance branches are calls of their own."""
        return {}

    def calls_per_step(self, guidance: Mapping[str, float | bool]) -> int | None:
        """Two with CFG."""
        return 2 if guidance["do_true_cfg"] else 1

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """``neg + scale (pos - neg)``, rescaled to the norm of pos for each token."""
        if not step.guidance["do_true_cfg"]:
            return {"image": step.outputs[0][0]}
        positive, negative = step.outputs[0][0], step.outputs[1][0]
        combined = negative + step.guidance["true_cfg_scale"] * (positive - negative)
        positive_norm = torch.norm(positive, dim=-1, keepdim=True)
        combined_norm = torch.norm(combined, dim=-1, keepdim=True)
        return {"image": combined * (positive_norm / combined_norm)}

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
        embeds, mask = _pad(encodings)
        arguments: dict[str, Any] = {"prompt_embeds": embeds, "prompt_embeds_mask": mask}
        if negatives is None:
            arguments["true_cfg_scale"] = 1.0
        else:
            embeds, mask = _pad(negatives)
            arguments |= {"negative_prompt_embeds": embeds, "negative_prompt_embeds_mask": mask}
        return arguments

    def latents(self, output: Any) -> dict[str, Tensor]:
        """Packed [B, tokens, channels]."""
        return {"image": output.images}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Unpack, undo the latent statistics, decode, and map to 0..1."""
        config = pipe.vae.config
        side = pipe.default_sample_size * pipe.vae_scale_factor
        packed = pipe._unpack_latents(
            latents["image"],
            request.get("height") or side,
            request.get("width") or side,
            pipe.vae_scale_factor,
        ).to(pipe.vae.dtype)
        shape = (1, config.z_dim, 1, 1, 1)
        mean = torch.tensor(config.latents_mean).view(shape).to(packed.device, packed.dtype)
        inverse_std = 1.0 / torch.tensor(config.latents_std).view(shape).to(
            packed.device, packed.dtype
        )
        pixels = pipe.vae.decode(packed / inverse_std + mean, return_dict=False)[0][:, :, 0]
        images = pipe.image_processor.postprocess(pixels, output_type="pt")
        return [Media(image=image.float()) for image in images]


def _pad(encodings: Sequence[Encoding]) -> tuple[Tensor, Tensor]:
    rows = [encoding["embeds"] for encoding in encodings]
    mask = [torch.ones(len(row), dtype=torch.long, device=row.device) for row in rows]
    return pad_sequence(rows, batch_first=True), pad_sequence(mask, batch_first=True)
