"""Reads an offline W&B run back: the ``.wandb`` file is a LevelDB log of protobuf records."""

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7


@dataclass
class OfflineRun:
    history: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    step_metrics: dict[str, str] = field(default_factory=dict)
    """The x-axis of each key or glob."""
    info: Any = None
    exit_code: int | None = None


def run_folders(output_dir: Path) -> list[Path]:
    return sorted((output_dir / "wandb").glob("offline-run-*"))


def read_run(folder: Path, timeout: float = 20.0) -> OfflineRun:
    """W&B writes in the background: waits for the record that ends a run."""
    (path,) = folder.glob("*.wandb")
    end = time.monotonic() + timeout
    while (run := _parse(path)).exit_code is None:
        assert time.monotonic() < end, f"{path} has no end"
        time.sleep(0.02)
    return run


def _parse(path: Path) -> OfflineRun:
    run = OfflineRun()
    for payload in _payloads(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            run.history.append(_items(record.history.item))
        elif kind == "run":
            run.info = record.run
            run.config |= _items(record.run.config.update)
        elif kind == "config":
            run.config |= _items(record.config.update)
        elif kind == "metric":
            run.step_metrics[record.metric.name or record.metric.glob_name] = (
                record.metric.step_metric
            )
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _items(items: Any) -> dict[str, Any]:
    """A dict, such as a histogram, comes as one item a leaf, under a list of keys."""
    tree: dict[str, Any] = {}
    for item in items:
        *parents, leaf = [item.key] if item.key else item.nested_key
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = json.loads(item.value_json)
    return tree


def _payloads(data: bytes) -> Iterator[bytes]:
    """Record types: 1 whole, 2 first, 3 middle, 4 last piece."""
    at, pieces = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0 or at + HEADER + length > len(data):
            return
        pieces += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            yield pieces
            pieces = b""
