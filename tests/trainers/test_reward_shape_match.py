"""The reward tells true renders from wrong ones, and grades what lies between."""

import pytest
import torch
from torch import Tensor

from miles_rollout import Media
from miles_rollout.testing import shapes
from trainers.rewards.shape_match import shape_match

PROMPTS = [*shapes.TRAIN_PROMPTS, *shapes.HELD_OUT_PROMPTS][::3]
RED_CIRCLE = "a red circle on a blue background"


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def renders(prompts: list[str], size: int = 32) -> list[Tensor]:
    random = generator()
    return [shapes.draw(*shapes.parse_prompt(p), size=size, generator=random) for p in prompts]


def scores(images: list[Tensor], prompts: list[str]) -> Tensor:
    media = [Media(image=image) for image in images]
    return torch.tensor(shape_match(media, prompts, [{}] * len(prompts)))


@pytest.mark.parametrize("size", [24, 32, 100])
def test_true_renders_score_high(size):
    result = scores(renders(PROMPTS, size), PROMPTS)
    assert result.mean() > 0.95
    assert result.min() > 0.85
    assert result.max() <= 1


def test_renders_with_shuffled_prompts_score_low():
    order = torch.randperm(len(PROMPTS), generator=generator()).tolist()
    assert scores(renders(PROMPTS), [PROMPTS[i] for i in order]).mean() < 0.05


@pytest.mark.parametrize(
    "shown",
    [
        "a yellow circle on a blue background",
        "a red circle on a green background",
        "a red square on a blue background",
        "a red triangle on a blue background",
        "a blue circle on a red background",
    ],
)
def test_one_wrong_word_scores_low(shown):
    assert scores(renders([shown] * 4), [RED_CIRCLE] * 4).max() < 0.3


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (32, 32), (48, 96)])
def test_noise_and_blank_pictures_score_near_zero(size):
    noise = [torch.rand(3, *size, generator=generator()) for _ in range(4)]
    blank = [torch.tensor(c).view(3, 1, 1).expand(3, *size) for c in shapes.PALETTE.values()]
    images = [*noise, *blank]
    assert scores(images, [RED_CIRCLE] * len(images)).max() < 0.02


def test_a_picture_need_not_be_square():
    image = renders([RED_CIRCLE], 64)[0]
    wide = torch.cat([image, image[:, :, :1].expand(3, 64, 32)], dim=2)
    assert scores([wide], [RED_CIRCLE]) > 0.85


def test_the_score_falls_as_the_picture_fades_into_noise():
    image = renders([RED_CIRCLE])[0]
    noise = torch.rand(image.shape, generator=generator())
    faded = [torch.lerp(image, noise, amount) for amount in (0.0, 0.1, 0.2, 0.3)]
    result = scores(faded, [RED_CIRCLE] * 4).tolist()
    assert result == sorted(result, reverse=True)
    assert len(set(result)) == 4


def test_a_wrong_border_and_a_second_shape_cost():
    image = renders([RED_CIRCLE])[0]
    framed, doubled = image.clone(), image.clone()
    red = torch.tensor(shapes.PALETTE["red"]).view(3, 1, 1)
    for edge in (framed[:, :3], framed[:, -3:], framed[:, :, :3], framed[:, :, -3:]):
        edge.copy_(red.expand_as(edge))
    doubled[:, :8, :8] = red
    whole, *spoiled = scores([image, framed, doubled], [RED_CIRCLE] * 3).tolist()
    assert max(spoiled) < whole - 0.15


def test_a_dot_scores_less_than_a_drawing():
    image = torch.tensor(shapes.PALETTE["blue"]).view(3, 1, 1).repeat(1, 32, 32)
    image[:, 13:18, 13:18] = torch.tensor(shapes.PALETTE["red"]).view(3, 1, 1)
    assert scores([image], ["a red square on a blue background"]) < 0.5


def test_a_prompt_that_names_no_scene_is_refused():
    with pytest.raises(ValueError, match="names no scene; got 'a cat'; write"):
        scores(renders([RED_CIRCLE]), ["a cat"])


def test_a_video_is_refused():
    video = Media(video=torch.zeros(2, 3, 8, 8), fps=8.0)
    with pytest.raises(ValueError, match="images only; got a video; set another reward"):
        shape_match([video], [RED_CIRCLE], [{}])
