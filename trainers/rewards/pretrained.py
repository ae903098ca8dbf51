"""Models and packages that rewards need: found before the run's own model is loaded, or one line."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError

from trainers.config_loader import ConfigError
from trainers.first_line import first_line

DTYPES = ("float32", "bfloat16", "float16")


def require(reward: str, extra: str, module: str) -> Any:
    """Import ``module``, which ``pip install 'miles-rollout[extra]'`` brings."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"reward {reward!r}: needs other packages; got {error}; pip install "
            f"'miles-rollout[{extra}]'"
        ) from error


def check_settings(reward: str, *, dtype: str, **counts: int) -> None:
    """Raise ``ConfigError`` for a dtype that is none of ``DTYPES``, and for counts below 1."""
    if dtype not in DTYPES:
        raise ConfigError(
            f"reward {reward!r}: dtype: unknown; got {dtype!r}; set one of {', '.join(DTYPES)}"
        )
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(
                f"reward {reward!r}: {name}: must be positive; got {count}; set 1 or more"
            )


def load(reward: str, key: str, name: str, loader: Callable[..., Any], **kwargs: Any) -> Any:
    """``loader(name)``, a ``from_pretrained``, or ``ConfigError`` that names the reward and ``key``."""
    try:
        with torch.random.fork_rng(devices=[]):
            return loader(name, **kwargs)
    except ImportError as error:
        raise ConfigError(
            f"reward {reward!r}: its {key} needs another package; got {name!r} ({first_line(error)}); "
            f"install that, or set another kwargs.{key}"
        ) from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        cause = first_line(error)
        raise ConfigError(
            f"reward {reward!r}: its {key} cannot be loaded; got {name!r} ({cause}); set kwargs.{key} "
            "to a folder, or to a hub name that can be reached"
        ) from error


def load_model(
    reward: str, name: str, model_class: Any, *, dtype: str, device: torch.device
) -> Any:
    """A model that only judges, on ``device``. Weights that its files lack are an error as well."""
    loader = model_class.from_pretrained
    model, told = load(
        reward, "model", name, loader, dtype=getattr(torch, dtype), output_loading_info=True
    )
    if missing := sorted(told["missing_keys"]):
        raise ConfigError(
            f"reward {reward!r}: its model lacks weights, which would be random; got {name!r} without "
            f"{len(missing)}, such as {missing[0]}; set kwargs.model to a {model_class.__name__}"
        )
    return model.eval().requires_grad_(False).to(device)
