"""MiniMax H3: video and sound in one packed sequence, two schedules, one call a step.

The pipeline is modular: encode, denoise and decode are its own blocks, run one by one, since a
call of the whole pipeline encodes again what its samples share, and gives no latents. A prompt may come
with key frames (``image``, ``last_image``) or with ``references``, which have a denoiser of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

from torch import Tensor

from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding, PipelineAdapter
from miles_rollout.pipelines.minimax_h3_blocks import TEXT, chosen_blocks, part_of, workflow_of
from miles_rollout.pipelines.minimax_h3_encoding import SIZES, conditions_of, encode, prepare
from miles_rollout.pipelines.minimax_h3_inputs import check_inputs, refuse
from miles_rollout.pipelines.minimax_h3_request import (
    GUIDANCE,
    check_guidance,
    check_points,
    check_request,
    check_sizes,
    latent_elements,
    resolve_request,
)


@final
class MiniMaxH3Adapter(PipelineAdapter):
    """``MiniMaxH3ModularPipeline``: video with sound, one sample a call."""

    streams: ClassVar[tuple[str, ...]] = ("video", "audio")
    scheduler_streams: ClassVar[Mapping[str, str]] = {
        "scheduler": "video",
        "audio_scheduler": "audio",
    }
    one_sample: ClassVar[bool] = True
    packed: ClassVar[bool] = True
    cuts_prompts: ClassVar[bool] = False
    denoisers: ClassVar[tuple[str, ...]] = ("transformer", "transformer_ref")
    batch_axes: ClassVar[Mapping[str, int | None]] = {}
    scale_argument: ClassVar[str | None] = None
    implied_negative: ClassVar[str | None] = None
    inputs: ClassVar[frozenset[str]] = frozenset({"image", "last_image", "references"})
    prepared_for: ClassVar[frozenset[str]] = frozenset(SIZES)
    sampling: ClassVar[frozenset[str]] = frozenset(
        {"height", "width", "num_frames", "num_inference_steps", "attention_kwargs", *GUIDANCE}
    )

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse what the pipeline would ignore, draw from the global RNG, or fail on midway."""
        check_request(pipe, request)

    def check_sampling(self, sampling: Mapping[str, Any]) -> None:
        """Refuse guidance, and a schedule of one point."""
        check_guidance(sampling)
        check_points(sampling)

    def num_steps(self, num_inference_steps: int) -> int:
        """One less than the grid points, of which the last is clean."""
        return num_inference_steps - 1

    def latent_elements(
        self, components: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> dict[str, int] | None:
        """Of both streams, on the VAE's grid."""
        return latent_elements(components, sampling)

    def resolve_request(self, pipe: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        """With the frame count on the VAE's grid, and the canvas of a text without a size."""
        return resolve_request(pipe, request)

    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """One: the batch axis of the packed sequence is 1."""
        return len(kwargs["hidden_states"])

    def blocks(self, guidance: Mapping[str, float | bool]) -> dict[str, int]:
        """One row is all there is."""
        return {}

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """None: it is distilled into the weights."""
        return {}

    def calls_per_step(self, guidance: Mapping[str, float | bool]) -> int | None:
        """One for all rows of both streams."""
        return 1

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """Both velocities, in float32 as the loop hands them to the schedulers.

        Conditioning rows stand in front of the generated ones and are never stepped.
        """
        return {
            name: velocity.float()[:, velocity.shape[1] - step.states[name].shape[1] :]
            for name, velocity in zip(("video", "audio"), step.outputs[0], strict=True)
        }

    def check_inputs(
        self, pipe: Any, inputs: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> None:
        """Refuse images and references that the blocks would fail on late, ignore or misread."""
        check_inputs(pipe, inputs)
        if workflow_of(inputs) != TEXT:
            sizes = {n: sampling[n] for n in SIZES if sampling.get(n) is not None}
            check_sizes(pipe, {**inputs, **sizes})

    def prepare(
        self, pipe: Any, inputs: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """On the canvas, and through the VAEs."""
        return prepare(pipe, inputs, sampling)

    def encode(
        self,
        pipe: Any,
        prompt: str,
        max_sequence_length: int | None,
        inputs: Mapping[str, Any],
    ) -> Encoding:
        """The prompt and what it came with, by the text block; its length is free."""
        if max_sequence_length is not None:
            refuse("prompts are never cut", max_sequence_length, "max_sequence_length=None")
        return encode(pipe, prompt, inputs)

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """One prompt's arguments of its denoising blocks, and which blocks these are."""
        if negatives is not None:
            refuse("MiniMax H3 is guidance-distilled", "a negative prompt", "none")
        (encoding,) = encodings
        return {"encoding": encoding}

    def denoising_part(self, pipe: Any) -> Any:
        """A pipeline of the same components, for `denoise` to give it its blocks."""
        part = copy.copy(pipe)
        part.all_blocks = pipe.blocks
        return part

    def denoise(self, part: Any, arguments: Mapping[str, Any], generators: Sequence[Any]) -> Any:
        """Latents of both streams.

        One generator draws the noise of the conditions first, then the video's, then the sound's.
        """
        check_guidance(arguments)
        kept = {name: value for name, value in arguments.items() if name not in GUIDANCE}
        encoding = kept.pop("encoding")
        part._blocks = chosen_blocks(part.all_blocks, encoding["workflow"], "denoise")
        kept |= conditions_of(part, encoding, kept)
        return part(**kept, generator=generators[0], output=["latents", "audio_latents"])

    def small_request(self, pipe: Any) -> dict[str, Any]:
        """The smallest canvas and the shortest video."""
        side = pipe.canvas_multiple
        return {"height": side, "width": side, "num_frames": 124}

    def latents(self, output: Any) -> dict[str, Tensor]:
        """[1, channels, frames, height, width], and [1, stereo, channels, length]."""
        return {"video": output["latents"], "audio": output["audio_latents"][None]}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Both media by the decode blocks, one sample after the other."""
        part, names = part_of(pipe, TEXT, "decode"), ["videos", "audio", "sampling_rate"]
        media = []
        for video, audio in zip(latents["video"], latents["audio"], strict=True):
            made = part(latents=video[None], audio_latents=audio, output_type="pt", output=names)
            media.append(
                Media(
                    video=made["videos"][0],
                    audio=made["audio"][0],
                    fps=pipe.fps,
                    sampling_rate=made["sampling_rate"],
                )
            )
        return media
