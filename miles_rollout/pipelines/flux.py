"""FLUX.1: packed latents [B, tokens, channels], an embedded guidance scale, true CFG on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from miles_rollout.errors import RolloutParamsError
from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding, PipelineAdapter


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

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse sizes that the pipeline would round, and what replay does not cover."""
        multiple = pipe.vae_scale_factor * 2
        for side in ("height", "width"):
            if request.get(side) is not None and request[side] % multiple:
                raise RolloutParamsError(
                    f"rollout: {side} must be divisible by {multiple}, or the pipeline rounds it; "
                    f"got {request[side]}; set {side} to a multiple of {multiple}"
                )
        if request.get("num_images_per_prompt", 1) != 1:
            raise RolloutParamsError(
                "rollout: prompts are expanded by the caller, one seed a row; got "
                f"num_images_per_prompt {request['num_images_per_prompt']}; repeat the prompt in "
                "the list instead"
            )
        for name, value in request.items():
            if "ip_adapter_image" in name and value is not None:
                raise RolloutParamsError(
                    "rollout: an image prompt reaches the denoiser in a way that replay cannot cut "
                    f"into rows; got {name}; leave it out"
                )

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
        return {"image": negative + step.guidance["true_cfg_scale"] * (positive - negative)}

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
            return arguments | {"true_cfg_scale": 1.0}
        return arguments | {
            "negative_prompt_embeds": torch.stack([e["embeds"] for e in negatives]),
            "negative_pooled_prompt_embeds": torch.stack([e["pooled"] for e in negatives]),
        }

    def latents(self, output: Any) -> dict[str, Tensor]:
        """Packed [B, tokens, channels]."""
        return {"image": output.images}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Unpack, undo scale and shift, decode, and map to 0..1."""
        config, factor = pipe.vae.config, pipe.vae_scale_factor
        side = pipe.default_sample_size * factor
        size = (request.get("height") or side, request.get("width") or side)
        unpacked = pipe._unpack_latents(latents["image"], *size, factor)
        scaled = unpacked / config.scaling_factor + config.shift_factor
        pixels = pipe.vae.decode(scaled, return_dict=False)[0]
        images = pipe.image_processor.postprocess(pixels, output_type="pt")
        return [Media(image=image.float()) for image in images]
