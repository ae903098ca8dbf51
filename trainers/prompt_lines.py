"""Prompt files with a record a line: their lines, and what one line of JSON holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from miles_rollout.errors import MilesRolloutError

PROMPT_KEYS = ("prompt", "input")
"""What the text is called: a record has one of them."""


class DataError(MilesRolloutError, ValueError):
    """A prompt file, or what is asked of it, is wrong."""


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without their endings; not ``splitlines``, which also splits at U+2028."""
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DataError(f"{path}: cannot be read; got {error.strerror}; set another path") from None
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), 1):
        try:
            yield number, line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}:{number}: not UTF-8; got byte 0x{line[error.start]:02x} at column "
                f"{error.start + 1}; save the file as UTF-8"
            ) from None


def object_of(line: str, where: str) -> dict[str, Any]:
    """The JSON object of a line; a key given twice and NaN are refused."""
    try:
        row = json.loads(line, object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise DataError(
            f"{where}: not valid JSON; got {line[:80]}, nested too deeply; write one object a line"
        ) from None
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON; got {error}; write one object a line") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: must be an object; got {line[:80]}; write {{'prompt': ...}}")
    return row


def prompt_and_metadata(
    row: Mapping[str, Any], where: str, column: str | None = None
) -> tuple[str, dict[str, Any]]:
    """The text of a record and all that it says besides.

    The text is under ``column``, or else under ``prompt`` or ``input``, whichever there is. What an
    object under ``metadata`` holds is metadata like the other keys.
    """
    rest = dict(row)
    key = _prompt_key(rest, where) if column is None else column
    if key not in rest:
        raise DataError(f"{where}: has no {key!r}; got keys {sorted(rest)}; name another column")
    prompt, nested = rest.pop(key), rest.pop("metadata", None)
    nested = {} if nested is None and row.get("metadata") is None else nested
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(
            f"{where}: {key!r} must be text that is not blank; got {prompt!r}; write a prompt, or "
            "remove the record"
        )
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise DataError(
            f"{where}: {key!r} holds half of a surrogate pair; got {prompt!r}; write the letter itself"
        )
    if not isinstance(nested, dict) or rest.keys() & nested.keys():
        raise DataError(
            f"{where}: 'metadata' must be an object with other keys than the line; got {nested!r}; "
            "rename what is given twice, or drop it"
        )
    return prompt, {**rest, **nested}


def _prompt_key(row: Mapping[str, Any], where: str) -> str:
    found = [key for key in PROMPT_KEYS if key in row]
    if len(found) > 1:
        got = ", ".join(f"{key!r} {str(row[key])[:60]!r}" for key in found)
        raise DataError(
            f"{where}: has both 'prompt' and 'input', and one of them is the text; got {got}; keep one"
        )
    if not found:
        raise DataError(f"{where}: has no 'prompt'; got keys {sorted(row)}; add it")
    return found[0]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = [key for key in keys if keys.count(key) > 1]
    if repeated:
        raise ValueError(f"key {repeated[0]!r} twice")
    return dict(pairs)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is not JSON")
