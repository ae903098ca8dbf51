"""Z-Image: latents [B, C, h, w] that the denoiser gets as lists, CFG as one call, [pos, neg]."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding, PipelineAdapter
from miles_rollout.pipelines.common import (
    check_sizes,
    decode_images,
    is_guided,
    two_blocks,
)
from miles_rollout.pipelines.refusals import EXPANDED


@final
class ZImageAdapter(PipelineAdapter):
    """``ZImagePipeline``: text to image, one stream, one denoiser call a step.

    The denoiser predicts x0 - noise, and the pipeline hands the negative to its scheduler.
    """

    sees_state: ClassVar[bool] = False
    streams: ClassVar[tuple[str, ...]] = ("image",)
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    # Positional: a list of latents, the timesteps, a list of prompts.
    batch_axes: ClassVar[Mapping[str, int | None]] = {
        "0": 0,
        "1": 0,
        "2": 0,
        "joint_attention_kwargs": None,
    }
    sampling: ClassVar[frozenset[str]] = frozenset(
        {
            "height",
            "width",
            "num_inference_steps",
            "sigmas",
            "guidance_scale",
            "cfg_normalization",
            "cfg_truncation",
            "joint_attention_kwargs",
        }
    )
    scale_argument: ClassVar[str | None] = "guidance_scale"
    scale_off: ClassVar[float] = 0.0
    implied_negative: ClassVar[str | None] = ""
    refused: ClassVar[Mapping[str, str]] = {"num_images_per_prompt": EXPANDED}

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse sizes that do not fit; warn of settings without effect."""
        check_sizes(request, pipe.vae_scale_factor * 2, "height", "width")
        found = self.guidance(request)
        for name, off in (("cfg_normalization", 0.0), ("cfg_truncation", 1.0)):
            if not is_guided(found) and found[name] != off:
                warnings.warn(
                    f"rollout: {name} has no effect without guidance; got {request[name]} and "
                    f"guidance_scale {request['guidance_scale']}; set guidance_scale > 0",
                    stacklevel=2,
                )

    def base_sigmas(self, num_inference_steps: int) -> list[float] | None:
        """Even ones, computed in float32: other last bits than `even_sigmas`."""
        return torch.linspace(1.0, 1 / num_inference_steps, num_inference_steps).tolist()

    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """The latents, of which guidance makes two blocks until the truncation ends it."""
        guided = is_guided(guidance)
        if guided and guidance["cfg_truncation"] < 1:
            guided = args[1][0].item() <= guidance["cfg_truncation"]
        return len(args[0]) // (2 if guided else 1)

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """CFG is on with a scale above 0, by an empty negative prompt if there is none."""
        scale, truncation = float(request["guidance_scale"]), request["cfg_truncation"]
        return {
            "do_classifier_free_guidance": scale > 0,
            "guidance_scale": max(scale, 0.0),
            "cfg_normalization": float(request["cfg_normalization"] or 0),
            # The clock ends below 1, so that all from 1 up is no truncation.
            "cfg_truncation": 1.0 if truncation is None else min(float(truncation), 1.0),
        }

    def blocks(self, guidance: Mapping[str, float | bool]) -> dict[str, int]:
        """Two with CFG, in every argument that has rows; one after the truncation."""
        return two_blocks(self.batch_axes, guidance)

    def calls_per_step(self, guidance: Mapping[str, float | bool]) -> int | None:
        """One, with or without CFG."""
        return 1

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """``pos + scale (pos - neg)``, clipped to a multiple of the norm of pos, and negated."""
        made, rows = step.outputs[0][0], len(step.states["image"])
        if len(made) == rows:
            predicted = [row.float() for row in made]
        else:
            pairs = zip(made[:rows], made[rows:], strict=True)
            predicted = [_guide(pos.float(), neg.float(), step.guidance) for pos, neg in pairs]
        return {"image": -torch.stack(predicted, dim=0).squeeze(2)}

    def encode(
        self, pipe: Any, prompt: str, max_sequence_length: int | None, inputs: Mapping[str, Any]
    ) -> Encoding:
        """The prompt alone; its length is free."""
        embeds, _ = pipe.encode_prompt(
            prompt=[prompt],  # a list of its own: the pipeline writes its template into it
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length or 512,
        )
        return {"embeds": embeds[0]}

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """Lists: nothing is padded."""
        arguments: dict[str, Any] = {"prompt_embeds": [e["embeds"] for e in encodings]}
        if negatives is None:
            return arguments | {"guidance_scale": 0.0}
        return arguments | {"negative_prompt_embeds": [e["embeds"] for e in negatives]}

    def latents(self, output: Any) -> dict[str, Tensor]:
        """[B, C, h, w]."""
        return {"image": output.images}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Undo scale and shift, decode, and map to 0..1."""
        return decode_images(pipe, latents["image"].to(pipe.vae.dtype))


def _guide(positive: Tensor, negative: Tensor, guidance: Mapping[str, float | bool]) -> Tensor:
    """One sample, [C, 1, h, w]."""
    guided = positive + guidance["guidance_scale"] * (positive - negative)
    if guidance["cfg_normalization"] > 0:
        norm = torch.linalg.vector_norm(guided)
        most = torch.linalg.vector_norm(positive) * guidance["cfg_normalization"]
        if norm > most:
            guided = guided * (most / norm)
    return guided
