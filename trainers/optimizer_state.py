"""An optimizer's state as named tensors and JSON, keyed by the names of the parameters.

torch's own state dict counts parameters by position, so another order or another set of adapters
would load without a word. Here every name must fit, and every value comes back bitwise in its
dtype. Works for any optimizer whose state is tensors and JSON values (AdamW, SGD, ...).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from miles_rollout.errors import MilesRolloutError


class CheckpointError(MilesRolloutError, RuntimeError):
    """What was saved cannot be used, or what is to be saved could not be used later."""


def pack_optimizer(
    optimizer: Optimizer, names: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors ``<name>:<key>`` and the rest; ``names`` are in the order of the param groups."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in _named(optimizer, names).items():
        state = optimizer.state.get(parameter, {})
        held = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        tensors |= {f"{name}:{key}": value.detach() for key, value in held.items()}
        values[name] = {key: value for key, value in state.items() if key not in held}
    rest = {
        "type": type(optimizer).__name__,
        "groups": [
            {"names": group_names, "settings": _settings(group)}
            for group_names, group in _grouped(optimizer, names)
        ],
        "values": values,
        "tensors": sorted(tensors),
    }
    return tensors, rest


def unpack_optimizer(
    optimizer: Optimizer,
    names: Sequence[str],
    tensors: Mapping[str, Tensor],
    rest: Mapping[str, Any],
) -> None:
    """Put back what ``pack_optimizer`` gave, the settings of the groups (lr, betas) included."""
    parameters = _named(optimizer, names)
    _check_fits(optimizer, names, tensors, rest)
    held: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, value in tensors.items():
        name, _, part = key.rpartition(":")
        if value.ndim and value.shape != parameters[name].shape:
            raise CheckpointError(
                f"unpack_optimizer: {part} of {name} has another shape; got {tuple(value.shape)} "
                f"for {tuple(parameters[name].shape)}; set the model and LoRA rank of the saved run"
            )
        held[name][part] = value
    settings = {frozenset(group["names"]): group["settings"] for group in rest["groups"]}
    for group_names, group in _grouped(optimizer, names):
        group.update(_restored(group, settings[frozenset(group_names)]))
        # torch keeps the step counter on the CPU except for these two kernels.
        step_moves = bool(group.get("capturable") or group.get("fused"))
        for name in group_names:
            device = parameters[name].device
            optimizer.state[parameters[name]] = dict(rest["values"][name]) | {
                part: value.detach().to(device if value.ndim or step_moves else "cpu", copy=True)
                for part, value in held[name].items()
            }


def _named(optimizer: Optimizer, names: Sequence[str]) -> dict[str, nn.Parameter]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len(set(names)) != len(parameters) or len(names) != len(parameters):
        raise CheckpointError(
            f"optimizer: needs one name a parameter, each once; got {len(set(names))} different "
            f"names for {len(parameters)} parameters; set the names in the order of its groups"
        )
    return dict(zip(names, parameters, strict=True))


def _grouped(optimizer: Optimizer, names: Sequence[str]) -> list[tuple[list[str], dict[str, Any]]]:
    left = iter(names)
    return [([next(left) for _ in group["params"]], group) for group in optimizer.param_groups]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples: betas become a list. A tensor lr becomes a number."""
    plain = {key: value for key, value in group.items() if key != "params"}
    for key, value in plain.items():
        if isinstance(value, tuple):
            plain[key] = list(value)
        elif isinstance(value, Tensor):
            plain[key] = value.item()
    return plain


def _restored(group: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    restored = dict(settings)
    for key, value in settings.items():
        if isinstance(group.get(key), tuple):
            restored[key] = tuple(value)
        elif isinstance(group.get(key), Tensor):
            restored[key] = group[key].new_tensor(value)
    return restored


def _check_fits(
    optimizer: Optimizer,
    names: Sequence[str],
    tensors: Mapping[str, Tensor],
    rest: Mapping[str, Any],
) -> None:
    if rest["type"] != type(optimizer).__name__:
        raise CheckpointError(
            f"unpack_optimizer: saved from another optimizer; got {rest['type']} for "
            f"{type(optimizer).__name__}; set the optimizer of the saved run"
        )
    saved = set(rest["values"])
    _same("parameters", set(names), saved, "set the LoRA targets and model of the saved run")
    _same("tensors", set(rest["tensors"]), set(tensors), "pass the tensors of this checkpoint")
    here = {frozenset(group_names) for group_names, _ in _grouped(optimizer, names)}
    if here != {frozenset(group["names"]) for group in rest["groups"]}:
        raise CheckpointError(
            f"unpack_optimizer: parameters are grouped otherwise; got {len(rest['groups'])} groups "
            f"saved, {len(here)} here; set the parameter groups of the saved run"
        )


def _same(what: str, expected: set[str], found: set[str], advice: str) -> None:
    if expected != found:
        raise CheckpointError(
            f"unpack_optimizer: names of {what} do not fit; got missing "
            f"{sorted(expected - found)}, unexpected {sorted(found - expected)}; {advice}"
        )
