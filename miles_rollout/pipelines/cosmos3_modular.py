"""Cosmos3 as a modular pipeline: the same streams and calls, run block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diffusers.modular_pipelines import SequentialPipelineBlocks
from torch import Tensor

from miles_rollout.pipelines.cosmos3 import Cosmos3Adapter
from miles_rollout.pipelines.cosmos3_request import check_guardrail, check_request, refuse
from miles_rollout.pipelines.modular import default_inputs

_OUTPUTS = {"video": "latents", "audio": "sound_latents", "action": "action"}


class Cosmos3ModularAdapter(Cosmos3Adapter):
    """``Cosmos3OmniModularPipeline``."""

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse also what the blocks would only warn of, and chunks that follow one another."""
        given = {k: v for k, v in request.items() if v is not None and k != "output"}
        if given.pop("args", None) or "state" in given:
            refuse("a state hides its arguments", "a state", "them as arguments")
        known = default_inputs(pipe._blocks, given)
        unknown = sorted(set(given) - set(known))
        if unknown:
            refuse(
                "no such argument, which the pipeline would ignore",
                ", ".join(unknown),
                f"one of {', '.join(sorted(known))}",
            )
        if "control_videos" in given:
            refuse(
                "a video by control signals is denoised chunk after chunk, not in one loop",
                "control_videos",
                "image, video or action instead",
            )
        check_guardrail(pipe.requires_safety_checker, "pipe.disable_safety_checker()")
        check_request(pipe, given)

    def resolve_request(self, pipe: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        """With the blocks' own defaults: the pipeline's signature has none."""
        defaults = default_inputs(pipe._blocks, ())
        known = {name: defaults.get(name) for name in ("guidance_scale", "fps")}
        return super().resolve_request(pipe, {**known, **request})

    def denoising_part(self, pipe: Any) -> Any:
        """All blocks but the one that decodes."""
        part = super().denoising_part(pipe)
        kept = {name: b for name, b in pipe._blocks.sub_blocks.items() if name != "decode"}
        part._blocks = SequentialPipelineBlocks.from_blocks_dict(kept)
        return part

    def denoise(self, part: Any, arguments: Mapping[str, Any], generators: Sequence[Any]) -> Any:
        """Latents of all streams; one generator draws their noise one after the other."""
        return part(**arguments, generator=generators[0], output=list(_OUTPUTS.values()))

    def latents(self, output: Any) -> dict[str, Tensor]:
        """As the standard pipeline gives them."""
        found = {stream: output[name] for stream, name in _OUTPUTS.items()}
        found["action"] = found["action"] and found["action"][0]
        return {s: t if s == "video" else t[None] for s, t in found.items() if t is not None}
