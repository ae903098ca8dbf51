"""Scores of a folder, as a table and from the command line."""

import json
import subprocess
import sys

import pytest
import torch
from PIL import Image

from miles_rollout import Media
from tests.tiny_run import ROOT
from trainers.config_loader import ConfigError
from trainers.rewards.media_files import read_media
from trainers.rewards.score import read_folder, table
from trainers.video_file import write_video


def brightness(media, prompts, metadata):
    """None for a prompt that says so."""
    shown = [m.image if m.video is None else m.video for m in media]
    return [
        None if p == "no score" else x.mean().item() for x, p in zip(shown, prompts, strict=True)
    ]


def picture(path, level):
    Image.new("RGB", (4, 4), (level,) * 3).save(path)


@pytest.fixture(name="folder")
def _folder(tmp_path):
    picture(tmp_path / "b.png", 51)
    picture(tmp_path / "a.png", 204)
    (tmp_path / "b.txt").write_text("dark\n")
    line = {"file_name": "a.png", "prompt": "light", "kind": 3}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(line) + "\n\n")
    return tmp_path


def scored(folder, prompt=None):
    paths, prompts, metadata = read_folder(folder, prompt)
    media = [read_media(path) for path in paths]
    return table(f"{__name__}:brightness", {}, paths, prompts, metadata, media)


def test_prompts_come_from_beside_from_lines_and_from_the_command(folder):
    picture(folder / "c.jpg", 0)
    paths, prompts, metadata = read_folder(folder, "any")
    assert [p.name for p in paths] == ["a.png", "b.png", "c.jpg"]
    assert prompts == ["light", "dark", "any"]
    assert metadata == [{"kind": 3}, {}, {}]
    with pytest.raises(ConfigError, match=r"c.jpg has no prompt; got neither c.txt nor a line"):
        read_folder(folder)


def test_the_best_comes_first_and_the_mean_last(folder):
    write_video(folder / "c.mp4", Media(video=torch.ones(3, 3, 32, 32), fps=8))
    (folder / "c.txt").write_text("white")
    lines = scored(folder).splitlines()
    assert [line.split()[0] for line in lines] == ["file", "c.mp4", "a.png", "b.png", "mean"]
    assert float(lines[2].split()[1]) == pytest.approx(0.8)
    assert float(lines[-1].split()[1]) == pytest.approx(2 / 3, abs=0.01)


def test_what_has_no_score_is_last_and_says_why(folder):
    (folder / "a.txt").write_text("no score")
    lines = scored(folder).splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["b.png", "0.2000"], ["a.png", "nan"]]
    assert "has no finite score" in lines[-1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not an object with file_name"),
        ('{"x": 1}', "got KeyError"),
        ("3", "got Ty"),
    ],
)
def test_a_damaged_line_is_told_by_number(folder, line, message):
    (folder / "metadata.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=message):
        read_folder(folder)


def test_a_folder_without_media_and_no_folder_are_told(tmp_path):
    with pytest.raises(ConfigError, match="no media"):
        read_folder(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        read_folder(tmp_path / "x")


def test_the_command_prints_the_table_or_one_line(folder):
    command = [sys.executable, "-m", "trainers.rewards.score", "jpeg_compressibility"]
    done = subprocess.run([*command, folder], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["file", "total", "prompt"]
    wrong = subprocess.run([*command, folder / "no"], capture_output=True, text=True, cwd=ROOT)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: score: no such folder")
