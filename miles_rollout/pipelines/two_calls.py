"""What the families share that guide by two denoiser calls a step, the positive one first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from miles_rollout.pipelines.base import Encoding, PipelineAdapter


class TwoCallAdapter(PipelineAdapter):
    """Rows are the latents' batch; ``guidance`` of a family says in ``do_true_cfg`` if it is on."""

    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """The latents' batch: the branches of guidance are calls of their own."""
        return len(kwargs["hidden_states"])

    def blocks(self, guidance: Mapping[str, float | bool]) -> dict[str, int]:
        """One: the branches of guidance are calls of their own."""
        return {}

    def calls_per_step(self, guidance: Mapping[str, float | bool]) -> int | None:
        """Two with guidance."""
        return 2 if guidance["do_true_cfg"] else 1


def true_cfg(request: Mapping[str, Any], default: float) -> dict[str, float | bool]:
    """On with a ``true_cfg_scale`` above 1 and a negative prompt, and off without either."""
    scale = float(request.get("true_cfg_scale", default))
    negative = ("negative_prompt", "negative_prompt_embeds")
    has_negative = any(request.get(name) is not None for name in negative)
    do_true_cfg = scale > 1 and has_negative
    return {"do_true_cfg": do_true_cfg, "true_cfg_scale": scale if do_true_cfg else 1.0}


def pad(encodings: Sequence[Encoding]) -> tuple[Tensor, Tensor]:
    """``embeds`` [rows, longest, channels] with zeros behind, and the mask [rows, longest] of 1."""
    rows = [encoding["embeds"] for encoding in encodings]
    mask = [torch.ones(len(row), dtype=torch.long, device=row.device) for row in rows]
    return pad_sequence(rows, batch_first=True), pad_sequence(mask, batch_first=True)
