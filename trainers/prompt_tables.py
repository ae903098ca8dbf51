"""Prompts in tables: ``.parquet`` files, and data sets of the Hugging Face hub or in a folder.

Needs the library ``datasets``, which is imported when a table is opened. A folder and a file are read
as they lie there; a data set of the hub is downloaded once and then read from its cache, also offline.
"""

from __future__ import annotations

import difflib
import glob
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from trainers.prompt_lines import PROMPT_KEYS, DataError

HF = "hf://"
"""What the name of a data set or folder begins with."""

_MEDIA = ("Image", "Audio", "Video")
"""Kinds of columns whose values are decoded when a row is read."""
_BATCH_ROWS = 1000
"""Of a file, read at once; by default as many as its first group has, which may be none."""
_OPTIONS = ("subset", "split", "column", "revision")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows, and where they are."""

    rows: Iterator[Mapping[str, Any]]
    """Column -> value, as the library gives them: None where a row has none."""
    column: str | None
    """That of the prompt; None: ``prompt`` or ``input``."""
    folder: Path | None
    """What paths in it are relative to; None where it is on the hub."""
    unread: list[str]
    """Columns with pictures or sound; filled when the first row is read."""

    def is_blank(self, row: Mapping[str, Any]) -> bool:
        """It has a column for the prompt, and nothing in it."""
        texts = [
            row[k] for k in (PROMPT_KEYS if self.column is None else [self.column]) if k in row
        ]
        blank = [t is None or (isinstance(t, str) and not t.strip()) for t in texts]
        return bool(texts) and all(blank)


def without_none(value: Any) -> Any:
    """Without the keys that hold None, at any depth: a column has a value in every row, and None is
    what a row lacks, which a line of JSON would not name."""
    if isinstance(value, Mapping):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return [without_none(v) for v in value] if isinstance(value, list) else value


def why_not_json(value: Any) -> str | None:
    """What of it JSON cannot hold; None: it can."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def open_table(name: str) -> Table:
    """The table behind a ``.parquet`` file or ``hf://NAME?subset=..&split=..&column=..&revision=..``.

    ``NAME`` is a folder, or else a data set of the hub. ``subset`` is one of its configurations, and
    ``split`` is "train" by default. Raises ``DataError`` for what cannot be opened.
    """
    library = _require_datasets(name)
    unread: list[str] = []
    if not name.startswith(HF):
        if not Path(name).is_file():
            raise DataError(f"{name}: cannot be read: no such file; set another path")
        rows = _opened(
            name,
            unread,
            library,
            "parquet",
            data_files=glob.escape(name),
            split="train",
            streaming=True,
            batch_size=_BATCH_ROWS,
        )
        return Table(rows=rows, column=None, folder=Path(name).parent, unread=unread)
    place, options = _parsed(name)
    folder = Path(place) if Path(place).is_dir() else None
    arguments: dict[str, Any] = {"split": options.get("split", "train")}
    if folder is not None:
        arguments["streaming"] = True  # no copy of it in a cache
        if "revision" in options:
            raise DataError(
                f"{name}: revision has no effect on a folder; got {options['revision']!r}; leave it "
                "out"
            )
    elif "revision" in options:
        arguments["revision"] = options["revision"]
    rows = _opened(name, unread, library, place, options.get("subset"), **arguments)
    return Table(rows=rows, column=options.get("column"), folder=folder, unread=unread)


def _parsed(name: str) -> tuple[str, dict[str, str]]:
    place, _, query = name.removeprefix(HF).partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown:
        near = difflib.get_close_matches(unknown[0], _OPTIONS, n=1)
        raise DataError(
            f"{name}: no such option of a data set; got {unknown[0]!r}"
            + (f"; did you mean {near[0]}?" if near else "")
            + f"; known are {', '.join(_OPTIONS)}"
        )
    if not place or len(options) < len(pairs) or not all(options.values()) or (query and not pairs):
        raise DataError(
            f"{name}: not the name of a data set; got {query!r} behind {place!r}; write "
            f"{HF}owner/name?subset=ocr&split=train, each option once and with a value"
        )
    return place, options


def _opened(
    name: str, unread: list[str], library: Any, *args: Any, **kwargs: Any
) -> Iterator[Mapping[str, Any]]:
    try:
        table = library.load_dataset(*args, **kwargs)
        features = getattr(table, "features", None) or {}
        unread += [column for column, kind in features.items() if type(kind).__name__ in _MEDIA]
        yield from (table.remove_columns(unread) if unread else table)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # of many libraries, for all that may be wrong with names and files
        reason = str(error).strip().splitlines() or [""]
        raise DataError(
            f"{name}: cannot be read; got {type(error).__name__}: {reason[0][:300]}; set another "
            "path, subset or split"
        ) from error


def _require_datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name}: needs datasets, which cannot be imported; got {error}; pip install "
            "'miles-rollout[datasets]'"
        ) from error
    return datasets
