"""What several families share: refusals, the guidance formula, encodings in a batch, decoding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from miles_rollout.errors import RolloutParamsError
from miles_rollout.media import Media
from miles_rollout.pipelines.base import Encoding


def refuse(problem: str, value: object, advice: str) -> NoReturn:
    """Raise ``RolloutParamsError``: "rollout: problem; got value; set advice"."""
    raise RolloutParamsError(f"rollout: {problem}; got {value}; set {advice}")


def check_sizes(request: Mapping[str, Any], multiple: int, *names: str) -> None:
    """Refuse a side that the pipeline would round. Raises ``RolloutParamsError``."""
    for name in names:
        value = request.get(name)
        if value is not None and value % multiple:
            refuse(
                f"{name} must be divisible by {multiple}, or the pipeline rounds it",
                value,
                f"{name} to a multiple of {multiple}",
            )


def check_frames(request: Mapping[str, Any], compression: int = 4) -> None:
    """Refuse a number of frames that the pipeline would round: one, and then whole groups.

    The released VAEs of Wan and HunyuanVideo compress four frames into one.
    """
    frames = request.get("num_frames")
    if frames is not None and (frames < 1 or (frames - 1) % compression):
        refuse(
            f"num_frames must be {compression} n + 1, or the pipeline rounds it",
            frames,
            f"num_frames to a multiple of {compression}, plus 1",
        )


def even_sigmas(num_inference_steps: int) -> list[float]:
    """From 1 down to 1 / T, evenly: what most pipelines give their scheduler, bit for bit."""
    count = num_inference_steps
    return [float(sigma) for sigma in np.linspace(1.0, 1 / count, count)]


def guide(negative: Tensor, positive: Tensor, scale: float | int) -> Tensor:
    """Classifier-free guidance (arXiv 2207.12598) in diffusers' order of operations."""
    return negative + scale * (positive - negative)


def classifier_free(request: Mapping[str, Any]) -> dict[str, float | bool]:
    """Guidance that is on with a ``guidance_scale`` above 1, whatever the negative prompt."""
    scale = float(request["guidance_scale"])
    return {"do_classifier_free_guidance": scale > 1, "guidance_scale": max(scale, 1.0)}


def is_guided(guidance: Mapping[str, float | bool]) -> bool:
    """Whether `classifier_free` found guidance on."""
    return bool(guidance["do_classifier_free_guidance"])


def two_blocks(axes: Mapping[str, int | None], guidance: Mapping[str, float | bool]) -> Any:
    """Two blocks in every argument that has rows, for guidance that is one call."""
    rows = [name for name, axis in axes.items() if axis is not None]
    return dict.fromkeys(rows, 2) if is_guided(guidance) else {}


def stack(
    encodings: Sequence[Encoding], names: Collection[str], prefix: str = ""
) -> dict[str, Tensor]:
    """Entries of encodings that have one length, as a batch: the pipeline's arguments."""
    return {prefix + name: torch.stack([e[name] for e in encodings]) for name in names}


def decode_images(pipe: Any, latents: Tensor) -> list[Media]:
    """Undo scale and shift of latents [B, C, h, w], decode, and map to 0..1."""
    config = pipe.vae.config
    scaled = latents / config.scaling_factor + config.shift_factor
    pixels = pipe.vae.decode(scaled, return_dict=False)[0]
    images = pipe.image_processor.postprocess(pixels, output_type="pt")
    return [Media(image=image.float()) for image in images]
