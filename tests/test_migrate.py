"""docs/migrate.md names keys that there are, each option once, and examples that load."""

import re
from pathlib import Path

import pytest

from trainers.config import TrainConfig
from trainers.config_docs import render
from trainers.config_loader import load

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "migrate.md").read_text()
SECTIONS = dict(zip(*[iter(re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))
KEYS = set(re.findall(r"^\| `([\w.]+)` \|", render(), re.MULTILINE))


def rows(section: str) -> list[list[str]]:
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("| `")]
    assert len(lines) > 25
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("section", ["flow_grpo", "miles-diffusion"])
def test_every_key_there_is(section: str) -> None:
    for row in rows(section):
        assert len(row) == 3, row
        _, here, differs = row
        named = re.findall(r"`([^`]+)`", here)
        assert set(named) <= KEYS, row
        assert here == ", ".join(f"`{name}`" for name in named), row
        assert named or differs, "what has no key says why"
        # Keys in the remarks exist as well; values and options have no dot.
        told = re.findall(r"`([a-z]+\.[\w.]+)`", differs)
        assert {
            t for t in told if t not in ("train.txt", "test.txt", "metadata.rm_type")
        } <= KEYS, row


@pytest.mark.parametrize("section", ["flow_grpo", "miles-diffusion"])
def test_every_option_is_told_once(section: str) -> None:
    options = [o for row in rows(section) for o in re.findall(r"`([^`]+)`", row[0])]
    assert len(set(options)) == len(options)
    dashed = [option.startswith("--") for option in options]
    assert all(dashed) if section == "miles-diffusion" else not any(dashed)


@pytest.mark.parametrize("window", sorted(set(re.findall(r"`(\{type: [^`]+\})`", PAGE))))
def test_every_window_loads_and_is_what_it_replaces(window: str) -> None:
    config = load(TrainConfig, [], [f"rollout.window={window}"])
    drawn = {config.rollout.window.choose(i, 10, 0) for i in range(100)}
    expected = {(3, 4)} if "fixed" in window else {(0, 1), (1, 2), (2, 3), (3, 4)}
    assert drawn == expected


def test_metrics_are_those_of_a_run() -> None:
    lines = [line for line in SECTIONS["Metrics"].splitlines() if line.startswith("| `")]
    named = re.findall(r"`([^`]+)`", " ".join(line.split("|")[2] for line in lines))
    code = "\n".join(path.read_text() for path in (ROOT / "trainers").rglob("*.py"))
    assert named
    for metric in named:
        assert metric.split("/")[-1].rstrip("*") in code or metric == ".../update_1", metric
