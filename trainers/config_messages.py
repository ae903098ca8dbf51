"""Words for the mistakes in a config: what is wrong with a key, and the nearest valid one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

Key = tuple[str, ...]


def meant(kind: str, value: Any, raw: str | None) -> Any:
    """What a value of another type must mean to its field, or None if that is not clear.

    ``raw`` is the text of an override.
    """
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind == "string_type" and raw is not None and (value is not None or raw == ""):
        return raw
    if kind == "bool_type" and raw in ("0", "1"):
        return raw == "1"
    return None


def describe(cls: type, at: Key, problem: Any) -> tuple[str, str, str]:
    """The key, what is wrong with it, and what was got."""
    dotted, kind = ".".join(at), problem["type"]
    if kind == "unexpected_keyword_argument":
        near = nearest(cls, at)
        return dotted, "no such key" + (f"; did you mean {near}?" if near else ""), ""
    if kind == "missing":
        return dotted, "required, and no source sets it", ""
    if kind == "union_tag_not_found":
        return f"{dotted}.type", f"required, to choose what {dotted} is", ""
    if kind == "union_tag_invalid":
        tag, tags = problem["ctx"]["tag"], problem["ctx"]["expected_tags"]
        return f"{dotted}.type", f"must be one of {tags}", f"; got {tag!r}"
    if kind in ("dataclass_type", "dict_type"):
        return dotted, "must be a mapping of keys", f"; got {short(problem['input'])}"
    text = problem["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return dotted, " ".join(text.split()), ""
    return dotted, text[0].lower() + text[1:], f"; got {short(problem['input'])}"


def short(value: Any) -> str:
    """A value as it fits in a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(cls: type, at: Key) -> str | None:
    """The valid key that looks most like ``at``, or has its last name elsewhere."""
    words = tuple(part for part in at if not part.isdecimal())
    valid = dict.fromkeys(_declared(cls))
    named = [".".join(key) for key in valid if key[-1] == words[-1] and key != words]
    near = difflib.get_close_matches(
        ".".join(words), [".".join(key) for key in valid if key != words], n=1
    )
    found = next(iter(near + named), None)
    if found is None:
        return None
    *parent, name = found.split(".")
    return ".".join((*at[:-1], name)) if tuple(parent) == words[:-1] else found


def _declared(kind: Any, prefix: Key = (), depth: int = 8) -> Iterator[Key]:
    """Every key that ``kind`` could accept, in any variant of its unions, without item numbers."""
    for argument in get_args(kind):
        yield from _declared(argument, prefix, depth)
    if dataclasses.is_dataclass(kind) and depth:
        for name, hint in get_type_hints(kind).items():
            yield (*prefix, name)
            yield from _declared(hint, (*prefix, name), depth - 1)
