"""Prompts: read from a file, and drawn for an iteration.

A prompt is kept to the last space: tokenizers see the difference. Its id is its number among the
records of the file, never its text, so two equal prompts stay two.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from miles_rollout.errors import MilesRolloutError
from miles_rollout.noise import derive_seed
from trainers.prompt_inputs import read_images


class DataError(MilesRolloutError, ValueError):
    """A prompt file, or what is asked of it, is wrong."""


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
    """Its line in the file, from 1."""


def load_prompts(path: str | Path) -> list[PromptRecord]:
    """The records of a ``.txt`` file (a prompt a line) or a ``.jsonl`` file (an object a line).

    The object has ``prompt``; all other keys are its metadata, and so is what an object under
    ``metadata`` holds. Pictures whose paths an object ``inputs`` holds, relative to the file, are read
    for the pipeline as well. Only the line ending is stripped. Blank lines are skipped with one
    warning.
    """
    path = Path(path)
    if path.suffix not in (".txt", ".jsonl"):
        raise DataError(
            f"{path}: unknown kind of file; got {path.suffix!r}; name it .txt (a prompt a line) or "
            ".jsonl (an object a line)"
        )
    records: list[PromptRecord] = []
    blank = []
    for number, line in _lines(path):
        if not line.strip():
            blank.append(number)
            continue
        prompt, metadata = line, dict[str, Any]()
        if path.suffix == ".jsonl":
            prompt, metadata = _parse(line, f"{path}:{number}")
        named = metadata.get("inputs", {}) if path.suffix == ".jsonl" else {}
        inputs = read_images(named, path.parent, f"{path}:{number}")
        records.append(
            PromptRecord(
                prompt=prompt, metadata=metadata, inputs=inputs, id=len(records), line=number
            )
        )
    if not records:
        raise DataError(f"{path}: holds no prompt; got only blank lines; write one a line")
    if blank:
        warnings.warn(
            f"{path}: skipped {len(blank)} blank lines, the first is line {blank[0]}", stacklevel=2
        )
    return records


class PromptSampler:
    """Which records an iteration uses: a pure function of (seed, iteration).

    The records are shuffled anew for every epoch and dealt out without gaps, so after any number of
    iterations no record was used twice more than another. An iteration may take the end of one
    epoch and the start of the next; the next is then reordered so that no record comes twice in it.
    Epochs and iterations fall together again after some epochs, and from there only that many are
    followed: a resume needs no state.
    """

    def __init__(self, num_records: int, prompts_per_iteration: int, seed: int) -> None:
        if prompts_per_iteration < 1:
            raise DataError(
                f"prompts_per_iteration: must be positive; got {prompts_per_iteration}; set >= 1"
            )
        if prompts_per_iteration > num_records:
            raise DataError(
                f"prompts_per_iteration: more than there are prompts; got {prompts_per_iteration} "
                f"for {num_records} prompts; set at most {num_records} or add prompts"
            )
        self.num_records = num_records
        self.prompts_per_iteration = prompts_per_iteration
        self.seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def indices(self, iteration: int) -> tuple[int, ...]:
        """The ids of the records of ``iteration``, all different."""
        if iteration < 0:
            raise DataError(f"iteration: must not be negative; got {iteration}; count from 0")
        size, count = self.prompts_per_iteration, self.num_records
        epoch, start = divmod(iteration * size, count)
        chosen = self._order_of(epoch)[start : start + size]
        if len(chosen) < size:
            chosen = chosen + self._order_of(epoch + 1)[: size - len(chosen)]
        return tuple(chosen)

    def _order_of(self, epoch: int) -> list[int]:
        """The records in the order of ``epoch``, which depends on the one before it."""
        first = epoch
        while first * self.num_records % self.prompts_per_iteration:
            first -= 1
        if first <= self._epoch <= epoch:
            first, order = self._epoch, self._order  # a memory only: it changes no result
        else:
            order = self._shuffled(first)
        for later in range(first + 1, epoch + 1):
            order = self._continued(order, later)
        self._epoch, self._order = epoch, order
        return order

    def _continued(self, previous: list[int], epoch: int) -> list[int]:
        """``epoch`` after ``previous``, the iteration that spans both without a repetition."""
        shuffled = self._shuffled(epoch)
        used = epoch * self.num_records % self.prompts_per_iteration
        if not used:
            return shuffled
        tail = set(previous[-used:])
        head = [i for i in shuffled if i not in tail][: self.prompts_per_iteration - used]
        taken = set(head)
        return head + [i for i in shuffled if i not in taken]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self.num_records))
        random.Random(derive_seed("prompts", self.seed, epoch)).shuffle(order)
        return order


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without their endings; not ``splitlines``, which also splits at U+2028."""
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; set another path") from None
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), 1):
        try:
            yield number, line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}:{number}: not UTF-8; got byte 0x{line[error.start]:02x} at column "
                f"{error.start + 1}; save the file as UTF-8"
            ) from None


def _parse(line: str, where: str) -> tuple[str, dict[str, Any]]:
    try:
        row = json.loads(line, object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise DataError(f"{where}: not valid JSON; nested too deeply") from None
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON; got {error}; write one object a line") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: must be an object; got {line[:80]}; write {{'prompt': ...}}")
    if "prompt" not in row:
        raise DataError(f"{where}: has no 'prompt'; got keys {sorted(row)}; add it")
    prompt, nested = row.pop("prompt"), row.pop("metadata", {})
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{where}: 'prompt' must be text that is not blank; got {prompt!r}")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise DataError(f"{where}: 'prompt' holds half of a surrogate pair; got {prompt!r}")
    if not isinstance(nested, dict) or row.keys() & nested.keys():
        raise DataError(
            f"{where}: 'metadata' must be an object with other keys than the line; got {nested!r}"
        )
    return prompt, {**row, **nested}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = [key for key in keys if keys.count(key) > 1]
    if repeated:
        raise ValueError(f"key {repeated[0]!r} twice")
    return dict(pairs)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is not JSON")
