"""Which of MiniMax H3's blocks run: one set for text, one for key frames, one for references."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from diffusers.modular_pipelines import ConditionalPipelineBlocks, SequentialPipelineBlocks

TEXT, KEYFRAMES, REFERENCES = "t2va", "fl2va", "ref2va"
"""What the blocks call the three workflows."""
DENOISERS = {TEXT: "transformer", KEYFRAMES: "transformer", REFERENCES: "transformer_ref"}
_TRIGGERS: dict[str, dict[str, bool]] = {
    TEXT: {},
    KEYFRAMES: {"image": True},
    REFERENCES: {"references": True},
}

_INPUTS: weakref.WeakKeyDictionary[Any, dict[str, set[str]]] = weakref.WeakKeyDictionary()
"""Blocks -> the names of their inputs in each workflow, which take milliseconds to collect."""


def workflow_of(given: Mapping[str, Any]) -> str:
    """The workflow that the blocks will choose; references come before key frames."""
    if given.get("references") is not None:
        return REFERENCES
    keyframes = (given.get("image"), given.get("last_image"))
    return TEXT if all(image is None for image in keyframes) else KEYFRAMES


def inputs_of(blocks: Any, workflow: str, given: Collection[str]) -> set[str]:
    """The names that the blocks read in this workflow; asked for again only where one is new."""
    known = _INPUTS.setdefault(blocks, {})
    if workflow not in known or not set(given) <= known[workflow]:
        chosen = _chosen(blocks, workflow)
        known[workflow] = {i.name or i.kwargs_type for i in chosen.inputs}
    return known[workflow]


def only_workflow(blocks: Any) -> str | None:
    """The workflow of a pipeline that was loaded for one; None where the blocks choose."""
    names = {workflow: inputs_of(blocks, workflow, ()) for workflow in _TRIGGERS}
    if not (names[TEXT] == names[KEYFRAMES] == names[REFERENCES]) or "prompt" not in names[TEXT]:
        return None
    if "references" in names[TEXT]:
        return REFERENCES
    return KEYFRAMES if "image" in names[TEXT] else TEXT


def part_of(pipe: Any, workflow: str, *names: str) -> Any:
    """Some of the pipeline's own blocks as a pipeline of the same components."""
    part = copy.copy(pipe)
    part._blocks = chosen_blocks(pipe.blocks, workflow, *names)
    return part


def chosen_blocks(blocks: Any, workflow: str, *names: str) -> Any:
    """The blocks that run in this workflow and are, or are inside of, one of ``names``."""
    chosen = _chosen(blocks, workflow).sub_blocks.items()
    kept = {name: block for name, block in chosen if name.partition(".")[0] in names}
    return SequentialPipelineBlocks.from_blocks_dict(kept)


def _chosen(blocks: Any, workflow: str) -> Any:
    if not isinstance(blocks, (ConditionalPipelineBlocks, SequentialPipelineBlocks)):
        return blocks
    return blocks.get_execution_blocks(prompt=True, **_TRIGGERS[workflow]) or blocks
