"""Stable Diffusion 3 and 3.5: latents [B, C, h, w], CFG as one call of two blocks, [neg, pos]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from miles_rollout.errors import RolloutParamsError
from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding, PipelineAdapter


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

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse what replay does not cover."""
        if request.get("skip_guidance_layers") is not None:
            raise RolloutParamsError(
                "rollout: skip-layer guidance adds denoiser calls to some steps only, which replay "
                f"does not combine; got skip_guidance_layers {request['skip_guidance_layers']}; "
                "leave it out"
            )
        if request.get("num_images_per_prompt", 1) != 1:
            raise RolloutParamsError(
                "rollout: prompts are expanded by the caller, one seed a row; got "
                f"num_images_per_prompt {request['num_images_per_prompt']}; repeat the prompt in "
                "the list instead"
            )
        for name in ("ip_adapter_image", "ip_adapter_image_embeds"):
            if request.get(name) is not None:
                raise RolloutParamsError(
                    "rollout: an image prompt reaches the denoiser in a way that replay cannot cut "
                    f"into rows; got {name}; leave it out"
                )

    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """The latents' batch, of which guidance makes two."""
        return len(kwargs["hidden_states"]) // (2 if _is_guided(guidance) else 1)

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """CFG is on with a scale above 1, by an empty negative prompt if there is none."""
        scale = float(request["guidance_scale"])
        guided = scale > 1
        return {"do_classifier_free_guidance": guided, "guidance_scale": scale if guided else 1.0}

    def blocks(self, guidance: Mapping[str, float | bool]) -> dict[str, int]:
        """Two with CFG, in every argument that has rows."""
        rows = [name for name, axis in self.batch_axes.items() if axis is not None]
        return dict.fromkeys(rows, 2) if _is_guided(guidance) else {}

    def calls_per_step(self, guidance: Mapping[str, float | bool]) -> int | None:
        """One, with or without CFG."""
        return 1

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """``neg + scale (pos - neg)``."""
        if not _is_guided(step.guidance):
            return {"image": step.outputs[0][0]}
        negative, positive = step.outputs[0][0].chunk(2)
        return {"image": negative + step.guidance["guidance_scale"] * (positive - negative)}

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
        return {"embeds": embeds[0], "pooled": pooled[0]}

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """Every prompt has one length: only stacked."""
        arguments: dict[str, Any] = {
            "prompt_embeds": torch.stack([e["embeds"] for e in encodings]),
            "pooled_prompt_embeds": torch.stack([e["pooled"] for e in encodings]),
        }
        if negatives is None:
            return arguments | {"guidance_scale": 1.0}
        return arguments | {
            "negative_prompt_embeds": torch.stack([e["embeds"] for e in negatives]),
            "negative_pooled_prompt_embeds": torch.stack([e["pooled"] for e in negatives]),
        }

    def latents(self, output: Any) -> dict[str, Tensor]:
        """[B, C, h, w]."""
        return {"image": output.images}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Undo scale and shift, decode, and map to 0..1."""
        config = pipe.vae.config
        scaled = latents["image"] / config.scaling_factor + config.shift_factor
        pixels = pipe.vae.decode(scaled, return_dict=False)[0]
        images = pipe.image_processor.postprocess(pixels, output_type="pt")
        return [Media(image=image.float()) for image in images]


def _is_guided(guidance: Mapping[str, float | bool]) -> bool:
    return bool(guidance["do_classifier_free_guidance"])
