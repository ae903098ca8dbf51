import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from trainers.image_grid import save_grid, to_pil


def test_values_are_rounded_and_clipped() -> None:
    values = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, math.nan]).expand(3, 1, 6)
    red = [to_pil(values).getpixel((x, 0))[0] for x in range(6)]
    assert red == [0, 0, 128, 255, 255, 0]


def test_bfloat16_images_are_taken() -> None:
    assert to_pil(torch.ones(3, 4, 5, dtype=torch.bfloat16)).size == (5, 4)


def test_sheet_holds_every_image_and_its_caption(tmp_path: Path) -> None:
    colours = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]])
    images = [c[:, None, None].expand(3, 32, 32) for c in colours]
    save_grid(tmp_path / "new" / "a.png", images, ["red", "green", "blue | \u732b " + "w" * 300])
    save_grid(tmp_path / "b.png", images, ["red", "green", ""])
    with Image.open(tmp_path / "new" / "a.png") as sheet, Image.open(tmp_path / "b.png") as bare:
        colors = {c for _, c in sheet.getcolors(1 << 16)}
        assert {(255, 0, 0), (0, 255, 0), (0, 0, 255)} <= colors
        assert sheet.size == bare.size
        assert sheet.tobytes() != bare.tobytes()


def test_images_of_several_sizes_share_a_sheet(tmp_path: Path) -> None:
    save_grid(tmp_path / "a.png", [torch.ones(3, 32, 64), torch.ones(3, 300, 200)], ["a", "b"])
    with Image.open(tmp_path / "a.png") as sheet:
        assert sheet.width >= 2 * 200


def test_the_same_sheet_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        save_grid(tmp_path / name, [torch.full((3, 8, 8), 0.3)], ["a"])
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_one_caption_an_image(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 1 images, 2 captions"):
        save_grid(tmp_path / "a.png", [torch.zeros(3, 2, 2)], ["a", "b"])
    with pytest.raises(ValueError, match="got 0 images"):
        save_grid(tmp_path / "a.png", [], [])
