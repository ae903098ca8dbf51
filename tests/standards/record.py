"""``python -m tests.standards.record``: what the recipes compute now becomes the standard.

Every recipe runs twice, and what is not the same twice is not recorded. Single steps are as well.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests.standards.observed import Entries, observe, pinned
from tests.standards.standard import (
    RECIPES,
    difference,
    environment,
    other_environment,
    path_of,
    read,
    write,
)
from tests.standards.steps import NAME, steps


def main() -> None:
    for recipe in RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            once, twice = (observe(recipe, Path(folder) / name) for name in ("once", "twice"))
        _record(recipe, once, twice)
    _record(NAME, steps(), steps())


def _record(name: str, once: Entries, twice: Entries) -> None:
    unlike = difference(once, twice, exact=True)
    if unlike is not None:
        sys.exit(f"{name}: not the same twice, so nothing is recorded: {unlike}")
    with pinned():
        here = environment()
    print(f"{name}: {len(once)} entries")
    if path_of(name).is_file():
        before = read(name)
        for line in other_environment(before["env"], here):
            print(f"  environment: {line}")
        print(f"  first change: {difference(before['entries'], once, exact=True)}")
    write(name, here, once)


if __name__ == "__main__":
    main()
