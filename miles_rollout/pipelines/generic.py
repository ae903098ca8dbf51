"""What is known of a pipeline that has no adapter: enough to roll out, not enough to replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn, final

from torch import Tensor

from miles_rollout.errors import RolloutParamsError
from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding, PipelineAdapter


@final
class GenericAdapter(PipelineAdapter):
    """Streams and denoisers by diffusers' usual names; refuses what would have to be guessed."""

    streams: ClassVar[tuple[str, ...]] = ("image", "audio")
    denoisers: ClassVar[tuple[str, ...]] = ("transformer", "transformer_2", "unet")
    batch_axes: ClassVar[Mapping[str, int | None]] = {}
    sampling: ClassVar[frozenset[str]] = frozenset()
    scale_argument: ClassVar[str | None] = "guidance_scale"
    implied_negative: ClassVar[str | None] = None

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Nothing is known to be wrong."""

    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """Unknown: a call may hold guidance branches side by side."""
        return None

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """Unknown."""
        return {}

    def blocks(self, guidance: Mapping[str, float | bool]) -> dict[str, int]:
        """Unknown; without declared axes nothing can be cut."""
        return {}

    def calls_per_step(self, guidance: Mapping[str, float | bool]) -> int | None:
        """Unknown."""
        return None

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """Not defined without an adapter."""
        self._refuse("replay")

    def encode(
        self,
        pipe: Any,
        prompt: str,
        max_sequence_length: int | None,
        inputs: Mapping[str, Any],
    ) -> Encoding:
        """Not defined without an adapter."""
        self._refuse("encode")

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """Not defined without an adapter."""
        self._refuse("generate")

    def latents(self, output: Any) -> dict[str, Tensor]:
        """Not defined without an adapter."""
        self._refuse("generate")

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Not defined without an adapter."""
        self._refuse("decode")

    def _refuse(self, verb: str) -> NoReturn:
        raise RolloutParamsError(
            f"RolloutEngine.{verb}: this pipeline has no adapter; got the generic one; pass "
            "adapter=, or add one to miles_rollout/pipelines"
        )
