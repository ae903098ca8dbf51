"""Prompts in tables: ``.parquet`` files, and data sets of the Hugging Face hub or in a folder.

Needs the library ``datasets``, which is imported when a table is opened. A folder and a file are read
as they lie there; a data set of the hub is downloaded once and then read from its cache, also offline.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from trainers.prompt_lines import PROMPT_KEYS, DataError

HF = "hf://"
"""What the name of a data set or folder begins with."""

_OPTIONS = ("subset", "split", "column", "revision")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows, and where they are."""

    rows: Iterator[Mapping[str, Any]]
    """Column -> value: what JSON can hold, and nothing else. Without the empty one of two columns
    that both may be the prompt."""
    column: str | None
    """That of the prompt; None: ``prompt`` or ``input``."""
    folder: Path | None
    """What paths in it are relative to; None where it is on the hub."""


def open_table(name: str) -> Table:
    """The table behind a ``.parquet`` file or ``hf://NAME?subset=..&split=..&column=..&revision=..``.

    ``NAME`` is a folder, or else a data set of the hub. ``subset`` is one of its configurations, and
    ``split`` is "train" by default. Raises ``DataError`` for what cannot be opened.
    """
    library = _require_datasets(name)
    if not name.startswith(HF):
        if not Path(name).is_file():
            raise DataError(f"{name}: cannot be read: no such file; set another path")
        rows = _opened(name, library, "parquet", data_files=name, split="train", streaming=True)
        return Table(rows=_checked(rows, name), column=None, folder=Path(name).parent)
    place, options = _parsed(name)
    folder = Path(place) if Path(place).is_dir() else None
    arguments: dict[str, Any] = {"split": options.get("split", "train")}
    if folder is not None:
        arguments["streaming"] = True  # no copy of it in a cache
        if "revision" in options:
            raise DataError(
                f"{name}: revision has no effect on a folder; got {options['revision']!r}"
            )
    elif "revision" in options:
        arguments["revision"] = options["revision"]
    rows = _opened(name, library, place, options.get("subset"), **arguments)
    return Table(rows=_checked(rows, name), column=options.get("column"), folder=folder)


def _parsed(name: str) -> tuple[str, dict[str, str]]:
    place, _, query = name.removeprefix(HF).partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown:
        near = difflib.get_close_matches(unknown[0], _OPTIONS, n=1)
        raise DataError(
            f"{name}: {unknown[0]} is no option of a data set"
            + (f"; did you mean {near[0]}?" if near else "")
            + f"; known are {', '.join(_OPTIONS)}"
        )
    if not place or len(options) < len(pairs) or not all(options.values()) or (query and not pairs):
        raise DataError(
            f"{name}: not the name of a data set; got {query!r} behind {place!r}; write "
            f"{HF}owner/name?subset=ocr&split=train, each option once and with a value"
        )
    return place, options


def _opened(name: str, library: Any, *args: Any, **kwargs: Any) -> Iterator[Mapping[str, Any]]:
    try:
        yield from library.load_dataset(*args, **kwargs)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # of many libraries, for all that may be wrong with names and files
        reason = str(error).strip().splitlines() or [""]
        raise DataError(
            f"{name}: cannot be read; got {type(error).__name__}: {reason[0][:300]}; set another "
            "path, subset or split"
        ) from error


def _checked(rows: Iterator[Mapping[str, Any]], name: str) -> Iterator[Mapping[str, Any]]:
    for number, row in enumerate(rows, 1):
        for column, value in row.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{name}: row {number}: column {column!r} holds what JSON cannot; got "
                    f"{type(value).__name__} ({error}); leave the column out"
                ) from None
        empty = [key for key in PROMPT_KEYS if key in row and row[key] is None]
        both = all(key in row for key in PROMPT_KEYS)
        yield {k: v for k, v in row.items() if not (both and k in empty)}


def _require_datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name}: needs datasets, which cannot be imported; got {error}; pip install "
            "'miles-rollout[datasets]'"
        ) from error
    return datasets
