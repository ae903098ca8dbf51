"""Names and defaults of a pipeline's arguments, also where a subclass hands them on by ``*args``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

_EMPTY = inspect.Parameter.empty


@functools.cache
def _signatures(cls: Any) -> tuple[inspect.Signature, ...]:
    """Of the class and its bases, the most derived first."""
    return tuple(inspect.signature(c.__call__) for c in cls.__mro__ if "__call__" in vars(c))


def call_defaults(cls: Any) -> Mapping[str, Any]:
    """Argument name -> its default in ``cls(...)(...)``."""
    return _defaults(cls)


@functools.cache
def _defaults(cls: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for signature in _signatures(cls):
        for name, parameter in signature.parameters.items():
            if parameter.default is not _EMPTY:
                found.setdefault(name, parameter.default)
    return found


def named_arguments(cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an object of ``cls`` by name, defaults included."""
    signatures = _signatures(cls)
    takes_any = [_takes_any(signature) for signature in signatures]
    named = signatures[takes_any.index(False) if False in takes_any else 0]
    arguments = dict(named.bind(None, *args, **kwargs).arguments)
    arguments.update(arguments.pop("kwargs", {}))
    arguments.pop("self", None)
    return {**call_defaults(cls), **arguments}


def _takes_any(signature: inspect.Signature) -> bool:
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return inspect.Parameter.VAR_POSITIONAL in kinds
