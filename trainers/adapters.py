"""What a module's adapters hold, and switching them off and on.

Switching leaves every flag as it was. Names of adapter tensors are peft's own without the adapter's
name (``transformer_blocks.0.attn.to_q.lora_A.weight``), so one adapter's tensors load into
another's. It knows nothing of optimizers, files, or which adapter is the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from miles_rollout.errors import MilesRolloutError


class LoraError(MilesRolloutError, ValueError):
    """An adapter does not fit the module, the file or the configuration that it is used with."""


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter that requires a gradient, by name, in the order of the names."""
    return {n: p for n, p in sorted(module.named_parameters()) if p.requires_grad}


@contextmanager
def base_model(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` is the base model: its adapters are off, its output bitwise the base's."""
    with _switched(module, lambda layer: layer.enable_adapters(False)):
        yield


@contextmanager
def use_adapter(module: nn.Module, adapter_name: str) -> Iterator[None]:
    """Inside, ``adapter_name`` is the one active adapter, e.g. the policy that made the samples."""
    adapter_config(module, adapter_name)

    def switch(layer: BaseTunerLayer) -> None:
        layer.set_adapter([adapter_name])
        layer.enable_adapters(True)

    with _switched(module, switch):
        yield


def adapter_tensors(module: nn.Module, adapter_name: str = "default") -> dict[str, Tensor]:
    """Copies of the adapter's tensors, by name without the adapter's name, sorted."""
    parameters = adapter_parameters(module, adapter_name)
    return {name: p.detach().clone() for name, p in parameters.items()}


def load_adapter_tensors(
    module: nn.Module, tensors: Mapping[str, Tensor], adapter_name: str = "default"
) -> int:
    """Copy ``tensors`` into the adapter, all of them and nothing else; return how many."""
    parameters = adapter_parameters(module, adapter_name)
    missing = sorted(parameters.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - parameters.keys())
    if missing or unexpected:
        raise LoraError(
            f"load_adapter_tensors: names do not fit adapter {adapter_name!r} of "
            f"{type(module).__name__}; got {len(tensors)} tensors, missing {_some(missing)}, "
            f"unexpected {_some(unexpected)}; {_prefix_hint(missing, unexpected)}"
        )
    wrong = [n for n, p in parameters.items() if tensors[n].shape != p.shape]
    if wrong:
        name = wrong[0]
        raise LoraError(
            f"load_adapter_tensors: shapes do not fit adapter {adapter_name!r} in {_some(wrong)}; "
            f"got {tuple(tensors[name].shape)} for {tuple(parameters[name].shape)} in {name}; "
            f"set lora.rank to the rank of these tensors"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return len(parameters)


def adapter_parameters(module: nn.Module, adapter_name: str) -> dict[str, nn.Parameter]:
    """The adapter's parameters by name without the adapter's name, trained or not, sorted."""
    adapter_config(module, adapter_name)
    found = {}
    for name, parameter in sorted(module.named_parameters()):
        head, lora, tail = name.rpartition(".lora_")
        kind, _, rest = tail.partition(".")
        if lora and rest.startswith(f"{adapter_name}."):
            found[f"{head}.lora_{kind}.{rest.removeprefix(f'{adapter_name}.')}"] = parameter
    return found


def adapter_config(module: nn.Module, adapter_name: str) -> peft.LoraConfig:
    """What the adapter was attached with, as peft keeps it."""
    configs: dict[str, peft.LoraConfig] = getattr(module, "peft_config", {})
    if adapter_name not in configs:
        raise LoraError(
            f"adapter {adapter_name!r}: {type(module).__name__} has no such adapter; got "
            f"{sorted(configs)}; call attach_lora with this adapter_name first"
        )
    return configs[adapter_name]


@contextmanager
def _switched(module: nn.Module, switch: Callable[[BaseTunerLayer], None]) -> Iterator[None]:
    """Apply ``switch`` to every adapter layer; put everything back at the end.

    peft couples switching with ``requires_grad``: it freezes adapters that it switches off and
    unfreezes what it switches on, also what was frozen. The flags are put back at once and not
    only at the end: FSDP2 fixes its reduction dtype by what is trainable in the first forward.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    if not layers:
        raise LoraError(
            f"base_model: the module has no adapter to switch off, its weights are all there is; "
            f"got {type(module).__name__}; call attach_lora first, or keep a copy as the reference"
        )
    states = [(layer, list(layer.active_adapters), layer.disable_adapters) for layer in layers]
    flags = {name: p.requires_grad for name, p in module.named_parameters()}
    try:
        for layer in layers:
            switch(layer)
        _set_flags(module, flags)
        yield
    finally:
        for layer, active, disabled in states:
            layer.set_adapter(active)
            layer.enable_adapters(not disabled)
        _set_flags(module, flags)


def _set_flags(module: nn.Module, flags: Mapping[str, bool]) -> None:
    """By name: FSDP2 replaces the parameter objects."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(flags[name])


def _prefix_hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    for name in unexpected:
        for wanted in missing:
            if name.endswith(f".{wanted}"):
                return f"remove the prefix {name.removesuffix(wanted)!r} from the names"
    return "set lora.targets to the modules of these tensors"


def _some(names: Sequence[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} ({', '.join(names[:limit])}{more})" if names else "none"
