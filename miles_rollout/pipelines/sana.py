"""Sana: latents [B, C, h, w], CFG as one call of two blocks, [neg, pos], all in float32 outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

from torch import Tensor

from miles_rollout.call_signature import call_defaults
from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding, PipelineAdapter
from miles_rollout.pipelines.common import (
    classifier_free,
    guide,
    is_guided,
    stack,
    two_blocks,
)
from miles_rollout.pipelines.refusals import EXPANDED


@final
class SanaAdapter(PipelineAdapter):
    """``SanaPipeline``: text to image, one stream, one denoiser call a step."""

    streams: ClassVar[tuple[str, ...]] = ("image",)
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    batch_axes: ClassVar[Mapping[str, int | None]] = {
        "0": 0,  # the latents
        "encoder_hidden_states": 0,
        "encoder_attention_mask": 0,
        "timestep": 0,
        "attention_kwargs": None,
    }
    sampling: ClassVar[frozenset[str]] = frozenset(
        {
            "height",
            "width",
            "num_inference_steps",
            "timesteps",
            "sigmas",
            "guidance_scale",
            "use_resolution_binning",
            "attention_kwargs",
        }
    )
    scale_argument: ClassVar[str | None] = "guidance_scale"
    implied_negative: ClassVar[str | None] = ""
    refused: ClassVar[Mapping[str, str]] = {"num_images_per_prompt": EXPANDED}

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Nothing more: the pipeline refuses sizes that do not fit."""

    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """The latents' batch, of which guidance makes two."""
        return len(args[0]) // (2 if is_guided(guidance) else 1)

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
        """``neg + scale (pos - neg)`` in float32, without the channels of a learned variance."""
        velocity = step.outputs[0][0].float()
        if is_guided(step.guidance):
            negative, positive = velocity.chunk(2)
            velocity = guide(negative, positive, step.guidance["guidance_scale"])
        if velocity.shape[1] // 2 == step.states["image"].shape[1]:
            velocity = velocity.chunk(2, dim=1)[0]
        return {"image": velocity}

    def encode(
        self, pipe: Any, prompt: str, max_sequence_length: int | None, inputs: Mapping[str, Any]
    ) -> Encoding:
        """Both ways, padded to a fixed length: the instruction is for positive prompts only."""
        instruction = call_defaults(type(pipe))["complex_human_instruction"]
        embeds, mask, negative, negative_mask = pipe.encode_prompt(
            prompt,
            do_classifier_free_guidance=True,
            negative_prompt=prompt,
            max_sequence_length=max_sequence_length or 300,
            complex_human_instruction=instruction,
        )
        return {
            "prompt_embeds": embeds[0],
            "prompt_attention_mask": mask[0],
            "negative_prompt_embeds": negative[0],
            "negative_prompt_attention_mask": negative_mask[0],
        }

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """Every prompt has one length: only stacked, with its mask."""
        names = ["prompt_embeds", "prompt_attention_mask"]
        arguments: dict[str, Any] = stack(encodings, names)
        if negatives is None:
            return arguments | {"guidance_scale": 1.0}
        guided = stack(negatives, [f"negative_{name}" for name in names])
        # Its default is "", which the pipeline refuses beside embeddings.
        return arguments | guided | {"negative_prompt": None}

    def small_request(self, pipe: Any) -> dict[str, Any]:
        """The size as it is: binned sizes start at 512 pixels."""
        side = pipe.vae_scale_factor * 4
        return {"height": side, "width": side, "use_resolution_binning": False}

    def latents(self, output: Any) -> dict[str, Tensor]:
        """[B, C, h, w]."""
        return {"image": output.images}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Undo the scale, decode, resize from the binned size, and map to 0..1."""
        image = latents["image"].to(pipe.vae.dtype) / pipe.vae.config.scaling_factor
        pixels = pipe.vae.decode(image, return_dict=False)[0]
        size = request.get("width"), request.get("height")
        if request.get("use_resolution_binning", True) and None not in size:
            pixels = pipe.image_processor.resize_and_crop_tensor(pixels, *size)
        images = pipe.image_processor.postprocess(pixels, output_type="pt")
        return [Media(image=image.float()) for image in images]
