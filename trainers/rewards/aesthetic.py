"""Reward: how beautiful people find a picture, by the LAION predictor on CLIP-L features."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from miles_rollout import Media
from miles_rollout.shapes import Float
from trainers.config_loader import ConfigError
from trainers.rewards.clip_features import ClipFeatures
from trainers.rewards.pixels import mean_per_sample, pictures
from trainers.rewards.pretrained import check_settings


class Aesthetic:
    """A number of about 1..10; of a video the mean over ``frames`` evenly spaced ones.

    ``head`` is a safetensors file with the predictor's weights, ``layers.N.weight`` and ``.bias``,
    by default 768-1024-128-64-16-1 in float32. It is linear: dropout lies between its layers, and no
    activation. Raises ``ConfigError`` for files that cannot be loaded or do not fit together.
    """

    def __init__(
        self,
        *,
        head: str,
        model: str = "openai/clip-vit-large-patch14",
        processor: str = "openai/clip-vit-large-patch14",
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int = 8,
    ) -> None:
        check_settings("aesthetic", dtype=dtype, frames=frames)
        self.frames = frames
        self.layers = read_head(Path(head))
        self.clip = ClipFeatures(
            "aesthetic",
            model=model,
            processor=processor,
            device=device,
            dtype=dtype,
            batch_size=batch_size,
        )
        width, wanted = self.clip.model.config.projection_dim, self.layers[0][0].shape[1]
        if width != wanted:
            raise ConfigError(
                f"reward 'aesthetic': head and model differ in width; got {wanted} in {head!r} and "
                f"{width} in {model!r}; set the model that the head was trained on"
            )

    def __call__(
        self,
        media: Sequence[Media],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> Float[Tensor, " samples"]:
        """float64; prompts are not looked at."""
        images, owners = pictures(media, self.frames)
        values = self.clip.of_pictures(images).cpu()
        for weight, bias in self.layers:
            values = F.linear(values, weight, bias)
        return mean_per_sample(values[:, 0], owners, len(media))


def read_head(path: Path) -> list[tuple[Tensor, Tensor]]:
    """Weight [out, in] and bias [out] of each layer in order, float32."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"reward 'aesthetic': its head cannot be read; got {str(path)!r} ({error}); set "
            "kwargs.head to a safetensors file"
        ) from error
    numbers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    order = sorted((n for n in numbers if n.isdecimal()), key=int)
    wanted = {f"layers.{n}.{part}" for n in order for part in ("weight", "bias")}
    layers = [
        (tensors[f"layers.{n}.weight"].to(torch.float32), tensors[f"layers.{n}.bias"].float())
        for n in (order if wanted == set(tensors) else ())
    ]
    widths = [weight.shape for weight, _ in layers]
    fits = all(w.ndim == 2 and b.shape == w.shape[:1] for w, b in layers)
    fits = fits and all(b[1] == a[0] for a, b in itertools.pairwise(widths))
    if not layers or not fits or widths[-1][0] != 1:
        raise ConfigError(
            f"reward 'aesthetic': its head is no chain of linear layers that ends in one number; got "
            f"{sorted(tensors)[:4]} with {[tuple(w) for w in widths]}; set kwargs.head to a file with "
            "layers.N.weight and layers.N.bias"
        )
    return layers
