from pathlib import Path

import pytest
import torch
from PIL import Image

from miles_rollout import Media
from trainers.samples import Sample, samples_of, save_samples


def _picture(value: float) -> Media:
    return Media(image=torch.full((3, 16, 16), value))


def _video(value: float) -> Media:
    frames = torch.full((5, 3, 16, 16), 0.1)
    frames[2] = value
    return Media(video=frames, fps=5)


def test_caption_is_the_prompts_start_and_the_reward() -> None:
    long = Sample(media=_picture(0.0), prompt="x" * 200, reward=1 / 3)
    assert long.caption == "x" * 160 + " | 0.3333"
    assert Sample(media=_picture(0.0), prompt="a cat").caption == "a cat"


def test_the_picture_of_a_video_is_its_middle_frame() -> None:
    pictures = [s.picture for s in samples_of([_picture(0.5), _video(0.9)], ["a", "b"], [0.0, 1.0])]
    assert [p.mean().item() for p in pictures] == pytest.approx([0.5, 0.9])


def test_a_sheet_shows_all_and_a_video_is_a_file_too(tmp_path: Path) -> None:
    samples = samples_of([_video(1.0), _picture(0.0), _video(0.0)], ["a", "b", "c"], [0.0] * 3)
    paths = save_samples(tmp_path / "new", "x", samples)
    assert [p if p is None else p.name for p in paths] == ["x_00.mp4", None, "x_02.mp4"]
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["x.png", "x_00.mp4", "x_02.mp4"]
    with Image.open(tmp_path / "new" / "x.png") as sheet:
        # Two columns: the first video is white in its middle, the picture beside it black.
        assert sheet.getpixel((sheet.width // 4, 50)) == (255, 255, 255)
        assert sheet.getpixel((sheet.width * 3 // 4, 50)) == (0, 0, 0)


def test_other_captions_are_those_of_the_sheet(tmp_path: Path) -> None:
    samples = samples_of([_picture(0.5)], ["a"], [0.0])
    for name, captions in (("own", None), ("same", ["a | 0.0000"]), ("other", ["before: a"])):
        save_samples(tmp_path, name, samples, captions)
    own, same, other = (
        (tmp_path / f"{name}.png").read_bytes() for name in ("own", "same", "other")
    )
    assert own == same != other


def test_a_picture_with_alpha_is_shown_over_white() -> None:
    clear = torch.tensor([0.0, 0.0, 0.0, 0.25]).view(4, 1, 1).expand(4, 8, 8)
    sample = Sample(media=Media(image=clear), prompt="a")
    assert torch.equal(sample.picture, torch.full((3, 8, 8), 0.75))
