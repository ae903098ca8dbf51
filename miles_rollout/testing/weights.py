"""Random weights that hide no fault."""

from __future__ import annotations

import torch
from torch import nn


def enliven(module: nn.Module, generator: torch.Generator) -> None:
    """Re-draws weights that would hide a fault, in place.

    Weights that start as all 0 or all 1 hide a missing term. Matrices keep the scale of what
    they multiply: torch's default lets the prompt and the timestep fade from layer to layer.
    """
    with torch.no_grad():
        for weight in module.parameters():
            if weight.numel() > 1 and bool((weight == weight.flatten()[0]).all()):
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)
            elif weight.dim() == 2:
                std = weight.shape[1] ** -0.5
                weight.copy_(std * torch.randn(weight.shape, generator=generator))


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts in place as loading in this dtype does: what a class keeps in float32 stays so."""
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, parameter in module.named_parameters():
        if not kept & set(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def keep_contrast(vae: nn.Module) -> None:
    """Scale the convolutions of a deep VAE, in place, so that a picture does not fade to grey.

    torch draws their weights with a third of the variance that would keep a signal's; and of three
    frames that a causal 3D convolution sees, two are empty for a picture.
    """
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, (nn.Conv2d, nn.Conv3d)):
                frames = module.kernel_size[0] if isinstance(module, nn.Conv3d) else 1
                module.weight.mul_((3 * frames) ** 0.5)
