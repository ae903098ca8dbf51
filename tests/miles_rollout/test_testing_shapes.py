"""The world of shapes: its prompts, its drawings, its lists."""

from pathlib import Path

import pytest
import torch

from miles_rollout.testing import shapes

PROMPT_FILES = Path(__file__).parents[2] / "configs" / "prompts"


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_parse_prompt_is_the_inverse_of_prompt():
    for text in (*shapes.TRAIN_PROMPTS, *shapes.HELD_OUT_PROMPTS):
        assert shapes.prompt(*shapes.parse_prompt(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "a photo of a cat",
        "a red circle",
        "a red blob on a blue background",
        "a red circle on a red background",
    ],
)
def test_a_prompt_that_names_no_scene_says_what_to_write(text):
    with pytest.raises(ValueError, match=r"names no scene; got .*; write 'a COLOR SHAPE on"):
        shapes.parse_prompt(text)


def test_the_lists_are_disjoint_and_cover_every_scene():
    colors, names = len(shapes.PALETTE), len(shapes.SHAPES)
    every = {*shapes.TRAIN_PROMPTS, *shapes.HELD_OUT_PROMPTS}
    assert len(every) == len(shapes.TRAIN_PROMPTS) + len(shapes.HELD_OUT_PROMPTS)
    assert len(every) == names * colors * (colors - 1)


def test_training_shows_every_pair_of_a_held_out_scene():
    train = [shapes.parse_prompt(text) for text in shapes.TRAIN_PROMPTS]
    for text in shapes.HELD_OUT_PROMPTS:
        shape, color, background = shapes.parse_prompt(text)
        assert any((s.shape, s.color) == (shape, color) for s in train)
        assert any((s.shape, s.background) == (shape, background) for s in train)
        assert any((s.color, s.background) == (color, background) for s in train)


@pytest.mark.parametrize(
    ("name", "prompts"),
    [("train", shapes.TRAIN_PROMPTS), ("eval", shapes.HELD_OUT_PROMPTS)],
)
def test_the_prompt_files_hold_the_lists(name, prompts):
    lines = (PROMPT_FILES / f"shapes_{name}.txt").read_text(encoding="ascii").splitlines()
    assert tuple(lines) == prompts


@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_a_drawing_has_its_background_on_the_border_and_its_color_in_the_middle(shape):
    image = shapes.draw(shape, "red", "cyan", size=48, generator=generator())
    assert image.shape == (3, 48, 48)
    assert image.dtype == torch.float32
    back = torch.tensor(shapes.PALETTE["cyan"]).view(3, 1)
    for edge in (image[:, :3], image[:, -3:], image[:, :, :3], image[:, :, -3:]):
        torch.testing.assert_close(edge.flatten(1), back.expand(3, 48 * 3))
    torch.testing.assert_close(image[:, 24, 24], torch.tensor(shapes.PALETTE["red"]))


@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_a_drawing_covers_the_area_of_its_shape(shape):
    size, radius = 200, 60
    at = (torch.arange(size) + 0.5 - size / 2) / radius
    y, x = torch.meshgrid(at, at, indexing="ij")
    area = (shapes.distance(shape, x, y) < 0).sum() / radius**2
    assert area == pytest.approx(shapes.AREAS[shape], rel=0.02)


def test_a_drawing_depends_on_the_generator_alone():
    first, again = (
        shapes.draw("cross", "red", "cyan", size=32, generator=generator()) for _ in range(2)
    )
    other = shapes.draw("cross", "red", "cyan", size=32, generator=generator(1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_unknown_shape_names_the_known_ones():
    with pytest.raises(ValueError, match="got 'blob'; pass one of circle, square"):
        shapes.draw("blob", "red", "cyan", size=32, generator=generator())
