"""A MiniMax H3 prompt with what it came with, from the pipeline's own blocks to its denoising ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_rollout.pipelines.base import Encoding
from miles_rollout.pipelines.minimax_h3_blocks import (
    KEYFRAMES,
    REFERENCES,
    TEXT,
    part_of,
    workflow_of,
)
from miles_rollout.pipelines.minimax_h3_inputs import refuse
from miles_rollout.pipelines.minimax_h3_request import resolve_request

SIZES = ("height", "width", "num_frames")
"""What conditions are encoded for."""
_SEEN: dict[str, tuple[str, ...]] = {
    TEXT: (),
    KEYFRAMES: ("keyframes",),
    REFERENCES: ("normalized_references",),
}
"""What the text encoder is shown of what a prompt comes with."""
_CONDITIONS: dict[str, tuple[str, ...]] = {
    TEXT: (),
    KEYFRAMES: ("keyframe_anchors", "condition_latents"),
    REFERENCES: ("normalized_references", "condition_latents", "audio_condition_latents"),
}
"""What the denoising blocks are given of it."""


def prepare(pipe: Any, inputs: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """What comes with a prompt, on the canvas and through the VAEs, whose draws have a fixed seed."""
    workflow = workflow_of(inputs)
    if workflow == TEXT:
        return {"workflow": workflow, "sizes": {}}
    resolved = resolve_request(pipe, {**sampling, **inputs})
    part = part_of(pipe, workflow, "before_encode", "vae_encoder")
    taken = {name: resolved[name] for name in part._blocks.input_names if name in resolved}
    made = part(**taken, output=sorted({*_SEEN[workflow], *_CONDITIONS[workflow]}))
    return {"workflow": workflow, "sizes": {name: resolved[name] for name in SIZES}, **made}


def encode(pipe: Any, prompt: str, prepared: Mapping[str, Any]) -> Encoding:
    """The prompt after what `prepare` made: ``embeds`` [tokens, channels] and ``tags`` [tokens]."""
    workflow = prepared["workflow"]
    part = part_of(pipe, workflow, "text_encoder")
    seen = {name: prepared[name] for name in _SEEN[workflow]}
    found = part(prompt=prompt, **seen, output=["prompt_embeds", "text_token_tags"])
    return {
        "workflow": workflow,
        "sizes": prepared["sizes"],
        "embeds": found["prompt_embeds"][0],
        "tags": found["text_token_tags"],
        "conditions": {name: prepared[name] for name in _CONDITIONS[workflow]},
    }


def conditions_of(pipe: Any, encoding: Encoding, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The denoising blocks' arguments; their sizes are those that the conditions were made for."""
    sizes = encoding["sizes"]
    asked = {name: sampling.get(name) or size for name, size in sizes.items()}
    if sizes and resolve_request(pipe, asked) != sizes:
        refuse("the conditions were encoded for another size", asked, f"{sizes}, or encode again")
    return {
        "prompt_embeds": encoding["embeds"][None],
        "text_token_tags": encoding["tags"],
        **encoding["conditions"],
        **sizes,
    }
