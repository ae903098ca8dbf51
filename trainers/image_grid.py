"""Pictures as 8 bit files: one, and a contact sheet of several with captions."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from miles_rollout.shapes import Float

# Six lines of at least 30 characters: a prompt of 160 and its reward.
_MIN_WIDTH, _MARGIN, _FONT_SIZE, _LINES = 192, 6, 12, 6


def to_pil(image: Float[Tensor, "3 height width"]) -> Image.Image:
    """8 bit RGB; what is outside 0..1 is clipped, NaN is black."""
    values = image.detach().float().nan_to_num(nan=0.0).clamp(0, 1).mul(255).round()
    return Image.fromarray(values.to(torch.uint8).permute(1, 2, 0).contiguous().cpu().numpy())


def save_grid(
    path: Path, images: Sequence[Float[Tensor, "3 _ _"]], captions: Sequence[str]
) -> None:
    """Write a PNG of all images in a square-like grid, each above its caption."""
    if not images or len(images) != len(captions):
        raise ValueError(
            f"save_grid: needs images and one caption for each; got {len(images)} images, "
            f"{len(captions)} captions; pass lists of one length"
        )
    pictures = [_enlarged(to_pil(image)) for image in images]
    font = ImageFont.load_default(_FONT_SIZE)
    width = max(picture.width for picture in pictures) + 2 * _MARGIN
    picture_height = max(picture.height for picture in pictures) + 2 * _MARGIN
    height = picture_height + _LINES * (_FONT_SIZE + 2)
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    characters = max(8, int((width - 2 * _MARGIN) / (0.52 * _FONT_SIZE)))
    for index, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x, y = index % columns * width + _MARGIN, index // columns * height + _MARGIN
        sheet.paste(picture, (x, y))
        text = textwrap.wrap(caption, characters, max_lines=_LINES, placeholder=" ...")
        draw.multiline_text(
            (x, y + picture_height - _MARGIN), "\n".join(text), "black", font, spacing=2
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def _enlarged(picture: Image.Image) -> Image.Image:
    """By a whole factor and without smoothing: a caption has no room under a 32 pixel image."""
    factor = math.ceil(_MIN_WIDTH / picture.width)
    return picture.resize(
        (picture.width * factor, picture.height * factor), Image.Resampling.NEAREST
    )
