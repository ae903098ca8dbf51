"""The adapter's interface: a model family's facts that no code can find out by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from miles_rollout.media import Media

Encoding = Mapping[str, Tensor]
"""What one prompt becomes, without a batch axis: [tokens, channels] and the like."""


class PipelineAdapter(ABC):
    """Facts and small conversions of one pipeline family; holds no state."""

    streams: ClassVar[tuple[str, ...]]
    """Names of the latent streams: the scheduler's own, then its copies in the order made."""
    denoisers: ClassVar[tuple[str, ...]]
    """Components whose calls are recorded and replayed."""
    batch_axes: ClassVar[Mapping[str, int | None]]
    """Denoiser argument -> batch axis, None for what all rows share."""
    sampling: ClassVar[frozenset[str]]
    """Pipeline arguments that a caller of the engine may set."""
    scale_argument: ClassVar[str]
    """The pipeline argument that turns guidance by a negative prompt on, with a value above 1."""
    implied_negative: ClassVar[str | None]
    """The negative prompt where guidance is asked for without one; None: guidance is off then."""
    scheduler_streams: ClassVar[Mapping[str, str]] = {}
    """Scheduler component -> its stream, for a pipeline with several; else streams go in order."""
    packed: ClassVar[bool] = False
    """The pipeline steps [rows, channels] without a batch axis: one sample a call."""

    @abstractmethod
    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse a pipeline call that would be rolled out wrongly."""

    def resolve_request(self, pipe: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the pipeline will take them, where it fills in or rounds some."""
        return dict(request)

    @abstractmethod
    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """How many samples a denoiser call holds; None where it cannot be told."""

    @abstractmethod
    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """How the pipeline will combine its denoiser calls, from the call's arguments."""

    @abstractmethod
    def blocks(self, guidance: Mapping[str, float | bool]) -> dict[str, int]:
        """Denoiser argument -> blocks of rows in it, for those that hold more than one block."""

    @abstractmethod
    def calls_per_step(self, guidance: Mapping[str, float | bool]) -> int | None:
        """How many denoiser calls a step makes; None where it cannot be told."""

    @abstractmethod
    def combine(
        self, outputs: Sequence[Any], guidance: Mapping[str, float | bool]
    ) -> dict[str, Tensor]:
        """The velocity of each stream from a step's denoiser outputs, as the pipeline does it."""

    @abstractmethod
    def encode(self, pipe: Any, prompt: str, max_sequence_length: int | None) -> Encoding:
        """Encode one prompt by the pipeline's own code."""

    @abstractmethod
    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """The pipeline's arguments for a batch of encoded prompts, padded and masked."""

    def denoising_part(self, pipe: Any) -> Any:
        """What runs from encoded prompts to latents: the pipeline, or a part of it."""
        return pipe

    def denoise(self, part: Any, arguments: Mapping[str, Any], generators: Sequence[Any]) -> Any:
        """Call the denoising part, with one generator a row and latents out."""
        return part(**arguments, generator=generators, output_type="latent")

    def stepped(self, velocity: Tensor, state: Tensor) -> Tensor:
        """The part of a velocity that the scheduler was given, whose state is ``state``."""
        return velocity

    @abstractmethod
    def latents(self, output: Any) -> dict[str, Tensor]:
        """The final latents of each stream from the pipeline's latent output."""

    @abstractmethod
    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Decode final latents as the pipeline does, one `Media` a sample."""
