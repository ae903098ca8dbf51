"""Cosmos3: video, sound and actions in one packed sequence, one denoiser call a guidance branch.

The denoiser reads token ids, so a prompt is not embedded ahead: the pipeline tokenizes it together
with the request's sizes. Sound and actions are stepped by copies of the video's scheduler.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding, PipelineAdapter
from miles_rollout.pipelines.cosmos3_media import decode
from miles_rollout.pipelines.cosmos3_request import (
    check_frames,
    check_guardrail,
    check_request,
    refuse,
    resolve_request,
)
from miles_rollout.pipelines.cosmos3_streams import STREAMS, live, velocities


class Cosmos3Adapter(PipelineAdapter):
    """``Cosmos3OmniPipeline``: one sample a call, up to three streams."""

    streams: ClassVar[tuple[str, ...]] = STREAMS
    one_sample: ClassVar[bool] = True
    cuts_prompts: ClassVar[bool] = False
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    batch_axes: ClassVar[Mapping[str, int | None]] = {}
    inputs: ClassVar[frozenset[str]] = frozenset({"image", "video", "action"})
    scale_argument: ClassVar[str | None] = "guidance_scale"
    implied_negative: ClassVar[str | None] = ""
    sampling: ClassVar[frozenset[str]] = frozenset(
        {
            "height",
            "width",
            "num_frames",
            "fps",
            "num_inference_steps",
            "guidance_scale",
            "enable_sound",
            "condition_frame_indexes_vision",
            "condition_video_keep",
            "use_system_prompt",
            "add_resolution_template",
            "add_duration_template",
        }
    )

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse what the pipeline would ignore, draw from the global RNG, or decode otherwise."""
        guarded = pipe.safety_checker is not None and request.get("enable_safety_check", True)
        check_guardrail(guarded, "enable_safety_check=False")
        check_request(pipe, request)

    def check_sampling(self, sampling: Mapping[str, Any]) -> None:
        """Refuse a frame count that would be cut."""
        check_frames({name: value for name, value in sampling.items() if value is not None})

    def resolve_request(self, pipe: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        """With the frame count that an action implies, and the pipeline's sizes."""
        return resolve_request(request)

    def request_streams(self, request: Mapping[str, Any]) -> tuple[str, ...]:
        """The scheduler is copied for sound, then for actions, where the request has them."""
        asked = {"audio": request.get("enable_sound"), "action": request.get("action")}
        return ("video", *(name for name, value in asked.items() if value))

    def masks(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], request: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Conditioned frames and actions, and the channels that an embodiment does not have."""
        return live(kwargs, request)

    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """One: the packed sequence has no batch axis."""
        return 1

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """Off at a scale of exactly 1; the pipeline puts "" where there is no negative prompt."""
        scale, action = float(request["guidance_scale"]), request.get("action")
        width = {} if action is None else {"action_width": float(action.raw_action_dim)}
        return {"do_guidance": scale != 1.0, "guidance_scale": scale, **width}

    def blocks(self, guidance: Mapping[str, float | bool]) -> dict[str, int]:
        """One: the branches are calls of their own."""
        return {}

    def calls_per_step(self, guidance: Mapping[str, float | bool]) -> int | None:
        """Two with guidance: the prompts have different lengths in the packed sequence."""
        return 2 if guidance["do_guidance"] else 1

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """``neg + scale (pos - neg)`` in float32, with the batch axis that the loop puts in front.

        The denoiser itself leaves zeros at conditioned places; only padded channels are cut here.
        """
        branches = [velocities(output, step) for output in step.outputs]
        if not step.guidance["do_guidance"]:
            return branches[0]
        positive, negative = branches
        scale = step.guidance["guidance_scale"]
        return {n: negative[n] + scale * (positive[n] - negative[n]) for n in positive}

    def encode(
        self,
        pipe: Any,
        prompt: str,
        max_sequence_length: int | None,
        inputs: Mapping[str, Any],
    ) -> Encoding:
        """The prompt as it is: it is tokenized with the request's sizes, see `denoising_part`."""
        if max_sequence_length is not None:
            refuse("prompts are never cut", max_sequence_length, "max_sequence_length=None")
        return {"prompt": prompt, **inputs}

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """One prompt's arguments, with what it came with."""
        (encoding,) = encodings
        if negatives is None:
            return {**encoding, "guidance_scale": 1.0}
        return {**encoding, "negative_prompt": negatives[0]["prompt"]}

    def denoising_part(self, pipe: Any) -> Any:
        """The pipeline without its sound decoder, tokenizing a prompt once for all its samples."""
        part = copy.copy(pipe)
        part.tokenize_prompt = functools.lru_cache(maxsize=None, typed=True)(pipe.tokenize_prompt)
        part.decode_sound = lambda latent: latent
        return part

    def denoise(self, part: Any, arguments: Mapping[str, Any], generators: Sequence[Any]) -> Any:
        """Latents of all streams; one generator draws their noise one after the other."""
        return part(**arguments, generator=generators[0], output_type="latent")

    def small_request(self, pipe: Any) -> dict[str, Any]:
        """A few tokens of two latent frames."""
        side = 4 * int(pipe.vae.config.scale_factor_spatial)
        return {"height": side, "width": side, "num_frames": 5}

    def latents(self, output: Any) -> dict[str, Tensor]:
        """[1, channels, frames, height, width], [1, channels, length] and [1, steps, width]."""
        found = {"video": output.video}
        if output.sound is not None:
            found["audio"] = output.sound[None]
        if output.action is not None:
            found["action"] = output.action[0][None]
        return found

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """A video or an image, with its sound and actions, if there are some."""
        return decode(pipe, latents, request)
