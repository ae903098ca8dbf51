import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipes import command_line
from tests.tiny_run import OVERRIDES, ROOT, metrics_of, tiny_config, without_perf
from trainers.build import run
from trainers.config import TrainConfig

DEFAULT = "configs/qwen_image/tiny_cpu.yaml"


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["recipe", *arguments])
    command_line.main("A recipe.", default=DEFAULT)


def _error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    with pytest.raises(SystemExit) as caught:
        _main(monkeypatch, *arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_without_arguments_the_default_config_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _main(monkeypatch, "--dry-run")
    out = capsys.readouterr().out
    assert "pipeline: tiny-qwen-image-pretrained" in out
    assert "6 prompts x 16 samples = 96 samples an iteration" in out


def test_a_dry_run_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _main(monkeypatch, "--dry-run", f"output_dir={tmp_path / 'run'}", "seed=5")
    assert "seed: 5" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_help_says_how(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        _main(monkeypatch, "--help")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for part in ("A recipe.", "FILE.yaml | key.path=value", "--dry-run", DEFAULT):
        assert part in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["itertions=3"], "error: itertions: no such key; did you mean iterations?"),
        (["nowhere.yaml"], "error: nowhere.yaml: cannot be read: No such file"),
        (["rollout.num_prompts=1000"], "error: rollout.num_prompts: more prompts an iteration"),
        (["rewards=[{name: shape_mach}]"], "did you mean shape_match?"),
        (["data.train=nowhere.txt"], "error: nowhere.txt: cannot be read"),
        (["resume=runs/nowhere"], "error: resume: no checkpoint there"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    error = _error(monkeypatch, capsys, "output_dir=runs/never-made", *arguments)
    assert error.count("\n") == 1
    assert message in error


def test_two_mistakes_are_two_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _error(monkeypatch, capsys, "itertions=3", "seed=x").count("\n") == 2


def test_a_folder_with_an_equals_sign_is_still_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lr=1e-4" / "config.yaml"
    path.parent.mkdir()
    path.write_text("iterations: 77\n")
    _main(monkeypatch, "--dry-run", str(path))
    assert "iterations: 77" in capsys.readouterr().out


def test_an_interruption_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(config: TrainConfig) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "run", interrupt)
    with pytest.raises(SystemExit) as caught:
        _main(monkeypatch, "output_dir=runs/never-made")
    assert caught.value.code == 130
    assert capsys.readouterr().err.startswith("interrupted: resume=true goes on")


def _recipe(output_dir: Path, *overrides: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "recipes.grpo_qwen_image",
            str(output_dir.parent / "empty.yaml"),
            *OVERRIDES,
            "iterations=4",
            f"output_dir={output_dir}",
            *overrides,
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_killed_recipe_resumes_to_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    folder = tmp_path / "killed"
    moment = random.uniform(0.0, 0.8)  # any moment must do
    process = _recipe(folder)
    metrics = folder / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL

    resumed = _recipe(folder, "resume=true")
    out, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, err.decode()
    assert b"metrics.jsonl" in out
    whole = run(tiny_config(tmp_path / "whole", "iterations=4"))
    assert without_perf(metrics_of(folder)) == without_perf(metrics_of(whole)), moment
    last = "checkpoints/iteration_000004"
    for name in ("policy.safetensors", "optimizer.safetensors"):
        a, b = load_file(folder / last / name), load_file(whole / last / name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), (name, moment)
    exported = f"{last}/pytorch_lora_weights.safetensors"
    assert (folder / exported).read_bytes() == (whole / exported).read_bytes()
