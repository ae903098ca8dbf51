"""Cosmos3's streams: which a request has, what of them is denoised, and their velocities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from miles_rollout.pipelines.base import DenoisingStep

STREAMS = ("video", "audio", "action")
"""In the order in which the denoiser returns their velocities."""


def live(kwargs: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Tensor]:
    """Masks of the streams of which not everything is denoised, from a denoiser call."""
    masks = {"video": _denoised(kwargs, "vision").view(1, 1, 1, -1, 1, 1)}
    action = request.get("action")
    if action is not None:
        tokens = kwargs["action_tokens"][0]
        channels = torch.arange(tokens.shape[-1], device=tokens.device) < action.raw_action_dim
        masks["action"] = (_denoised(kwargs, "action")[:, None] & channels)[None]
    return {name: mask for name, mask in masks.items() if not mask.all()}


def _denoised(kwargs: Mapping[str, Any], modality: str) -> Tensor:
    """[frames]: True where a latent frame is denoised, False where it is conditioned on."""
    (indexes,), ((frames, *_),) = (
        kwargs[f"{modality}_noisy_frame_indexes"],
        kwargs[f"{modality}_token_shapes"],
    )
    return torch.zeros(frames, dtype=torch.bool, device=indexes.device).index_fill(0, indexes, True)


def velocities(output: Any, step: DenoisingStep) -> dict[str, Tensor]:
    """One branch's velocity of each stream."""
    found = {
        name: predicted[0].float()[None]
        for name, predicted in zip(STREAMS, output, strict=True)
        if name in step.states
    }
    if "action" in found:
        action, width = found["action"], int(step.guidance["action_width"])
        found["action"] = pad(action[..., :width], (0, action.shape[-1] - width))
    return found
