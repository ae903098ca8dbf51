"""Which prompts are longer than what the text encoder of a pipeline will see."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from miles_rollout.call_signature import call_defaults
from miles_rollout.pipelines import PipelineAdapter
from trainers.data import PromptFile

logger = logging.getLogger(__name__)


def warn_of_cut_prompts(
    file: PromptFile, pipe: Any, adapter: PipelineAdapter, sampling: Mapping[str, Any]
) -> None:
    """Log one warning with the number of prompts that lose their end, and the first of them.

    Tokens are those of the prompt alone: a family's template around it comes on top. Of a pipeline
    with several tokenizers a prompt is told if none of them takes it whole: FLUX and Stable Diffusion
    3 give what CLIP cuts to T5 as well. Where a pipeline has no limit, or no tokenizer of its own,
    nothing is said.
    """
    limits = _limits(pipe, adapter, sampling)
    if not limits:
        return
    cut = set(range(len(file.records)))
    for name, limit in limits.items():
        lengths = _lengths(getattr(pipe, name), [file.records[i].prompt for i in sorted(cut)])
        cut = {i for i, length in zip(sorted(cut), lengths, strict=True) if length > limit}
        if not cut:
            return
    first = file.records[min(cut)]
    logger.warning(
        "%s: %d of %d prompts are longer than the %d tokens that the text encoder sees, and are cut; "
        "the first is line %d; shorten them, or set rollout.sampling.max_sequence_length where the "
        "model allows more",
        file.source,
        len(cut),
        len(file.records),
        max(limits.values()),
        first.line,
    )


def _limits(pipe: Any, adapter: PipelineAdapter, sampling: Mapping[str, Any]) -> dict[str, int]:
    """Tokenizer -> tokens that it is cut at; empty where prompts are not cut, or it is not known."""
    default = call_defaults(type(pipe)).get("max_sequence_length")
    longest = sampling.get("max_sequence_length") or default
    longest = longest or getattr(pipe, "tokenizer_max_length", None)
    if not adapter.cuts_prompts or not longest:
        return {}
    components: Mapping[str, Any] = pipe.components
    lengths = {
        name: getattr(component, "model_max_length", None)
        for name, component in components.items()
        if name.startswith("tokenizer")
    }
    return {name: min(longest, length) for name, length in lengths.items() if length is not None}


def _lengths(tokenizer: Any, prompts: list[str]) -> list[int]:
    ids = tokenizer(prompts, truncation=False, padding=False, verbose=False)["input_ids"]
    return [len(row) for row in ids]
