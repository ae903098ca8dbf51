"""Prompts: read from where a config says they are, one record each.

A prompt is kept to the last space: tokenizers see the difference. Its id is its number among the
records of the file, never its text, so two equal prompts stay two.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainers.prompt_inputs import read_images
from trainers.prompt_lines import DataError, numbered_lines, object_of, prompt_and_metadata
from trainers.prompt_sampler import PromptSampler
from trainers.prompt_tables import HF, open_table

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
    """How many were skipped."""

    @property
    def told(self) -> str:
        """How many prompts and what was skipped, in a few words."""
        blank = self.blank_lines
        skipped = f" ({blank} blank line{'s' * (blank > 1)} skipped)" if blank else ""
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
    the file, are read for the pipeline as well. Of a line only its ending is stripped; blank lines
    are skipped with one warning. Raises ``DataError``, with the file and the line or row.
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
        records = _of_table(name)
    else:
        records = _of_lines(path, blank)
    if not records:
        raise DataError(f"{name}: holds no prompt; got only blank lines; write one a line")
    if blank:
        warnings.warn(
            f"{name}: skipped {len(blank)} blank lines, the first is line {blank[0]}", stacklevel=2
        )
    return PromptFile(source=name, records=records, blank_lines=len(blank))


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


def _of_table(name: str) -> list[PromptRecord]:
    table = open_table(name)
    return [
        PromptRecord(prompt=prompt, metadata=metadata, inputs=inputs, id=number - 1, line=number)
        for number, prompt, metadata, inputs in _rows(table.rows, table.column, table.folder, name)
    ]


def _rows(
    rows: Iterator[Mapping[str, Any]], column: str | None, folder: Path | None, name: str
) -> Iterator[tuple[int, str, dict[str, Any], dict[str, Any]]]:
    for number, row in enumerate(rows, 1):
        where = f"{name}: row {number}"
        prompt, metadata = prompt_and_metadata(row, where, column)
        named = metadata.get("inputs")
        if named is not None and folder is None:
            raise DataError(
                f"{where}: 'inputs' names pictures beside the file, and a data set of the hub has "
                f"none; got {named!r}; download it, and name its folder"
            )
        # A column has an entry in every row: what a row does not name is None there.
        given = (
            {k: v for k, v in named.items() if v is not None} if isinstance(named, dict) else named
        )
        yield (
            number,
            prompt,
            metadata,
            {} if folder is None else read_images(given or {}, folder, where),
        )
