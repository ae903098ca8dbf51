"""LTX-2 and 2.3: video with sound, guided in x0 space by up to three denoiser calls a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding, PipelineAdapter
from miles_rollout.pipelines.common import even_sigmas
from miles_rollout.pipelines.ltx2_guidance import guided_velocity
from miles_rollout.pipelines.ltx2_media import decode_media
from miles_rollout.pipelines.ltx2_request import (
    SCALES,
    SIZES,
    check_request,
    guidance_of,
    resolve_request,
)
from miles_rollout.pipelines.refusals import EXPANDED


@final
class LTX2Adapter(PipelineAdapter):
    """``LTX2Pipeline``: text to video with sound, both in tokens [B, tokens, channels]."""

    streams: ClassVar[tuple[str, ...]] = ("video", "audio")
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    batch_axes: ClassVar[Mapping[str, int | None]] = {
        "hidden_states": 0,
        "audio_hidden_states": 0,
        "encoder_hidden_states": 0,
        "audio_encoder_hidden_states": 0,
        "timestep": 0,
        "sigma": 0,
        "encoder_attention_mask": 0,
        "audio_encoder_attention_mask": 0,
        "video_coords": 0,
        "audio_coords": 0,
        "attention_kwargs": None,
    }
    sampling: ClassVar[frozenset[str]] = frozenset(
        {
            *SIZES,
            *SCALES,
            "frame_rate",
            "motion_speed",
            "num_inference_steps",
            "sigmas",
            "spatio_temporal_guidance_blocks",
            "use_cross_timestep",
            "attention_kwargs",
        }
    )
    scale_argument: ClassVar[str | None] = "guidance_scale"
    more_scale_arguments: ClassVar[tuple[str, ...]] = ("audio_guidance_scale",)
    implied_negative: ClassVar[str | None] = ""
    refused: ClassVar[Mapping[str, str]] = {
        "num_videos_per_prompt": EXPANDED,
        "enable_prompt_enhancement": (
            "prompt enhancement seeds the global RNG and samples another prompt; set it to False, "
            "and pass an enhanced prompt"
        ),
    }
    fixed: ClassVar[Mapping[str, Any]] = {
        "stg_scale": 0.0,
        "audio_stg_scale": None,  # as the video's
        "modality_scale": 1.0,
        "audio_modality_scale": None,
    }

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse what the pipeline would round, draw without a seed, or not tell."""
        check_request(pipe, request)

    def resolve_request(self, pipe: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        """With the frame count that the pipeline takes where none is given."""
        return resolve_request(request)

    def base_sigmas(self, num_inference_steps: int) -> list[float] | None:
        """Even ones."""
        return even_sigmas(num_inference_steps)

    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """The latents' batch, of which classifier-free guidance makes two in the first call."""
        first = not kwargs["isolate_modalities"] and not kwargs["spatio_temporal_guidance_blocks"]
        doubled = first and guidance["do_classifier_free_guidance"]
        return len(kwargs["hidden_states"]) // (2 if doubled else 1)

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """Which of the three guidances are on, and all scales, those of sound by its own names."""
        return guidance_of(request)

    def blocks(self, guidance: Mapping[str, float | bool]) -> dict[str, int]:
        """Two with classifier-free guidance, in the first call; the others hold one."""
        rows = [name for name, axis in self.batch_axes.items() if axis is not None]
        return dict.fromkeys(rows, 2) if guidance["do_classifier_free_guidance"] else {}

    def calls_per_step(self, guidance: Mapping[str, float | bool]) -> int | None:
        """One, one for perturbed blocks, and one for media that do not see each other."""
        others = ("do_spatio_temporal_guidance", "do_modality_isolation_guidance")
        return 1 + sum(bool(guidance[name]) for name in others)

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """Each stream with its own scales: the denoised samples are moved apart, and rescaled."""
        velocities = {}
        for place, name in enumerate(self.streams):
            state = step.states[name]
            velocities[name] = guided_velocity(
                [made[place].float() for made in step.outputs],
                state,
                # There a division by a number on the host is rounded as a multiplication is.
                step.sigmas[name][step.index].to(state.device),
                step.guidance,
                "" if name == "video" else "audio_",
            )
        return velocities

    def encode(
        self,
        pipe: Any,
        prompt: str,
        max_sequence_length: int | None,
        inputs: Mapping[str, Any],
    ) -> Encoding:
        """All layers of the text encoder, [tokens, channels * layers], without the padding.

        The connectors do not look at the padding, which is most of several hundred MB.
        """
        length = max_sequence_length or 1024
        embeds, mask, _, _ = pipe.encode_prompt(
            prompt=prompt, do_classifier_free_guidance=False, max_sequence_length=length
        )
        return {"embeds": embeds[0][mask[0].bool()], "length": length}

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """Padded on the left. Perturbed and isolated calls are made where their scales are given."""
        arguments: dict[str, Any] = {
            **self.fixed,
            **_padded(encodings, ""),
        }
        if negatives is not None:
            return arguments | _padded(negatives, "negative_")
        unguided = {"guidance_scale": 1.0, "guidance_rescale": 0.0}
        return arguments | unguided | {f"audio_{name}": None for name in unguided}

    def denoise(self, part: Any, arguments: Mapping[str, Any], generators: Sequence[Any]) -> Any:
        """The output, with the video's tokens as they were stepped: what is decoded."""
        final: dict[str, Tensor] = {}

        def keep(_: Any, __: int, ___: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            final.update(tensors)
            return {}

        output = part(
            **arguments, generator=generators, output_type="latent", callback_on_step_end=keep
        )
        return final["latents"], output.audio

    def small_request(self, pipe: Any) -> dict[str, Any]:
        """The smallest square that the pipeline takes, or 4 x 4 tokens."""
        side = max(32, 4 * pipe.vae_spatial_compression_ratio)
        frames = 4 * pipe.vae_temporal_compression_ratio + 1
        return {"height": side, "width": side, "num_frames": frames}

    def latents(self, output: Any) -> dict[str, Tensor]:
        """Video [B, tokens, channels]; sound [B, channels, length, mel bins]."""
        return {"video": output[0], "audio": output[1]}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Both media. Takes final states (three axes) and the pipeline's latent output alike.

        The pipeline rounds a final video state to the dtype of its prompts before it undoes the
        normalisation, and a latent output not at all: in half precision only states give its bits.
        """
        return decode_media(pipe, latents, resolve_request(request))


def _padded(encodings: Sequence[Encoding], prefix: str) -> dict[str, Tensor]:
    """Embeddings and mask of a batch; the content of the padding does not matter."""
    first = encodings[0]["embeds"]
    embeds = first.new_zeros(len(encodings), encodings[0]["length"], first.shape[-1])
    mask = torch.zeros(embeds.shape[:2], dtype=torch.int64, device=first.device)
    for row, encoding in enumerate(encodings):
        live = slice(embeds.shape[1] - len(encoding["embeds"]), None)
        embeds[row, live], mask[row, live] = encoding["embeds"], 1
    return {f"{prefix}prompt_embeds": embeds, f"{prefix}prompt_attention_mask": mask}
