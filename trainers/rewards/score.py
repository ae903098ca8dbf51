"""Scores a folder of media: ``python -m trainers.rewards.score REWARD FOLDER [--kwargs JSON]``.

What to do before trusting a reward: look whether its order is yours. Pictures (png, jpg, webp) and
videos (mp4) are taken by name. The prompt of ``cat.png`` is the text of ``cat.txt``, or the ``prompt`` of
its line in ``metadata.jsonl`` (with ``file_name``, and further keys as metadata), or ``--prompt``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_rollout import Media
from miles_rollout.errors import MilesRolloutError
from trainers.config_loader import ConfigError
from trainers.rewards.media_files import IMAGES, VIDEOS, read_media
from trainers.rewards.prompt_check import check_prompt
from trainers.rewards.reward_call import RewardFailure
from trainers.rewards.scoring import RewardConfig, Scorer


def read_folder(
    folder: Path, prompt: str | None = None
) -> tuple[list[Path], list[str], list[Mapping[str, Any]]]:
    """Files, prompts and metadata. Raises ``ConfigError`` for a medium without a prompt."""
    if not folder.is_dir():
        raise ConfigError(f"score: no such folder; got {folder}; name a folder of media")
    lines = _metadata(folder / "metadata.jsonl")
    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in {*IMAGES, *VIDEOS})
    if not paths:
        raise ConfigError(
            f"score: no media; got {folder}; put {', '.join((*IMAGES, *VIDEOS))} files there"
        )
    prompts: list[str] = []
    metadata: list[Mapping[str, Any]] = []
    for path in paths:
        line = dict(lines.get(path.name, {}))
        beside = path.with_suffix(".txt")
        found = line.pop("prompt", None)
        if beside.is_file():
            found = beside.read_text().strip()
        found = prompt if found is None else found
        if not isinstance(found, str):
            raise ConfigError(
                f"score: {path.name} has no prompt; got neither {beside.name} nor a line in "
                "metadata.jsonl; write one, or give --prompt"
            )
        line.pop("file_name", None)
        prompts.append(found)
        metadata.append(line)
    return paths, prompts, metadata


def _metadata(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    lines = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            lines[str(line["file_name"])] = line
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"score: {path.name} line {number} is not an object with file_name; got {error!r}; "
                "correct the line"
            ) from error
    return lines


def table(
    name: str,
    kwargs: Mapping[str, Any],
    paths: Sequence[Path],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    media: Sequence[Media],
) -> str:
    """One line a file, best first, and their mean; what has no score is last and says so."""
    scorer = Scorer(
        [RewardConfig(name=name, kwargs=kwargs)], timeout_s=3600, max_masked_fraction=1.0
    )
    for path, prompt, extra in zip(paths, prompts, metadata, strict=True):
        check_prompt(name, scorer.sources[name.rpartition(":")[2]], prompt, extra, where=path.name)
    scores = scorer.score(media, prompts, metadata)
    columns = {"total": scores.total, **dict(list(scores.components.items())[1:])}
    order = sorted(range(len(paths)), key=lambda i: -_or_lowest(scores.total[i].item()))
    width = max(len(path.name) for path in paths)
    head = "  ".join([f"{'file':{width}}", *(f"{c.rpartition('/')[2]:>10}" for c in columns)])
    lines = [f"{head}  prompt"]
    for i in order:
        values = "  ".join(f"{column[i].item():10.4f}" for column in columns.values())
        lines.append(f"{paths[i].name:{width}}  {values}  {prompts[i][:60]}")
    means = "  ".join(f"{column.nanmean().item():10.4f}" for column in columns.values())
    lines.append(f"{'mean':{width}}  {means}")
    return "\n".join([*lines, *scores.errors])


def _or_lowest(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def main() -> None:
    """Parse ``sys.argv`` and print the table; a mistake of the user is one line, exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reward")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kwargs", default="{}", help="JSON, the reward's arguments")
    parser.add_argument("--prompt", help="of every file that has none of its own")
    arguments = parser.parse_args()
    try:
        try:
            kwargs = json.loads(arguments.kwargs)
        except ValueError as error:
            raise ConfigError(f"score: --kwargs is no JSON; got {error}; set an object") from error
        paths, prompts, metadata = read_folder(arguments.folder, arguments.prompt)
        media = [read_media(path) for path in paths]
        print(table(arguments.reward, kwargs, paths, prompts, metadata, media))
    except (MilesRolloutError, RewardFailure) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
