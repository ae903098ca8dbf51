"""Coloured shapes and the prompts that name them: a world small enough to train on and to judge.

A picture is one filled shape on a plain background. Every shape is the zero set of a signed
distance, so that drawing a picture and fitting a shape to a picture are the same few lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from miles_rollout.errors import RolloutParamsError
from miles_rollout.shapes import Float

PALETTE: dict[str, tuple[float, float, float]] = {
    "red": (0.88, 0.12, 0.12),
    "green": (0.10, 0.62, 0.18),
    "blue": (0.12, 0.22, 0.85),
    "yellow": (0.95, 0.85, 0.15),
    "purple": (0.58, 0.12, 0.68),
    "cyan": (0.25, 0.80, 0.88),
    "white": (0.96, 0.96, 0.96),
    "black": (0.06, 0.06, 0.06),
}
"""RGB in 0..1. The closest two (blue and purple) are 0.50 apart."""

SHAPES = ("circle", "square", "triangle", "cross")

AREAS = {"circle": math.pi, "square": 2.89, "triangle": 1.572, "cross": 2.2044}
"""Area of each shape at radius 1."""

_SQUARE = 0.85  # half side
_TRIANGLE = 0.55  # inradius; the circumradius is twice that
_ARM = 0.33  # half width of a bar of the cross

_PROMPT = re.compile(
    rf"a ({'|'.join(PALETTE)}) ({'|'.join(SHAPES)}) on a ({'|'.join(PALETTE)}) background"
)


class Scene(NamedTuple):
    """What a prompt asks for."""

    shape: str
    color: str
    background: str


def prompt(shape: str, color: str, background: str) -> str:
    """The sentence that names this scene."""
    return f"a {color} {shape} on a {background} background"


def parse_prompt(text: str) -> Scene:
    """The scene that ``text`` names: the inverse of ``prompt``.

    Raises ``RolloutParamsError`` for any other sentence, and for a shape in its background's
    colour, which nobody could see.
    """
    match = _PROMPT.fullmatch(text.strip())
    if match is None or match[1] == match[3]:
        raise RolloutParamsError(
            f"parse_prompt: the prompt names no scene; got {text!r}; write 'a COLOR SHAPE on a "
            f"BACKGROUND background' with two different colours of {', '.join(PALETTE)} and a "
            f"shape of {', '.join(SHAPES)}"
        )
    return Scene(shape=match[2], color=match[1], background=match[3])


def distance(
    shape: str, x: Float[Tensor, "*grid"], y: Float[Tensor, "*grid"]
) -> Float[Tensor, "*grid"]:
    """Signed distance to the outline of ``shape`` at radius 1 around 0 (y down); inside is negative.

    Exact along straight edges; near the corners of a square it is the largest coordinate's.
    """
    if shape == "circle":
        return torch.hypot(x, y) - 1
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - _SQUARE
    if shape == "triangle":
        return torch.maximum(y, x.abs() * math.sqrt(0.75) - y / 2) - _TRIANGLE
    if shape == "cross":
        wide = torch.maximum(x.abs() - 1, y.abs() - _ARM)
        tall = torch.maximum(x.abs() - _ARM, y.abs() - 1)
        return torch.minimum(wide, tall)
    raise RolloutParamsError(
        f"distance: no such shape; got {shape!r}; pass one of {', '.join(SHAPES)}"
    )


def draw(
    shape: str, color: str, background: str, *, size: int, generator: torch.Generator
) -> Float[Tensor, "3 size size"]:
    """A picture of this scene in 0..1, antialiased, at a random place and of a random size.

    The shape stays clear of the border by a sixteenth of the picture or more.
    """
    x, y, r = torch.rand(3, generator=generator).tolist()
    center_x, center_y = 0.5 + 0.16 * (x - 0.5), 0.5 + 0.16 * (y - 0.5)
    radius = 0.22 + 0.1 * r
    at = (torch.arange(size) + 0.5) / size
    grid_y, grid_x = torch.meshgrid(
        (at - center_y) / radius, (at - center_x) / radius, indexing="ij"
    )
    coverage = (0.5 - distance(shape, grid_x, grid_y) * radius * size).clamp(0, 1)
    front = torch.tensor(PALETTE[color]).view(3, 1, 1)
    back = torch.tensor(PALETTE[background]).view(3, 1, 1)
    return back + (front - back) * coverage


def _scenes(*, held_out: bool) -> Iterator[Scene]:
    """One scene in seven is held out, such that each of its pairs is still seen in training."""
    for s, shape in enumerate(SHAPES):
        for c, color in enumerate(PALETTE):
            for b, background in enumerate(PALETTE):
                if c != b and ((2 * s + c + 3 * b) % 7 == 0) == held_out:
                    yield Scene(shape, color, background)


TRAIN_PROMPTS: tuple[str, ...] = tuple(prompt(*scene) for scene in _scenes(held_out=False))
HELD_OUT_PROMPTS: tuple[str, ...] = tuple(prompt(*scene) for scene in _scenes(held_out=True))
