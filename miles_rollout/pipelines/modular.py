"""What adapters of modular pipelines share."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

_INPUTS: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Blocks -> the names and defaults of their inputs, which take milliseconds to collect."""


def default_inputs(blocks: Any, given: Collection[str]) -> dict[str, Any]:
    """The inputs that the blocks take, with their defaults.

    Collected again only where ``given`` has a name that was not known: blocks can be changed.
    """
    known = _INPUTS.get(blocks)
    if known is None or not set(given) <= set(known):
        known = _INPUTS[blocks] = {i.name or i.kwargs_type: i.default for i in blocks.inputs}
    return known
