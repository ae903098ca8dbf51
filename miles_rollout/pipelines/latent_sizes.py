"""How large latents are, from the modules that make them; weights are not needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def elements_by_vae(vae: nn.Module, sampling: Mapping[str, Any]) -> int | None:
    """The latent elements of one sample, by the VAE's own encoder on an empty picture or video.

    Packing moves them and adds none. The module may be on the meta device, where this costs nothing.
    None for a request without a size.
    """
    height, width = sampling.get("height"), sampling.get("width")
    if height is None or width is None:
        return None
    # Of every family's own class of causal convolutions the name tells, and not all are torch's.
    is_video = any("Conv3d" in type(module).__name__ for module in vae.modules())
    frames = (sampling.get("num_frames") or 1,) if is_video else ()
    weight = next(vae.parameters())
    encoder: Any = vae
    channels = encoder.config.get("in_channels", 3)
    # Where a VAE cuts patches first, its channels are those of a patch.
    shape = (1, channels if channels <= 4 else 3, *frames, height, width)
    pixels = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        made = encoder.encode(pixels)
    return (made.latent if "latent" in made else made.latent_dist.mode()).numel()
