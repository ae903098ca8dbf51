"""Cosmos3 in few steps: the distilled blocks, whose sigmas are fixed and which need no guidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

from miles_rollout.pipelines.base import Encoding
from miles_rollout.pipelines.cosmos3_modular import Cosmos3ModularAdapter
from miles_rollout.pipelines.cosmos3_request import refuse


@final
class Cosmos3DistilledAdapter(Cosmos3ModularAdapter):
    """``Cosmos3DistilledModularPipeline``: guidance is in the weights, and the schedule is fixed."""

    streams: ClassVar[tuple[str, ...]] = ("video",)
    inputs: ClassVar[frozenset[str]] = frozenset({"image", "video"})
    scale_argument: ClassVar[str | None] = None
    implied_negative: ClassVar[str | None] = None
    sampling: ClassVar[frozenset[str]] = Cosmos3ModularAdapter.sampling - {"enable_sound"}

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """None: the blocks take no other scale than 1."""
        return super().guidance({**request, "guidance_scale": 1.0})

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """One prompt's arguments, with what it came with."""
        if negatives is not None:
            refuse("this model is guidance-distilled", "a negative prompt", "none")
        return dict(encodings[0])
