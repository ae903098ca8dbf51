"""The weights that are trained: a LoRA, or all of the denoiser, and the reference beside them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles_rollout import RolloutEngine
from miles_rollout.errors import MilesRolloutError
from miles_rollout.noise import derive_seed
from trainers.lora import (
    LoraConfig,
    adapter_tensors,
    attach_lora,
    base_model,
    export_lora,
    load_adapter_tensors,
    weights_name,
)


class PolicyError(MilesRolloutError, ValueError):
    """Weights do not fit the model that they are for."""


class Policy:
    """The trained denoisers of one engine. Rollout and training share the very same modules.

    ``denoisers``: which are trained (None: all that the pipeline has); the others stay as they are.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        lora: LoraConfig | None,
        *,
        seed: int,
        gradient_checkpointing: bool = False,
        compile_backend: str | None = None,
        keep_reference: bool = False,
        denoisers: Sequence[str] | None = None,
    ) -> None:
        self.engine = engine
        self.lora = lora
        pipe = engine.pipe
        self.modules = _trained_modules(engine, denoisers)
        for component in pipe.components.values():
            if isinstance(component, nn.Module):
                component.requires_grad_(False).eval()
        self._reference: dict[str, nn.Module] = {}
        for name, module in self.modules.items():
            if lora is not None:
                attach_lora(module, lora, seed=derive_seed("lora", seed, name))
            else:
                if keep_reference:
                    self._reference[name] = copy.deepcopy(module)
                module.requires_grad_(True)
            if gradient_checkpointing:
                checkpointed: Any = module
                checkpointed.enable_gradient_checkpointing()
            if compile_backend is not None:
                _compile(module, compile_backend)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All trained parameters as ``<denoiser>.<name>``, sorted."""
        return {
            f"{denoiser}.{name}": parameter
            for denoiser, module in sorted(self.modules.items())
            for name, parameter in sorted(module.named_parameters())
            if parameter.requires_grad
        }

    def without_gradient(self) -> list[str]:
        """The trained denoisers that the last backward did not reach."""
        return [
            name
            for name, module in self.modules.items()
            if all(p.grad is None for p in module.parameters() if p.requires_grad)
        ]

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the engine runs the model that training started from.

        With a LoRA that is the base model; with full weights it is the copy that
        ``keep_reference`` made. Raises ``PolicyError`` if there is none.
        """
        with contextlib.ExitStack() as stack:
            for name, module in self.modules.items():
                if self.lora is not None:
                    stack.enter_context(base_model(module))
                elif name in self._reference:
                    vars(self.engine.pipe)[name] = self._reference[name]
                    stack.callback(vars(self.engine.pipe).__setitem__, name, module)
                else:
                    raise PolicyError(
                        "policy: full weights have no reference unless one is kept; got "
                        "keep_reference False; set algorithm.kl_beta > 0 or train a LoRA"
                    )
            yield

    @property
    def has_reference(self) -> bool:
        """Whether `reference` can be entered."""
        return self.lora is not None or bool(self._reference)

    def tensors(self) -> dict[str, Tensor]:
        """A copy of what is trained, to save."""
        if self.lora is None:
            return {name: p.detach().clone() for name, p in self.parameters.items()}
        return {
            f"{denoiser}.{name}": tensor
            for denoiser, module in sorted(self.modules.items())
            for name, tensor in adapter_tensors(module).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave: every name, and no other. Raises if one does not fit."""
        known = {f"{denoiser}." for denoiser in self.modules}
        foreign = [name for name in tensors if not any(name.startswith(k) for k in known)]
        if foreign:
            raise PolicyError(
                f"policy: weights of another model; got {foreign[:3]} for denoisers "
                f"{sorted(self.modules)}; set the pipeline of the saved run"
            )
        for denoiser, module in self.modules.items():
            prefix = f"{denoiser}."
            part = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            if self.lora is not None:
                load_adapter_tensors(module, part)
            else:
                _load_full(module, part)

    def export(self, folder: Path) -> None:
        """Write a LoRA, a file a denoiser, for stock diffusers; full weights need none."""
        if self.lora is None:
            return
        for name, module in self.modules.items():
            export_lora(module, folder / weights_name(name), self.lora)

    def is_exported(self, folder: Path) -> bool:
        """Whether `export` has nothing left to write there."""
        names = [] if self.lora is None else self.modules
        return all((folder / weights_name(name)).exists() for name in names)


def _trained_modules(
    engine: RolloutEngine, denoisers: Sequence[str] | None
) -> dict[str, nn.Module]:
    found = {
        name: module
        for name in engine.adapter.denoisers
        if isinstance(module := getattr(engine.pipe, name, None), nn.Module)
    }
    missing = sorted(set(denoisers or ()) - found.keys())
    if missing or not found:
        raise PolicyError(
            f"model.denoisers: this pipeline holds no such denoiser; got "
            f"{missing or list(engine.adapter.denoisers)}; choose among {sorted(found)}"
        )
    return {name: m for name, m in found.items() if denoisers is None or name in denoisers}


def _compile(module: Any, backend: str) -> None:
    """Compile block by block: the calls of the denoiser itself stay visible to the recorder.

    With and without gradients, adapters and masks are variants of their own, and prompts differ in
    length: one graph a variant, with a limit that holds them all.
    """
    if not getattr(module, "_repeated_blocks", None):
        raise PolicyError(
            f"model.compile: the class names no repeated blocks; got {type(module).__name__}; set "
            "model.compile false"
        )
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, 64)
    module.compile_repeated_blocks(dynamic=True, backend=backend)


def _load_full(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    parameters: dict[str, Any] = dict(module.named_parameters())
    unfit = {n for n, p in parameters.items() if n not in tensors or tensors[n].shape != p.shape}
    unfit |= tensors.keys() - parameters.keys()
    if unfit:
        raise PolicyError(
            f"policy: saved weights do not fit; got other names or shapes in {sorted(unfit)[:5]}; "
            "set the pipeline of the saved run"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
