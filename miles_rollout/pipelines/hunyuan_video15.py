"""HunyuanVideo 1.5: latents [B, C, frames, h, w], CFG by a guider component, one call a branch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding, PipelineAdapter
from miles_rollout.pipelines.common import (
    check_frames,
    check_sizes,
    is_guided,
    refuse,
    stack,
)
from miles_rollout.pipelines.hunyuan_video15_guider import (
    check_guider,
    combine,
    guider_at,
    is_on,
    settings,
)
from miles_rollout.pipelines.refusals import EXPANDED

_EMBEDS = ["prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2"]


@final
class HunyuanVideo15Adapter(PipelineAdapter):
    """``HunyuanVideo15Pipeline``: text to video, one stream, one or two denoiser calls a step.

    The denoiser sees latents, condition and mask side by side in its channels. Guidance is not an
    argument of the pipeline but its ``guider``; to the engine, ``guidance_scale`` is that guider's.
    """

    sees_state: ClassVar[bool] = False
    streams: ClassVar[tuple[str, ...]] = ("video",)
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    batch_axes: ClassVar[Mapping[str, int | None]] = {
        "hidden_states": 0,
        "image_embeds": 0,
        "timestep": 0,
        "encoder_hidden_states": 0,
        "encoder_attention_mask": 0,
        "encoder_hidden_states_2": 0,
        "encoder_attention_mask_2": 0,
        "attention_kwargs": None,
    }
    sampling: ClassVar[frozenset[str]] = frozenset(
        {
            "height",
            "width",
            "num_frames",
            "num_inference_steps",
            "sigmas",
            "guidance_scale",
            "attention_kwargs",
        }
    )
    scale_argument: ClassVar[str | None] = "guidance_scale"
    implied_negative: ClassVar[str | None] = ""
    refused: ClassVar[Mapping[str, str]] = {"num_videos_per_prompt": EXPANDED}

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse rounded sizes, and guiders that are not plain CFG throughout."""
        multiple = pipe.vae_scale_factor_spatial * pipe.transformer.config.patch_size
        check_sizes(request, multiple, "height", "width")
        check_frames(request, pipe.vae_scale_factor_temporal)
        check_guider(pipe.guider)
        negative = request.get("negative_prompt"), request.get("negative_prompt_embeds")
        if negative != (None, None) and not is_on(pipe.guider):
            warnings.warn(
                "rollout: negative_prompt has no effect where the guider is off; got guidance_scale "
                f"{pipe.guider.guidance_scale}, enabled {pipe.guider._enabled}; set pipe.guider",
                stacklevel=2,
            )

    def check_sampling(self, sampling: Mapping[str, Any]) -> None:
        """Refuse frames that every pipeline of the family would round."""
        check_frames(sampling)

    def resolve_request(self, pipe: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        """With what the guider adds to the call's arguments."""
        return {**request, **settings(pipe.guider)}

    def base_sigmas(self, num_inference_steps: int) -> list[float] | None:
        """Even ones, computed on the way to 0: other last bits than `even_sigmas`."""
        return [float(sigma) for sigma in np.linspace(1.0, 0.0, num_inference_steps + 1)[:-1]]

    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """The latents' batch: the guidance branches are calls of their own."""
        return len(kwargs["hidden_states"])

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """The guider's settings."""
        names = ("do_classifier_free_guidance", "guidance_scale", "guidance_rescale")
        return {name: request[name] for name in (*names, "use_original_formulation")}

    def blocks(self, guidance: Mapping[str, float | bool]) -> dict[str, int]:
        """One: the guidance branches are calls of their own."""
        return {}

    def calls_per_step(self, guidance: Mapping[str, float | bool]) -> int | None:
        """Two with CFG."""
        return 2 if is_guided(guidance) else 1

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """As the guider does it, from one prediction or two."""
        positive, negative = step.outputs[0][0], None
        if is_guided(step.guidance):
            negative = step.outputs[1][0]
        return {"video": combine(positive, negative, step.guidance)}

    def encode(
        self, pipe: Any, prompt: str, max_sequence_length: int | None, inputs: Mapping[str, Any]
    ) -> Encoding:
        """Both encoders; padded to the pipeline's own lengths, with a mask each."""
        if max_sequence_length is not None:
            refuse(
                "the length is the pipeline's",
                f"max_sequence_length={max_sequence_length}",
                "pipe.tokenizer_max_length instead",
            )
        found = pipe.encode_prompt(prompt=prompt, dtype=pipe.transformer.dtype)
        return {name: tensor[0] for name, tensor in zip(_EMBEDS, found, strict=True)}

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """Every prompt has one length: only stacked, with its masks."""
        guided = {} if negatives is None else stack(negatives, _EMBEDS, "negative_")
        return stack(encodings, _EMBEDS) | guided

    def denoise(self, part: Any, arguments: Mapping[str, Any], generators: Sequence[Any]) -> Any:
        """With the guider at ``guidance_scale``; off without negative prompts."""
        given = {name: value for name, value in arguments.items() if name != "guidance_scale"}
        with guider_at(part, arguments.get("guidance_scale"), "negative_prompt_embeds" in given):
            return part(**given, generator=generators, output_type="latent")

    def small_request(self, pipe: Any) -> dict[str, Any]:
        """Two latent frames."""
        side = pipe.vae_scale_factor_spatial * 2
        return {"height": side, "width": side, "num_frames": pipe.vae_scale_factor_temporal + 1}

    def latents(self, output: Any) -> dict[str, Tensor]:
        """[B, C, frames, h, w]."""
        return {"video": output.frames}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Undo the scale, decode sample by sample, and map to 0..1."""
        scaled = latents["video"].to(pipe.vae.dtype) / pipe.vae.config.scaling_factor
        # In diffusers 0.42 the VAE's attention mask does not fit a batch of several videos.
        frames = torch.cat([pipe.vae.decode(one, return_dict=False)[0] for one in scaled.split(1)])
        videos = pipe.video_processor.postprocess_video(frames, output_type="pt")
        return [Media(video=video.float(), fps=24) for video in videos]
