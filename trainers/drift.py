"""How far evaluation samples are from those of the base model: without its LoRA, or as full weights began."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Latents = Mapping[str, Tensor]
"""Stream -> final latents of the same samples, on the CPU."""


class Drift:
    """Holds the base model's latents, which are sampled once, when they are first compared with."""

    def __init__(self, sample: Callable[[], Latents], reference: Callable[[], Any] | None) -> None:
        """``sample`` runs the engine on the evaluation's prompts and seeds. Within ``reference()`` it
        runs the base model; None: there is none beside the trained one."""
        self._sample = sample
        self._reference = reference
        self._base: Latents | None = None
        self._told = False

    def metrics(self, latents: Latents, iteration: int) -> dict[str, float]:
        """``eval/drift/<stream>``: the RMS difference over all elements, in latent units.

        Without a reference the model of iteration 0 is the base, and a run that was resumed has none:
        then it is said once that nothing is measured.
        """
        if self._base is None and self._reference is not None:
            with self._reference():
                self._base = self._sample()
        elif self._base is None and iteration == 0:
            self._base = dict(latents)
        if self._base is None:
            if not self._told:
                logger.warning(
                    "monitors: eval/drift is not measured: full weights of a resumed run have no base "
                    "beside them; set monitors.drift_samples 0, or train a LoRA"
                )
            self._told = True
            return {}
        return {
            f"eval/drift/{stream}": rms(latents[stream], base)
            for stream, base in self._base.items()
        }


def rms(a: Tensor, b: Tensor) -> float:
    """Of the difference of two tensors of one shape."""
    return (a.float() - b.float()).square().mean().sqrt().item()


def first_rows(batches: list[Latents], count: int) -> dict[str, Tensor]:
    """The first ``count`` samples of latents that come in batches."""
    return {
        stream: torch.cat([batch[stream] for batch in batches])[:count].cpu()
        for stream in (batches[0] if batches else ())
    }
