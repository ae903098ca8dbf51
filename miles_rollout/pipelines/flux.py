"""FLUX.1: packed latents [B, tokens, channels], an embedded guidance scale, true CFG on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

from torch import Tensor

from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding, PipelineAdapter
from miles_rollout.pipelines.common import (
    check_sizes,
    decode_images,
    even_sigmas,
    guide,
    stack,
)
from miles_rollout.pipelines.refusals import EXPANDED, IMAGE_PROMPT

_EMBEDS = ["prompt_embeds", "pooled_prompt_embeds"]


@final
class FluxAdapter(PipelineAdapter):
    """``FluxPipeline``: text to image, one stream, one or two denoiser calls a step."""

    streams: ClassVar[tuple[str, ...]] = ("image",)
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    batch_axes: ClassVar[Mapping[str, int | None]] = {
        "hidden_states": 0,
        "timestep": 0,
        "guidance": 0,
        "pooled_projections": 0,
        "encoder_hidden_states": 0,
        "txt_ids": None,
        "img_ids": None,
        "joint_attention_kwargs": None,
    }
    sampling: ClassVar[frozenset[str]] = frozenset(
        {
            "height",
            "width",
            "num_inference_steps",
            "sigmas",
            "guidance_scale",
            "true_cfg_scale",
            "joint_attention_kwargs",
        }
    )
    scale_argument: ClassVar[str | None] = "true_cfg_scale"
    implied_negative: ClassVar[str | None] = None
    refused: ClassVar[Mapping[str, str]] = {
        "num_images_per_prompt": EXPANDED,
        "ip_adapter_image": IMAGE_PROMPT,
        "ip_adapter_image_embeds": IMAGE_PROMPT,
        "negative_ip_adapter_image": IMAGE_PROMPT,
        "negative_ip_adapter_image_embeds": IMAGE_PROMPT,
    }

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse sizes that the pipeline would round."""
        check_sizes(request, pipe.vae_scale_factor * 2, "height", "width")

    def base_sigmas(self, num_inference_steps: int) -> list[float] | None:
        """Even ones."""
        return even_sigmas(num_inference_steps)

    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """The latents' batch: the branches of true CFG are calls of their own."""
        return len(kwargs["hidden_states"])

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """True CFG is on with a scale above 1 and a negative prompt, and off without either.

        The embedded ``guidance_scale`` is an argument of the denoiser, recorded with its call.
        """
        scale = float(request["true_cfg_scale"])
        embedded = ("negative_prompt_embeds", "negative_pooled_prompt_embeds")
        has_negative = request.get("negative_prompt") is not None or all(
            request.get(name) is not None for name in embedded
        )
        do_true_cfg = scale > 1 and has_negative
        return {"do_true_cfg": do_true_cfg, "true_cfg_scale": scale if do_true_cfg else 1.0}

    def blocks(self, guidance: Mapping[str, float | bool]) -> dict[str, int]:
        """One: the branches of true CFG are calls of their own."""
        return {}

    def calls_per_step(self, guidance: Mapping[str, float | bool]) -> int | None:
        """Two with true CFG."""
        return 2 if guidance["do_true_cfg"] else 1

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """``neg + scale (pos - neg)``."""
        if not step.guidance["do_true_cfg"]:
            return {"image": step.outputs[0][0]}
        positive, negative = step.outputs[0][0], step.outputs[1][0]
        return {"image": guide(negative, positive, step.guidance["true_cfg_scale"])}

    def encode(
        self,
        pipe: Any,
        prompt: str,
        max_sequence_length: int | None,
        inputs: Mapping[str, Any],
    ) -> Encoding:
        """Both encoders; padded to a fixed length, which the denoiser sees without a mask."""
        embeds, pooled, _ = pipe.encode_prompt(
            prompt=prompt, max_sequence_length=max_sequence_length or 512
        )
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """Every prompt has one length: only stacked."""
        arguments: dict[str, Any] = stack(encodings, _EMBEDS)
        if negatives is None:
            return arguments | {"true_cfg_scale": 1.0}
        return arguments | stack(negatives, _EMBEDS, "negative_")

    def latents(self, output: Any) -> dict[str, Tensor]:
        """Packed [B, tokens, channels]."""
        return {"image": output.images}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Unpack, undo scale and shift, decode, and map to 0..1."""
        factor = pipe.vae_scale_factor
        side = pipe.default_sample_size * factor
        size = (request.get("height") or side, request.get("width") or side)
        return decode_images(pipe, pipe._unpack_latents(latents["image"], *size, factor))
