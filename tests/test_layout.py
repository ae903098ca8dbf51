"""What the repository promises of its own sources."""

import ast
import functools
import graphlib
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("miles_rollout", "trainers", "recipes")
FOLDERS = (*PACKAGES, "tests", "benchmarks")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
SHIPPED = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGES]
PROGRAMS = (
    "recipes/",
    "miles_rollout/check.py",
    "miles_rollout/pipelines/docs.py",
    "miles_rollout/testing/pretrain_minimax_h3.py",
    "miles_rollout/testing/pretrain_qwen_image.py",
    "trainers/config_docs.py",
    "trainers/rewards/score.py",
    "trainers/rewards/serve.py",
)

BANNED = {
    # Global state, and formats that run code when they are read.
    "np.random.seed": (),
    "pickle.load": (),
    "pickle.loads": (),
    "torch.load": (),
    # Inside fork_rng, for the initial weights of the tiny models.
    "torch.manual_seed": ("miles_rollout/testing/",),
    "print": PROGRAMS,
}


@functools.cache
def _calls(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}


def _imports(path: Path) -> set[str]:
    """Modules of this repository that a file imports, also inside of functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] in PACKAGES}


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_are_short() -> None:
    assert {path.name: n for path in SOURCES if (n := _lines(path)) > 500} == {}
    assert statistics.median(_lines(path) for path in SHIPPED if _lines(path) > 5) <= 130


@pytest.mark.parametrize("call", BANNED)
def test_banned_calls(call: str) -> None:
    found = [
        name
        for path in SHIPPED
        if not (name := path.relative_to(ROOT).as_posix()).startswith(BANNED[call])
        and call in _calls(path)
    ]
    assert found == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SHIPPED}
    modules = {name for name in names if not name.endswith("__init__")}
    graph = {name: _imports(names[name]) & modules - {name} for name in modules}
    # An order in which every module comes after what it imports exists if there is no circle.
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_sources_are_ascii() -> None:
    files = [
        *SOURCES,
        *(p for p in (ROOT / "configs").rglob("*") if p.is_file()),
        *(p for p in (ROOT / "docs").rglob("*.md")),
        *ROOT.glob("*.md"),
    ]
    assert [str(path) for path in files if not path.read_bytes().isascii()] == []


def test_every_module_says_what_it_is_for() -> None:
    missing = [str(path) for path in SHIPPED if not ast.get_docstring(ast.parse(path.read_text()))]
    assert missing == []
