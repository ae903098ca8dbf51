"""Prompts and what they come with, encoded: each distinct one once, then answered from memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from diffusers import ModularPipeline
from torch import nn

from miles_rollout.errors import RolloutParamsError, RolloutStateError
from miles_rollout.pipelines.base import Encoding, PipelineAdapter


class Encodings:
    """What one pipeline made of the prompts and inputs that it was shown."""

    def __init__(self, pipe: Any, adapter: PipelineAdapter) -> None:
        self._pipe = pipe
        self._adapter = adapter
        # Each with the inputs of its key, which keeps their ids their own.
        self._prepared: dict[Hashable, tuple[Any, Mapping[str, Any]]] = {}
        self._encoded: dict[Hashable, tuple[Any, Encoding]] = {}
        self._dropped: torch.dtype | None = None
        """The pipeline's dtype when its text encoders were dropped."""

    def check(
        self,
        prompts: Sequence[str],
        inputs: Sequence[Mapping[str, Any]] | None,
        sampling: Mapping[str, Any],
    ) -> None:
        """Raise ``RolloutParamsError`` for what cannot be encoded, before a model runs."""
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise RolloutParamsError(
                    f"RolloutEngine.encode: prompts are strings; got {prompt!r}; pass a list of str"
                )
        checked = set()
        for given in [{}] if inputs is None else inputs:
            if (identity := _identity(given)) not in checked:
                self._adapter.check_inputs(self._pipe, given, sampling)
                checked.add(identity)

    @torch.no_grad()
    def encode(
        self,
        prompts: Sequence[str],
        max_sequence_length: int | None,
        inputs: Sequence[Mapping[str, Any]] | None,
        sampling: Mapping[str, Any],
    ) -> list[Encoding]:
        """The encodings of prompts that were checked."""
        # Of the whole pipeline: what was encoded before a cast is stale.
        dtype = self._dropped or self._pipe.dtype
        read = {name: sampling.get(name) for name in sorted(self._adapter.prepared_for)}
        encoded = []
        for prompt, given in zip(prompts, inputs or [{}] * len(prompts), strict=True):
            common = (_identity(given), tuple(read.values()), dtype)
            key = (prompt, max_sequence_length, common)
            if key not in self._encoded:
                self._check_not_dropped(prompt)
                if common not in self._prepared:
                    kept = {n: list(v) if isinstance(v, list) else v for n, v in given.items()}
                    made = self._adapter.prepare(self._pipe, kept, read)
                    self._prepared[common] = (kept, made)
                kept, made = self._prepared[common]
                encoding = self._adapter.encode(self._pipe, prompt, max_sequence_length, made)
                self._encoded[key] = (kept, encoding)
            encoded.append(self._encoded[key][1])
        return encoded

    def drop_text_encoders(self) -> list[str]:
        """Take the text encoders out of the pipeline; returns their names."""
        names = text_encoders(self._pipe)
        if not names:
            raise RolloutParamsError(
                "RolloutEngine.drop_text_encoders: this pipeline has none; got "
                f"{type(self._pipe).__name__}; leave them be"
            )
        # Its first component may be one of those, and tells the pipeline's dtype.
        self._dropped = self._pipe.dtype
        if isinstance(self._pipe, ModularPipeline):
            self._pipe.unload_components(names)
        else:
            self._pipe.register_modules(**dict.fromkeys(names))
        return names

    def _check_not_dropped(self, prompt: str) -> None:
        if self._dropped is not None:
            raise RolloutStateError(
                "RolloutEngine.encode: the text encoders were dropped, and this prompt was not "
                f"encoded before; got {prompt!r}; encode all prompts first"
            )


def text_encoders(pipe: Any) -> list[str]:
    """The names of the components that only make embeddings of prompts."""
    return [
        name
        for name, component in pipe.components.items()
        if name.startswith("text_encoder") and isinstance(component, nn.Module)
    ]


def _identity(inputs: Mapping[str, Any]) -> Hashable:
    """The same for the same objects; a list is the objects in it, in their order."""
    return tuple(
        (name, tuple(map(id, value)) if isinstance(value, (list, tuple)) else id(value))
        for name, value in sorted(inputs.items())
        if value is not None
    )
