"""The README is true: every command in it runs, its code runs as it stands, its tree exists.

Commands run from the repository's root, as the README says, with small sizes appended so that they
take seconds, and with ``runs/`` moved to a temporary folder. All but the dry run run in this process.
"""

from __future__ import annotations

import json
import logging
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SMALL = [
    "model.pipeline=tiny-qwen-image",
    "rewards=[{name: jpeg_compressibility}]",
    "rollout.num_prompts=2",
    "rollout.group_size=2",
    "rollout.chunk_size=4",
    "rollout.num_inference_steps=3",
    "rollout.window.steps=[1]",
    "eval.num_prompts=2",
    "eval.samples_per_prompt=1",
    "eval.num_inference_steps=2",
    "tracking.wandb=disabled",
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


PYTHON = [words for words in commands() if words[0] == "python"]
MAKE = [words for words in commands() if words[0] == "make"] + [
    shlex.split(text) for text in re.findall(r"`(make [^`]+)`", README)
]


def run_module(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m NAME ...`` in this process, which has paid for the imports."""
    python, flag, name, *arguments = words
    assert (python, flag) == ("python", "-m")
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
        code = None
        try:
            runpy.run_module(name, run_name="__main__")
        except SystemExit as end:
            code = end.code
    assert not code, f"{shlex.join(words)} ended with {code}"


@pytest.fixture
def _loggers_keep_their_levels():
    """Recipes quieten some loggers, as a program may."""
    loggers = [logging.getLogger(n) for n in ("httpx", "urllib3", "diffusers", "transformers")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_the_readme_is_short_and_its_commands_are_known_to_this_test():
    assert len(README.splitlines()) <= 150
    assert README.isascii()
    assert len(PYTHON) + len(MAKE) > len(commands()) - 1
    assert all(words[0] in ("python", "make") for words in commands())


@pytest.mark.parametrize("words", MAKE, ids=shlex.join)
def test_make_targets_exist(words):
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", "-n", *words[1:]], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ".venv/bin/" in done.stdout


@pytest.mark.parametrize("code", blocks("python"))
def test_the_code_runs_as_it_stands(code, tmp_path, capsys):
    path = tmp_path / "readme.py"
    path.write_text(code)
    runpy.run_path(str(path))
    assert capsys.readouterr().out.count("a red circle") == 4


@pytest.mark.usefixtures("_loggers_keep_their_levels")
def test_the_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    runs = tmp_path / "runs"
    ran: list[str] = []
    iterations, dry_run = 0, ""
    for words in PYTHON:
        words = [word.replace("runs/", f"{runs}/") for word in words]
        name = words[2]
        ran.append(name)
        if name == "recipes.grpo_loop":
            words += ["--iterations", "1"]
        elif name == "recipes.grpo_qwen_image" and "--dry-run" not in words:
            # Each goes one iteration further, so that the resumed one has something to do.
            iterations += 1
            words += [*SMALL, f"iterations={iterations}"]
        if ran == ["recipes.grpo_qwen_image"]:
            words += [f"output_dir={runs}/first"]
        if "--dry-run" in words:
            dry_run += subprocess.run(
                [sys.executable, *words[1:]], cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout
        else:
            run_module(words, monkeypatch)
    printed = capsys.readouterr().out
    assert {"recipes.generate", "miles_rollout.check", "recipes.grpo_loop"} <= set(ran)
    lines = [
        json.loads(line) for line in (runs / "mine" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["iteration"] for line in lines] == list(range(iterations + 1))
    assert all(line.get("train/ratio_abs_minus_1", 0) == 0 for line in lines)
    for name in ("config.yaml", "samples", "checkpoints"):
        assert (runs / "mine" / name).exists()
    assert len(list((runs / "pictures").glob("prompt_*.png"))) == 4
    assert dry_run.count("denoiser forwards an iteration") == 2
    assert "FAIL" not in printed


def test_the_file_tree_is_that_of_the_repository():
    (tree,) = re.findall(r"\n```\n(miles_rollout/.*?)```", README, re.DOTALL)
    folder = ROOT
    for line in tree.splitlines():
        names = re.findall(r"[\w/]+(?:\.py|/)", line[:39] if line[0] == " " else line.split()[0])
        for name in names:
            path = (folder if line.startswith(" ") else ROOT) / name
            assert path.exists(), line
        if not line.startswith(" "):
            folder = ROOT / names[0]
    for package in ("miles_rollout", "trainers", "recipes", "configs", "docs", "tests"):
        assert f"\n{package}/" in f"\n{tree}"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+\.(?:py|md|txt))`", README))))
def test_files_that_the_readme_names_exist(path):
    assert (ROOT / path).is_file()
