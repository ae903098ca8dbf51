"""docs/results.md says what benchmarks/learning.json holds, and shows what was drawn of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.learning import COMPARED, CURVES, FIGURES, ITERATIONS, PREFIX_PAIR, RUNS, table

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/results.md").read_text()
HELD = json.loads(CURVES.read_text())


def test_the_table_is_that_of_the_recorded_runs() -> None:
    assert table(HELD) in PAGE


def test_every_algorithm_has_three_whole_runs_with_ratios_of_exactly_one() -> None:
    runs = {(curve["name"], curve["seed"]) for curve in HELD}
    assert runs == {(name, seed) for name in RUNS for seed in (0, 1, 2)}
    assert list(RUNS) == COMPARED + PREFIX_PAIR
    for curve in HELD:
        assert curve["gap"] == 0, curve["name"]
        assert {len(curve[key]) for key in ("reward", "seconds", "passes")} == {ITERATIONS}


def test_the_figures_are_there_and_shown() -> None:
    shown = set(re.findall(r"\]\(results/([a-z_]+\.png)\)", PAGE))
    assert shown == {path.name for path in FIGURES.glob("*.png")}
    assert len(shown) == 3
