"""Prompts: read from where a config says they are, one record each.

A prompt is kept to the last space: tokenizers see the difference. Its id is its number among the
records of the file, never its text, so two equal prompts stay two.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainers.prompt_inputs import read_images
from trainers.prompt_lines import DataError, numbered_lines, object_of, prompt_and_metadata
from trainers.prompt_sampler import PromptSampler
from trainers.prompt_tables import HF, Table, open_table, why_not_json, without_none

__all__ = [
    "DataError",
    "PromptFile",
    "PromptRecord",
    "PromptSampler",
    "load_prompts",
    "read_prompts",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRecord:
    """One prompt of a file."""

    prompt: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the file says besides the prompt: for rewards."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """What the pipeline gets besides the prompt, such as ``image``: pictures, or lists of them."""
    id: int
    """Its number among the records, from 0."""
    line: int
    """Its line in the file, or its row in a table, from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFile:
    """All records of one source."""

    source: str
    """As the config names it."""
    records: list[PromptRecord]
    blank_lines: int = 0
    """How many were skipped; of a table, blank rows."""

    @property
    def told(self) -> str:
        """How many prompts and what was skipped, in a few words."""
        blank = self.blank_lines
        skipped = (
            f" ({blank} blank {_word(self.source)}{'s' * (blank > 1)} skipped)" if blank else ""
        )
        return f"{len(self.records)} prompts{skipped}"


def load_prompts(source: str | Path) -> list[PromptRecord]:
    """The records of `read_prompts`."""
    return read_prompts(source).records


def read_prompts(source: str | Path) -> PromptFile:
    """Read a file with a prompt a line (``.txt``), an object a line (``.jsonl``), or a table.

    A table is a ``.parquet`` file, or ``hf://NAME?subset=..&split=..&column=..``: a data set of the
    Hugging Face hub or a local folder, read with the library ``datasets``. An object or a row has
    ``prompt`` or ``input`` (a table: or ``column``); all other keys are its metadata, and so is what
    an object under ``metadata`` holds. Pictures whose paths an object ``inputs`` holds, relative to
    the file, are read for the pipeline as well. Of a line only its ending is stripped; blank lines,
    and rows whose prompt is blank, are skipped with one warning. What a row has None for is no metadata of it,
    and columns that JSON cannot hold are left out with one warning. Raises ``DataError``, with the file and the line or row.
    """
    name = str(source)
    path = Path(source)
    if not name.startswith(HF) and path.suffix not in (".txt", ".jsonl", ".parquet"):
        raise DataError(
            f"{name}: unknown kind of file; got {path.suffix!r}; name it .txt (a prompt a line), "
            f".jsonl (an object a line) or .parquet, or write {HF}NAME for a data set or a folder"
        )
    blank: list[int] = []
    if name.startswith(HF) or path.suffix == ".parquet":
        records = _of_table(name, blank)
    else:
        records = _of_lines(path, blank)
    if not records:
        word = _word(name)
        got = f"only blank {word}s" if blank or word == "line" else f"a table without {word}s"
        raise DataError(f"{name}: holds no prompt; got {got}; write one a {word}")
    if blank:
        word = _word(name)
        warnings.warn(
            f"{name}: skipped {len(blank)} blank {word}s, the first is {word} {blank[0]}",
            stacklevel=2,
        )
    return PromptFile(source=name, records=records, blank_lines=len(blank))


def _word(source: str) -> str:
    return "row" if source.startswith(HF) or source.endswith(".parquet") else "line"


def _of_lines(path: Path, blank: list[int]) -> list[PromptRecord]:
    """The records of a file with lines; the numbers of blank ones are appended to ``blank``."""
    records: list[PromptRecord] = []
    for number, line in numbered_lines(path):
        if not line.strip():
            blank.append(number)
            continue
        prompt, metadata, inputs = line, dict[str, Any](), dict[str, Any]()
        if path.suffix == ".jsonl":
            where = f"{path}:{number}"
            prompt, metadata = prompt_and_metadata(object_of(line, where), where)
            inputs = read_images(metadata.get("inputs", {}), path.parent, where)
        records.append(
            PromptRecord(
                prompt=prompt, metadata=metadata, inputs=inputs, id=len(records), line=number
            )
        )
    return records


def _of_table(name: str, blank: list[int]) -> list[PromptRecord]:
    """The records of a table; the numbers of blank rows are appended to ``blank``."""
    table = open_table(name)
    records: list[PromptRecord] = []
    left_out: dict[str, str] = {}
    for number, row in enumerate(table.rows, 1):
        if table.is_blank(row):
            blank.append(number)
            continue
        where = f"{name}: row {number}"
        prompt, metadata = prompt_and_metadata(without_none(row), where, table.column)
        inputs = _inputs_of_row(metadata.get("inputs"), table, where)
        for key in metadata.keys() - left_out.keys():
            reason = why_not_json(metadata[key])
            left_out |= {} if reason is None else {key: reason}
        for key in metadata.keys() & left_out.keys():
            metadata[key] = None  # not kept in memory; the key goes below, from all rows
        records.append(
            PromptRecord(
                prompt=prompt, metadata=metadata, inputs=inputs, id=len(records), line=number
            )
        )
    left_out |= dict.fromkeys(table.unread, "pictures or sound")
    if left_out:
        told = ", ".join(f"{key!r} ({left_out[key]})" for key in sorted(left_out))
        warnings.warn(
            f"{name}: left out columns that JSON cannot hold, so rewards do not see them: {told}",
            stacklevel=3,
        )
    return [replace(r, metadata=_without(r.metadata, left_out)) for r in records]


def _without(metadata: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key not in keys}


def _inputs_of_row(named: Any, table: Table, where: str) -> dict[str, Any]:
    if named is None:
        return {}
    if table.folder is None:
        raise DataError(
            f"{where}: 'inputs' names pictures beside the file, and a data set of the hub has "
            f"none; got {named!r}; download it, and name its folder"
        )
    return read_images(named, table.folder, where)
