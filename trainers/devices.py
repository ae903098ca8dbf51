"""Devices by name."""

from __future__ import annotations

import torch

from trainers.config_loader import ConfigError
from trainers.first_line import first_line


def build_device(name: str, key: str = "model.device") -> torch.device:
    """A torch device by name; "auto" is the accelerator, if there is one.

    Raises ``ConfigError``, which names the setting ``key``, for a device that is not there.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator()
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"{key}: not available here; got {name!r} ({first_line(error)}); set auto or cpu"
        ) from error
    return device
