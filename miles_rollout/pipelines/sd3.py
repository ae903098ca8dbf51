"""Stable Diffusion 3 and 3.5: latents [B, C, h, w], CFG as one call of two blocks, [neg, pos]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

from torch import Tensor

from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding, PipelineAdapter
from miles_rollout.pipelines.common import (
    classifier_free,
    decode_images,
    guide,
    is_guided,
    stack,
    two_blocks,
)
from miles_rollout.pipelines.refusals import EXPANDED, IMAGE_PROMPT

_EMBEDS = ["prompt_embeds", "pooled_prompt_embeds"]


@final
class SD3Adapter(PipelineAdapter):
    """``StableDiffusion3Pipeline``: text to image, one stream, one denoiser call a step."""

    streams: ClassVar[tuple[str, ...]] = ("image",)
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    batch_axes: ClassVar[Mapping[str, int | None]] = {
        "hidden_states": 0,
        "timestep": 0,
        "encoder_hidden_states": 0,
        "pooled_projections": 0,
        "joint_attention_kwargs": None,
    }
    sampling: ClassVar[frozenset[str]] = frozenset(
        {
            "height",
            "width",
            "num_inference_steps",
            "sigmas",
            "mu",
            "guidance_scale",
            "joint_attention_kwargs",
        }
    )
    scale_argument: ClassVar[str | None] = "guidance_scale"
    implied_negative: ClassVar[str | None] = ""
    refused: ClassVar[Mapping[str, str]] = {
        "num_images_per_prompt": EXPANDED,
        "skip_guidance_layers": (
            "skip-layer guidance adds denoiser calls to some steps only, which replay does not combine"
        ),
        "ip_adapter_image": IMAGE_PROMPT,
        "ip_adapter_image_embeds": IMAGE_PROMPT,
    }

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Nothing more: the pipeline refuses sizes that do not fit."""

    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """The latents' batch, of which guidance makes two."""
        return len(kwargs["hidden_states"]) // (2 if is_guided(guidance) else 1)

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """CFG is on with a scale above 1, by an empty negative prompt if there is none."""
        return classifier_free(request)

    def blocks(self, guidance: Mapping[str, float | bool]) -> dict[str, int]:
        """Two with CFG, in every argument that has rows."""
        return two_blocks(self.batch_axes, guidance)

    def calls_per_step(self, guidance: Mapping[str, float | bool]) -> int | None:
        """One, with or without CFG."""
        return 1

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """``neg + scale (pos - neg)``."""
        if not is_guided(step.guidance):
            return {"image": step.outputs[0][0]}
        negative, positive = step.outputs[0][0].chunk(2)
        return {"image": guide(negative, positive, step.guidance["guidance_scale"])}

    def encode(
        self,
        pipe: Any,
        prompt: str,
        max_sequence_length: int | None,
        inputs: Mapping[str, Any],
    ) -> Encoding:
        """All three encoders; padded to a fixed length, which the denoiser sees without a mask."""
        embeds, _, pooled, _ = pipe.encode_prompt(
            prompt=prompt,
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length or 256,
        )
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """Every prompt has one length: only stacked."""
        arguments: dict[str, Any] = stack(encodings, _EMBEDS)
        if negatives is None:
            return arguments | {"guidance_scale": 1.0}
        return arguments | stack(negatives, _EMBEDS, "negative_")

    def latents(self, output: Any) -> dict[str, Tensor]:
        """[B, C, h, w]."""
        return {"image": output.images}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Undo scale and shift, decode, and map to 0..1."""
        return decode_images(pipe, latents["image"])
