"""Wan 2.1 and 2.2: latents [B, C, frames, h, w], CFG as two calls, two experts in 2.2."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding, PipelineAdapter
from miles_rollout.pipelines.common import (
    check_frames,
    check_sizes,
    classifier_free,
    guide,
    is_guided,
    refuse,
    stack,
)
from miles_rollout.pipelines.refusals import EXPANDED


@final
class WanAdapter(PipelineAdapter):
    """``WanPipeline``: text to video, one stream, one or two denoiser calls a step.

    With a ``boundary_ratio`` the steps from that share of the noise up are ``transformer``'s and
    the others ``transformer_2``'s, each guided by its own scale.
    """

    streams: ClassVar[tuple[str, ...]] = ("video",)
    denoisers: ClassVar[tuple[str, ...]] = ("transformer", "transformer_2")
    batch_axes: ClassVar[Mapping[str, int | None]] = {
        "hidden_states": 0,
        "timestep": 0,
        "encoder_hidden_states": 0,
        "attention_kwargs": None,
    }
    sampling: ClassVar[frozenset[str]] = frozenset(
        {
            "height",
            "width",
            "num_frames",
            "num_inference_steps",
            "guidance_scale",
            "guidance_scale_2",
            "attention_kwargs",
        }
    )
    scale_argument: ClassVar[str | None] = "guidance_scale"
    implied_negative: ClassVar[str | None] = ""
    refused: ClassVar[Mapping[str, str]] = {"num_videos_per_prompt": EXPANDED}

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse sizes that the pipeline would round."""
        patch = (pipe.transformer or pipe.transformer_2).config.patch_size
        check_sizes(request, pipe.vae_scale_factor_spatial * max(patch[1:]), "height", "width")
        check_frames(request, pipe.vae_scale_factor_temporal)
        low = request.get("guidance_scale_2")
        if low is not None and request["guidance_scale"] <= 1:
            warnings.warn(
                "rollout: guidance_scale_2 has no effect where guidance_scale turns guidance off; "
                f"got {low} and guidance_scale {request['guidance_scale']}; set guidance_scale > 1",
                stacklevel=2,
            )

    def check_sampling(self, sampling: Mapping[str, Any]) -> None:
        """Refuse frames that every pipeline of the family would round."""
        check_frames(sampling)

    def check_stochastic(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse the models that give every token a timestep of its own."""
        if pipe.config.expand_timesteps:
            refuse(
                "a stochastic step is not defined where every token has a timestep of its own",
                "a pipeline with expand_timesteps=True",
                "sde_step_indices=() for a deterministic rollout",
            )

    def resolve_request(self, pipe: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        """With the scale of the second expert, which is the first one's if it is not given."""
        low = request["guidance_scale_2"]
        return {**request, "guidance_scale_2": request["guidance_scale"] if low is None else low}

    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """The latents' batch: the guidance branches are calls of their own."""
        return len(kwargs["hidden_states"])

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """CFG is on with a first scale above 1, by an empty negative prompt if there is none."""
        found = classifier_free(request)
        low = float(request["guidance_scale_2"]) if is_guided(found) else 1.0
        return found | {"guidance_scale_2": low}

    def blocks(self, guidance: Mapping[str, float | bool]) -> dict[str, int]:
        """One: the guidance branches are calls of their own."""
        return {}

    def calls_per_step(self, guidance: Mapping[str, float | bool]) -> int | None:
        """Two with CFG, both of the step's expert."""
        return 2 if is_guided(guidance) else 1

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """``neg + scale (pos - neg)`` with the scale of the expert that was called."""
        positive = step.outputs[0][0]
        if not is_guided(step.guidance):
            return {"video": positive}
        low = step.calls[0].module == "transformer_2"
        scale = step.guidance["guidance_scale_2" if low else "guidance_scale"]
        return {"video": guide(step.outputs[1][0], positive, scale)}

    def encode(
        self, pipe: Any, prompt: str, max_sequence_length: int | None, inputs: Mapping[str, Any]
    ) -> Encoding:
        """Padded with zeros to a fixed length, which the denoiser sees without a mask."""
        embeds, _ = pipe.encode_prompt(
            prompt=prompt,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length or 512,
        )
        return {"prompt_embeds": embeds[0]}

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """Every prompt has one length: only stacked."""
        arguments: dict[str, Any] = stack(encodings, ["prompt_embeds"])
        if negatives is None:
            return arguments | {"guidance_scale": 1.0}
        return arguments | stack(negatives, ["prompt_embeds"], "negative_")

    def small_request(self, pipe: Any) -> dict[str, Any]:
        """Two latent frames."""
        side = pipe.vae_scale_factor_spatial * 4
        frames = pipe.vae_scale_factor_temporal + 1
        return {"height": side, "width": side, "num_frames": frames}

    def latents(self, output: Any) -> dict[str, Tensor]:
        """[B, C, frames, h, w]."""
        return {"video": output.frames}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Undo the latent statistics, decode, and map to 0..1."""
        config, video = pipe.vae.config, latents["video"].to(pipe.vae.dtype)
        mean, std = (
            torch.tensor(values).view(1, config.z_dim, 1, 1, 1).to(video.device, video.dtype)
            for values in (config.latents_mean, config.latents_std)
        )
        frames = pipe.vae.decode(video / (1.0 / std) + mean, return_dict=False)[0]
        videos = pipe.video_processor.postprocess_video(frames, output_type="pt")
        fps = 24 if pipe.config.expand_timesteps else 16
        return [Media(video=video.float(), fps=fps) for video in videos]
