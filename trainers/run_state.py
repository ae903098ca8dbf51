"""What a run remembers besides its tensors, and what a resumed one says about changes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.data import PromptRecord
from trainers.rollout_config import EvalConfig

logger = logging.getLogger(__name__)

_FREE_TO_CHANGE = ("iterations", "resume", "output_dir", "tracking", "debug")


def prompt_digests(
    train: Sequence[PromptRecord], held_out: Sequence[PromptRecord]
) -> dict[str, str]:
    """What the files held, by digest: their names in the config may stay and their lines not."""
    return {"train": _digest(train), "eval": _digest(held_out)}


def evaluation_digest(prompts: str, config: EvalConfig) -> str:
    """Of what makes the samples of an evaluation; ``prompts``: the digest of ``data.eval``."""
    samples = (config.seed, config.num_inference_steps, config.samples_per_prompt)
    content = json.dumps([prompts, config.num_prompts, *samples])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def warn_of_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Say which settings of a resumed run are not those of the run that it continues."""
    before, now = (
        _leaves({key: value for key, value in tree.items() if key not in _FREE_TO_CHANGE})
        for tree in (saved, current)
    )
    changed = [
        f"{key} {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if changed:
        logger.warning("resume: settings differ from the saved run's: %s", "; ".join(changed))


def write_atomically(path: Path, content: Mapping[str, Any]) -> None:
    """JSON that is complete or absent."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(dict(content), indent=1) + "\n")
    os.replace(partial, path)


def _digest(records: Sequence[PromptRecord]) -> str:
    content = repr([(record.prompt, dict(record.metadata)) for record in records])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        inner = _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {}
        leaves |= inner or {f"{prefix}{key}": value}
    return leaves
