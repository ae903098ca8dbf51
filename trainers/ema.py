"""An exponential moving average of the trained weights, by name and by update.

``shadow <- d shadow + (1 - d) weights`` after every ``every``-th update, with d at most ``decay`` and,
with ``warmup``, at most ``(1 + n) / (10 + n)`` after update n: else the shadow would stay the
initial weights for long. It is kept in float32 whatever the weights are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from miles_rollout.errors import MilesRolloutError
from trainers.config_loader import STRICT


class EMAError(MilesRolloutError, ValueError):
    """An average does not belong to the weights that it is used with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EMAConfig:
    """How slow the average is, and what it is used for."""

    __pydantic_config__ = STRICT

    decay: float = 0.9
    """The share of the average that a step of it keeps."""
    every: int = 8
    """Updates between its steps."""
    warmup: bool = True
    """The decay is at most (1 + n) / (10 + n) after update n."""
    evaluate: bool = True
    """Evaluations are of the average."""
    export: bool = True
    """What is exported for stock diffusers is the average."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1 or self.every < 1:
            raise ValueError(
                "decay must be within 0..1, 1 excluded, and every at least 1; got "
                f"{self.decay}, {self.every}"
            )
        if not (self.evaluate or self.export):
            raise ValueError("ema has no effect: neither evaluate nor export; set one, or ema null")


@final
class EMA:
    """The average of some parameters, which are handed in again at each use."""

    def __init__(self, config: EMAConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        self.config = config
        self.num_updates = 0
        self._shadow = {n: p.detach().to(torch.float32, copy=True) for n, p in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Count one update of the weights, and step where it is due."""
        self._check(parameters)
        count, self.num_updates = self.num_updates, self.num_updates + 1
        if self.num_updates % self.config.every:
            return
        decay = self.config.decay
        if self.config.warmup:
            decay = min(decay, (1 + count) / (10 + count))
        for name, parameter in parameters.items():
            self._shadow[name].lerp_(parameter.to(torch.float32), 1 - decay)

    @contextlib.contextmanager
    def applied(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Inside, the parameters hold the average; after, also after an error, their own values."""
        self._check(parameters)
        own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        try:
            self.copy_to(parameters)
            yield
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(own[name])

    @torch.no_grad()
    def copy_to(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Overwrite the parameters with the average."""
        self._check(parameters)
        for name, parameter in parameters.items():
            parameter.copy_(self._shadow[name])

    def tensors(self) -> dict[str, Tensor]:
        """A copy of the average, to save."""
        return {name: tensor.clone() for name, tensor in self._shadow.items()}

    def load(self, tensors: Mapping[str, Tensor], num_updates: int) -> None:
        """Put back what `tensors` gave. Raises ``EMAError`` for other names or shapes."""
        self._check(tensors)
        self._shadow = {
            name: tensors[name].to(own, copy=True) for name, own in self._shadow.items()
        }
        self.num_updates = num_updates

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        own = self._shadow
        unfit = own.keys() ^ tensors.keys()
        unfit |= {n for n in own.keys() & tensors.keys() if own[n].shape != tensors[n].shape}
        if unfit:
            raise EMAError(
                f"ema: its weights are not these; got other names or shapes in {sorted(unfit)[:5]} "
                f"({len(own)} averaged, {len(tensors)} given); set model.lora and model.denoisers of "
                "the saved run"
            )
