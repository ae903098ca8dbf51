"""The reward `ocr`: read by a real engine, from words drawn with Pillow."""

import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

import trainers.rewards.pretrained
import trainers.rewards.score
from miles_rollout import Media
from tests.tiny_run import metrics_of, tiny_config
from trainers.build import read_inputs, run
from trainers.config_loader import ConfigError
from trainers.data import DataError
from trainers.rewards import build_reward
from trainers.rewards.engines import Engines
from trainers.rewards.ocr import Ocr, target
from trainers.rewards.scoring import RewardConfig, Scorer

SIGN = 'A sign that says "HELLO"'


@pytest.fixture(name="ocr", scope="module")
def _ocr() -> Ocr:
    return Ocr(workers=1)


def drawn(word: str, *, tilt: float = 0, back: str = "white", ink: str = "black") -> torch.Tensor:
    """[3, 96, 208] in 0..1."""
    picture = Image.new("RGB", (208, 96), back)
    ImageDraw.Draw(picture).text((16, 24), word, fill=ink, font=ImageFont.load_default(36))
    picture = picture.rotate(tilt, fillcolor=back)
    return torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) / 255


def score(ocr: Ocr, *media: torch.Tensor, prompt: str = SIGN) -> list[float]:
    items = [Media(image=m) if m.ndim == 3 else Media(video=m, fps=8) for m in media]
    return ocr([*items], [prompt] * len(items), [{}] * len(items))


def test_a_word_is_scored_by_the_letters_that_are_right(ocr):
    right, one_wrong, blank = score(ocr, drawn("HELLO"), drawn("HELLD"), drawn(""))
    assert (right, one_wrong, blank) == (1.0, pytest.approx(0.8), 0.0)


def test_spaces_and_case_do_not_count_and_a_part_is_a_hit(ocr):
    assert score(ocr, drawn("Hello You")) == [1.0]
    assert score(ocr, drawn("HELLO"), prompt='it says "hel lo"') == [1.0]
    # Nothing of it is there, and far too long: not below 0.
    assert score(ocr, drawn("Zig Zag 42"), prompt='it says "HI"') == [0.0]


def test_degraded_words_are_read(ocr):
    noise = torch.randn(3, 96, 208, generator=torch.Generator().manual_seed(0)) * 40 / 255
    coloured = drawn("HELLO", back="blue", ink="yellow")
    assert score(ocr, drawn("HELLO", tilt=5), drawn("HELLO") + noise, coloured) == [1.0] * 3


def test_letters_are_seen_in_their_colours(ocr, monkeypatch):
    """Grey from blue-first and red-first bytes differs: what is read is handed over blue first."""
    seen = []

    class Engine:
        def __call__(self, picture):
            seen.append(picture)
            return type("Found", (), {"txts": None, "scores": None})

    monkeypatch.setattr(ocr, "_engines", Engines(Engine, 1))
    score(ocr, torch.tensor([1.0, 0.5, 0.0]).reshape(3, 1, 1).expand(3, 4, 6))
    assert seen[0].shape == (4, 6, 3)
    assert seen[0][0, 0].tolist() == [0, 128, 255]


def test_many_workers_give_the_scores_of_one(ocr):
    words = ["HELLO", "HELLD", "", "JELLY", "YELLOW", "H", "LO", "Hello You"]
    media = [drawn(word, tilt=i) for i, word in enumerate(words)]
    alone = score(ocr, *media)
    assert len(set(alone)) > 4
    assert score(Ocr(workers=3), *media) == alone


def test_of_a_video_every_fourth_frame_counts_that_has_a_part_right(ocr):
    other = drawn("HELLO")  # these frames are not looked at
    film = torch.stack([drawn(""), other, other, other, drawn("HELLO"), other, other, other])
    assert score(ocr, film) == [1.0]
    both = torch.stack([drawn("HELLO"), *[other] * 3, drawn("HELLD")])
    assert score(ocr, both) == [pytest.approx(0.9)]
    assert score(ocr, torch.stack([drawn("")] * 5)) == [0.0]
    # A part is no hit in a video: three letters too many cost three of five.
    assert score(ocr, drawn("HELLOYOU")[None]) == [pytest.approx(0.4)]


def test_what_the_engine_raises_masks_the_sample_and_is_told():
    scorer = Scorer(
        [RewardConfig(name="ocr", kwargs={"workers": 1})], timeout_s=60, max_masked_fraction=0.5
    )
    media = [Media(image=drawn("HELLO")), Media(image=torch.full((3, 96, 208), torch.nan))]
    scores = scorer.score(media, [SIGN] * 2, [{}] * 2)
    assert scores.total[0] == 1.0
    assert scores.masked.tolist() == [False, True]
    assert "the picture holds NaN or infinity" in scores.errors[-1]


@pytest.mark.parametrize(
    ("prompt", "metadata", "text"),
    [
        (SIGN, {}, "hello"),
        ('"One" and "Two"', {}, "one"),
        ('says "Big  News"', {}, "bignews"),
        ("no quotes", {"target": "A b"}, "ab"),
        (SIGN, {"target": "other"}, "other"),
    ],
)
def test_the_target(prompt, metadata, text):
    assert target(prompt, metadata) == text


@pytest.mark.parametrize(
    ("prompt", "metadata", "message"),
    [
        ("a cat", {}, "the prompt quotes no text to look for; got 'a cat'; put it in straight"),
        ('an empty "" one', {}, "the prompt quotes no text"),
        ('a blank "  " one', {}, "the prompt quotes no text"),
        ('an "open one', {}, "the prompt quotes no text"),
        (SIGN, {"target": ""}, "'target' holds no text to look for; got ''; set a string"),
        (SIGN, {"target": 3}, "'target' holds no text to look for; got 3; set a string"),
    ],
)
def test_a_prompt_without_a_target_is_refused(ocr, prompt, metadata, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        ocr.check_prompt(prompt, metadata)


def test_wrong_settings_and_missing_packages_are_told(monkeypatch):
    with pytest.raises(ConfigError, match=r"reward 'ocr': workers: must be positive; got 0; set 1"):
        Ocr(workers=0)
    with pytest.raises(ConfigError, match=r"reward 'ocr': max_side: must be positive; got -1"):
        Ocr(max_side=-1)

    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(trainers.rewards.pretrained.importlib, "import_module", missing)
    message = (
        r"reward 'ocr': needs other packages; got No module .*; pip install 'miles-rollout\[ocr\]'"
    )
    with pytest.raises(ConfigError, match=message):
        Ocr()


@pytest.fixture(name="prompts")
def _prompts(tmp_path):
    for name in ("train", "eval"):
        (tmp_path / f"{name}.txt").write_text('a "HI" sign\n\nthe word "STOP"\n')
    return tmp_path


def overrides(folder, rewards="[{name: ocr, kwargs: {workers: 2}}]"):
    files = [f"data.{name}={folder / name}.txt" for name in ("train", "eval")]
    return (*files, f"rewards={rewards}", "iterations=1", "eval.every=1")


@pytest.mark.filterwarnings("ignore:.*skipped 1 blank lines")
def test_a_run_starts_and_logs(prompts):
    run(tiny_config(prompts / "run", *overrides(prompts)))
    lines = metrics_of(prompts / "run")
    line = {key: value for part in lines for key, value in part.items()}
    assert line["rollout/reward/ocr"] == 0.0  # of random weights nothing can be read
    assert line["rollout/reward/masked"] == 0


@pytest.mark.filterwarnings("ignore:.*skipped 1 blank lines")
@pytest.mark.parametrize("name", ["train", "eval"])
def test_a_prompt_file_is_refused_by_line_before_a_model_is_loaded(prompts, name):
    (prompts / f"{name}.txt").write_text('a "HI" sign\n\na cat\n"X"\n')
    path = re.escape(str(prompts / f"{name}.txt"))
    with pytest.raises(DataError, match=f"^{path}:3: reward 'ocr': the prompt quotes no text"):
        read_inputs(tiny_config(prompts / "run", *overrides(prompts)))


def test_a_folder_is_scored_from_the_command_line(tmp_path, monkeypatch, capsys):
    for name, word in (("a", "HELLD"), ("b", "HELLO")):
        pixels = (drawn(word) * 255).to(torch.uint8).permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    command = ["score", "ocr", str(tmp_path), "--prompt", SIGN, "--kwargs", '{"workers": 1}']
    monkeypatch.setattr(sys, "argv", command)
    trainers.rewards.score.main()
    out = capsys.readouterr().out
    found = [line.split()[:2] for line in out.splitlines()[1:3]]
    assert found == [["b.png", "1.0000"], ["a.png", "0.8000"]]


def test_it_is_found_by_its_name():
    assert isinstance(build_reward("ocr", {"workers": 1}), Ocr)


def test_the_command_line_refuses_a_prompt_by_the_name_of_its_file(tmp_path, monkeypatch, capsys):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.setattr(sys, "argv", ["score", "ocr", str(tmp_path), "--prompt", "a cat"])
    with pytest.raises(SystemExit) as stop:
        trainers.rewards.score.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(
        "error: a.png: reward 'ocr': the prompt quotes no text"
    )


@pytest.mark.parametrize(
    ("quoted", "wanted"),
    [("Hello\tWorld", "helloworld"), ("CAFE\u0301", "caf\u00e9"), ("a\u3000b \u00a0c", "abc")],
)
def test_targets_are_compared_without_white_space_and_in_one_form(quoted, wanted):
    assert target(f'a sign "{quoted}"', {}) == wanted


@pytest.mark.parametrize("blank", ["\t", "\u00a0", "\u3000", "\u2028", " "])
def test_a_target_of_white_space_is_none(blank):
    with pytest.raises(ValueError, match="the prompt quotes no text to look for"):
        target(f'a sign "{blank}"', {})
