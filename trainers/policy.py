"""The weights that are trained, a LoRA or all of the denoiser, and those that stand beside them.

Beside them may stand, frozen: the base, the LoRA that the run started from ("start"), and the policy
that samples where that is another one ("old"). With a LoRA the first is free and the others are
adapters; full weights are copied.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from miles_rollout import RolloutEngine
from miles_rollout.errors import MilesRolloutError
from miles_rollout.noise import derive_seed
from trainers.adapters import adapter_parameters
from trainers.lora import (
    LoraConfig,
    attach_lora,
    base_model,
    export_lora,
    load_adapter_tensors,
    load_exported,
    use_adapter,
    weights_name,
)

Beside: TypeAlias = Literal["base", "start", "old"]
"""Weights that are not trained."""


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
        beside: Collection[Beside] = (),
        denoisers: Sequence[str] | None = None,
    ) -> None:
        self.engine = engine
        self.lora = lora
        pipe = engine.pipe
        self.modules = _trained_modules(engine, denoisers)
        for component in pipe.components.values():
            if isinstance(component, nn.Module):
                component.requires_grad_(False).eval()
        self.beside: tuple[Beside, ...] = tuple(b for b in ("start", "old") if b in beside)
        self._copies: dict[Beside, dict[str, nn.Module]] = {}
        if lora is None:
            kept: list[Beside] = [b for b in ("base", "old") if b in beside]
            self._copies = {
                b: {name: copy.deepcopy(module) for name, module in self.modules.items()}
                for b in kept
            }
        for name, module in self.modules.items():
            if lora is not None:
                # The trained one last: it is the active one then.
                for adapter in (*self.beside, "default"):
                    self._attach(module, lora, name, derive_seed("lora", seed, name), adapter)
            else:
                module.requires_grad_(True)
            if gradient_checkpointing:
                checkpointed: Any = module
                checkpointed.enable_gradient_checkpointing()
            if compile_backend is not None:
                for held in (module, *(copies[name] for copies in self._copies.values())):
                    _compile(held, compile_backend)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All trained parameters as ``<denoiser>.<name>``, sorted."""
        return {
            f"{denoiser}.{name}": parameter
            for denoiser, module in sorted(self.modules.items())
            for name, parameter in sorted(module.named_parameters())
            if parameter.requires_grad
        }

    def _attach(
        self, module: nn.Module, lora: LoraConfig, denoiser: str, seed: int, adapter: str
    ) -> None:
        attach_lora(module, lora, seed=seed, adapter_name=adapter)
        if lora.start is not None:
            path = Path(lora.start) / weights_name(denoiser)
            load_exported(module, path, lora, adapter_name=adapter)

    def without_gradient(self) -> list[str]:
        """The trained denoisers that the last backward did not reach."""
        return [
            name
            for name, module in self.modules.items()
            if all(p.grad is None for p in module.parameters() if p.requires_grad)
        ]

    @contextlib.contextmanager
    def reference(self, which: Literal["base", "start"] = "base") -> Iterator[None]:
        """Inside, the engine runs the base model, or the LoRA that the run started from.

        With full weights both are the copy that ``beside`` asked for. Raises ``PolicyError`` if there
        is none.
        """
        with self._instead("base" if self.lora is None else which):
            yield

    @contextlib.contextmanager
    def old(self) -> Iterator[None]:
        """Inside, the engine runs the old policy. Raises ``PolicyError`` if none is kept."""
        with self._instead("old"):
            yield

    @contextlib.contextmanager
    def _instead(self, which: Beside) -> Iterator[None]:
        missing = which not in (self._copies if self.lora is None else (*self.beside, "base"))
        if missing:
            raise PolicyError(
                f"policy: no weights {which!r} are kept beside the trained ones; got "
                f"{sorted(self._copies) if self.lora is None else ['base', *self.beside]}; choose an "
                "algorithm that needs them, such as one with kl_beta > 0"
            )
        with contextlib.ExitStack() as stack:
            for name, module in self.modules.items():
                if self.lora is None:
                    vars(self.engine.pipe)[name] = self._copies[which][name]
                    stack.callback(vars(self.engine.pipe).__setitem__, name, module)
                elif which == "base":
                    stack.enter_context(base_model(module))
                else:
                    stack.enter_context(use_adapter(module, which))
            yield

    @property
    def has_reference(self) -> bool:
        """Whether `reference` can be entered."""
        return self.lora is not None or "base" in self._copies

    @torch.no_grad()
    def update_old(self, decay: float) -> None:
        """``old <- decay old + (1 - decay) trained``, every weight in float32."""
        trained = self._held("default")
        for name, old in self._held("old").items():
            if decay == 0:
                old.copy_(trained[name])
            else:
                old.lerp_(trained[name], 1 - decay)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Copies of what is trained and of what stands beside it and changes, to save."""
        return {name: self.tensors(which) for name, which in self._groups().items()}

    def _groups(self) -> dict[str, str]:
        """The name of a group of a checkpoint -> the weights in it."""
        full = tuple(b for b in self._copies if b == "old")
        kept = full if self.lora is None else self.beside
        return {"policy": "default", **{name: name for name in kept}}

    def restore(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put back what `state` gave. Raises ``PolicyError`` where a group is missing."""
        for name, which in self._groups().items():
            if name not in groups:
                raise PolicyError(
                    f"policy: the checkpoint has no weights {name!r}; got {sorted(groups)}; set the "
                    "algorithm of the saved run"
                )
            self.load(groups[name], which)

    def tensors(self, which: str = "default") -> dict[str, Tensor]:
        """A copy of what is trained, or of the weights ``which`` beside it."""
        return {name: p.detach().clone() for name, p in self._held(which).items()}

    def _held(self, which: str) -> dict[str, nn.Parameter]:
        """The parameters themselves, by the names that `tensors` gives."""
        if self.lora is None:
            return self._full(which)
        return {
            f"{denoiser}.{name}": parameter
            for denoiser, module in sorted(self.modules.items())
            for name, parameter in adapter_parameters(module, which).items()
        }

    def load(self, tensors: Mapping[str, Tensor], which: str = "default") -> None:
        """Put back what `tensors` gave: every name, and no other. Raises if one does not fit."""
        known = {f"{denoiser}." for denoiser in self.modules}
        foreign = [name for name in tensors if not any(name.startswith(k) for k in known)]
        if foreign:
            raise PolicyError(
                f"policy: weights of another model; got {foreign[:3]} for denoisers "
                f"{sorted(self.modules)}; set the pipeline of the saved run"
            )
        if self.lora is None:
            _load_full(self._full(which), tensors)
            return
        for denoiser, module in self.modules.items():
            prefix = f"{denoiser}."
            part = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            load_adapter_tensors(module, part, which)

    def _full(self, which: str) -> dict[str, nn.Parameter]:
        """All parameters of the denoisers, or of their copies, as ``<denoiser>.<name>``, sorted."""
        modules = self.modules if which == "default" else self._copies[which]  # type: ignore[index]
        return {
            f"{denoiser}.{name}": parameter
            for denoiser, module in sorted(modules.items())
            for name, parameter in sorted(module.named_parameters())
        }

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


def _load_full(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
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
