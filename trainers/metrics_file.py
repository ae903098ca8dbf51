"""``metrics.jsonl``: one JSON object an iteration, the record that needs no service to be read.

Every line is on disk before training goes on. Equal metrics give equal bytes, so two runs can be
compared with ``cmp``. NaN and infinity, which JSON does not have, are written as null: the key
stays visible.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from miles_rollout.errors import MilesRolloutError

Scalar: TypeAlias = float | int | Tensor | np.generic | None


class TrackingError(MilesRolloutError, ValueError):
    """What was logged, or where, would give a record that cannot be trusted."""


class MetricsFile:
    """Appends to ``path``; ``resume_from`` first drops the lines of that iteration and later."""

    def __init__(self, path: Path, *, resume_from: int | None = None) -> None:
        self._last = -1
        if resume_from is not None:
            self._last = _cut_back(path, resume_from)
        elif path.exists() and path.stat().st_size:
            raise TrackingError(
                f"tracking: {path} holds another run; got no iteration to resume from; "
                f"set resume, or another output_dir"
            )
        self._file = path.open("a", encoding="utf-8")

    def write(self, iteration: int, metrics: Mapping[str, Scalar]) -> dict[str, Any]:
        """Write the one line of this iteration; return the metrics as plain Python numbers."""
        if iteration <= self._last:
            raise TrackingError(
                f"tracking: one line an iteration, in order; got iteration {iteration} after "
                f"{self._last}; pass all metrics of an iteration to one call of log"
            )
        plain = {key: plain_number(key, metrics[key]) for key in sorted(metrics)}
        line = {"iteration": iteration} | {key: _finite(value) for key, value in plain.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._last = iteration
        return plain

    def close(self) -> None:
        """Can be called twice."""
        self._file.close()


def plain_number(key: str, value: Any) -> float | int | None:
    """``value`` as a Python number, bitwise; None stays."""
    if isinstance(value, Tensor | np.generic | np.ndarray) and value.ndim == 0:
        value = value.item()
    if key == "iteration" or not isinstance(value, float | int | None):
        raise TrackingError(
            f"tracking: a metric is a number under a key other than 'iteration'; got {key!r}: "
            f"{type(value).__name__}; set a mean, or pass it as a histogram"
        )
    return value


def _finite(value: float | int | None) -> float | int | None:
    return value if value is not None and math.isfinite(value) else None


def _cut_back(path: Path, iteration: int) -> int:
    """Keep the lines before ``iteration``, byte by byte; return the last one's iteration."""
    if not path.exists():
        return -1
    lines = [line for line in path.read_bytes().split(b"\n") if line]
    kept, last = [], -1
    for index, line in enumerate(lines):
        found = _iteration_of(line)
        if found is None and index < len(lines) - 1:
            raise TrackingError(
                f"tracking: {path} line {index + 1} is not a metrics line; got {line[:60]!r}; "
                f"repair or remove the line, or set another output_dir"
            )
        # The last line may be torn: the process may have died while writing it.
        if found is not None and found < iteration:
            kept.append(line + b"\n")
            last = found
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return last


def _iteration_of(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return None
