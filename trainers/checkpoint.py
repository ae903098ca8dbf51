"""Checkpoints that are complete or absent: named tensors and JSON in one folder.

A folder holds one safetensors file a group of tensors and ``state.json``: the state, the versions
of the libraries, and a manifest with size and SHA-256 of every file. It is written beside its place
and renamed into it, so a process that dies at any moment leaves the old checkpoint or the new one.
Only one process may write. No pickle: reading a checkpoint runs no code. What the tensors mean is
the trainer's affair; an optimizer's go through ``trainers.optimizer_state``.

    root/iteration_000012/{state.json, adapter.safetensors, optimizer.safetensors}
    root/.saving-*    half written; removed by the next save
    root/.replaced-*  the old one while the new one takes its place; put back if that failed
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import load_file, save_file
from torch import Tensor

from trainers.optimizer_state import CheckpointError, pack_optimizer, unpack_optimizer
from trainers.versions import library_versions, other_versions

__all__ = [
    "CheckpointError",
    "checkpoint_folder",
    "latest_checkpoint",
    "load_checkpoint",
    "pack_optimizer",
    "prune",
    "save_checkpoint",
    "unpack_optimizer",
]

SCHEMA_VERSION = 1
STATE_NAME = "state.json"
TensorGroups: TypeAlias = dict[str, dict[str, Tensor]]
State: TypeAlias = dict[str, Any]

_GROUP_NAME = re.compile(r"[A-Za-z0-9_-]+")
_FOLDER_NAME = re.compile(r"iteration_(\d{6,})")
_SAVING, _REPLACED, _REMOVING = ".saving-", ".replaced-", ".removing-"

logger = logging.getLogger(__name__)


def checkpoint_folder(root: str | os.PathLike[str], iteration: int) -> Path:
    """Where the checkpoint after ``iteration`` finished iterations lives."""
    return Path(root) / f"iteration_{iteration:06d}"


def save_checkpoint(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
) -> Path:
    """Write one file a group of ``tensors`` and the JSON ``state``; all of it or nothing."""
    folder = Path(folder)
    _check_content(tensors, state)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _tidy(folder.parent)
    partial = folder.with_name(_SAVING + folder.name)
    partial.mkdir()
    files = {}
    for group, members in tensors.items():
        path = partial / f"{group}.safetensors"
        save_file({name: _owned(tensor) for name, tensor in members.items()}, path)
        _sync(path)
        files[path.name] = _fingerprint(path)
    content = {
        "schema_version": SCHEMA_VERSION,
        "versions": library_versions(),
        "files": files,
        "state": dict(state),
    }
    text = json.dumps({**content, "sha256": _content_hash(content)}, indent=1, allow_nan=False)
    (partial / STATE_NAME).write_text(text + "\n")
    _sync(partial / STATE_NAME)
    _sync(partial)
    _put_in_place(partial, folder)
    return folder


def load_checkpoint(folder: str | os.PathLike[str]) -> tuple[TensorGroups, State]:
    """The tensors, on the CPU, and the state of a checkpoint whose every byte was verified."""
    folder = Path(folder)
    _put_back(folder.parent)
    content = _read_content(folder)
    for name, expected in content["files"].items():
        path = folder / name
        if not path.is_file():
            raise _unusable(folder, f"{name} is missing", "no such file")
        found = _fingerprint(path)
        if found != expected:
            raise _unusable(folder, f"{name} is damaged", f"{found} for {expected}")
    if other := other_versions(content["versions"]):
        logger.warning("%s was written with %s: numbers may differ", folder, ", ".join(other))
    tensors = {Path(name).stem: load_file(folder / name) for name in content["files"]}
    return tensors, content["state"]


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """The checkpoint with the most iterations in ``root``, or None; not verified."""
    _put_back(Path(root))
    return next(reversed(_folders(Path(root))), None)


def prune(
    root: str | os.PathLike[str], keep: int, protect: Collection[str | os.PathLike[str]] = ()
) -> list[Path]:
    """Remove all but the ``keep`` newest checkpoints and those in ``protect``; return the removed."""
    if keep < 1:
        raise CheckpointError(
            f"prune: would remove every checkpoint; got keep {keep}; set 1 or more"
        )
    protected = {Path(path).resolve() for path in protect}
    old = [path for path in _folders(Path(root))[:-keep] if path.resolve() not in protected]
    for path in old:
        _remove(path)
    return old


def _check_content(tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    bad_names = [name for name in tensors if not _GROUP_NAME.fullmatch(name)]
    if bad_names:
        raise CheckpointError(
            f"save_checkpoint: names of groups become names of files; got {bad_names}; "
            f"set names of letters, digits, _ and -"
        )
    bad_keys = [key for key, value in state.items() if not _survives_json({key: value})]
    if bad_keys:
        raise CheckpointError(
            f"save_checkpoint: state would not come back from JSON as it is; got "
            f"{ ({key: state[key] for key in bad_keys})!r:.200}; set lists for tuples, string keys, "
            f"finite numbers, and pass tensors in the tensors argument"
        )


def _survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


def _owned(tensor: Tensor) -> Tensor:
    """On the CPU and without the rest of a storage that it is a view of."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _read_content(folder: Path) -> dict[str, Any]:
    path = folder / STATE_NAME
    if not path.is_file():
        raise _unusable(folder, f"{STATE_NAME} is missing", "no such file")
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        saved = content.pop("sha256")
    except (ValueError, KeyError, AttributeError) as error:
        raise _unusable(folder, f"{STATE_NAME} is damaged", f"{error!r}") from error
    if saved != _content_hash(content):
        raise _unusable(folder, f"{STATE_NAME} is damaged", "other content than was saved")
    if content["schema_version"] != SCHEMA_VERSION:
        version = content["schema_version"]
        raise _unusable(folder, f"{STATE_NAME} has another schema than {SCHEMA_VERSION}", version)
    return content


def _unusable(folder: Path, problem: str, got: object) -> CheckpointError:
    others = [path.name for path in _folders(folder.parent) if path != folder]
    advice = f"resume from another one ({', '.join(others)})" if others else "there is no other one"
    return CheckpointError(f"checkpoint {folder}: {problem}; got {got}; restore it or {advice}")


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _content_hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(partial: Path, folder: Path) -> None:
    aside = folder.with_name(_REPLACED + folder.name)
    if folder.exists():
        folder.rename(aside)
    partial.rename(folder)
    _sync(folder.parent)
    if aside.exists():
        _remove(aside)


def _put_back(root: Path) -> None:
    """Undo a replacement that did not get as far as the new folder."""
    for aside in root.glob(f"{_REPLACED}*"):
        folder = aside.with_name(aside.name.removeprefix(_REPLACED))
        if not folder.exists():
            # Another rank that reads may be first.
            with contextlib.suppress(FileNotFoundError):
                aside.rename(folder)


def _tidy(root: Path) -> None:
    _put_back(root)
    for prefix in (_SAVING, _REPLACED, _REMOVING):
        for leftover in root.glob(f"{prefix}*"):
            shutil.rmtree(leftover)


def _remove(path: Path) -> None:
    """Renamed first: a half removed folder must not pass for a checkpoint."""
    doomed = path.with_name(_REMOVING + path.name)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _folders(root: Path) -> list[Path]:
    found = [path for path in root.glob("iteration_*") if _FOLDER_NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("iteration_")))
