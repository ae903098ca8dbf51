import pytest
import torch

from miles_rollout import Media
from trainers.rewards.pixels import evenly_spaced, mean_per_sample, pictures, to_bytes


def test_values_are_rounded_and_clamped_and_channels_come_last():
    image = torch.tensor([0.0, 0.4 / 255, 0.6 / 255, 1.0, 1.2, -0.1, 254.5 / 255, 0.5])
    found = to_bytes(image.expand(3, 1, -1) * torch.tensor([1.0, 0.0, 1.0]).reshape(3, 1, 1))
    assert found.shape == (1, 8, 3)
    assert found[0, :, 0].tolist() == [0, 0, 1, 255, 255, 0, 254, 128]
    assert found[0, :, 1].tolist() == [0] * 8
    assert found.flags.c_contiguous


def test_grey_becomes_three_equal_channels():
    assert to_bytes(torch.full((1, 2, 2), 0.2)).tolist() == [[[51] * 3] * 2] * 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_picture_that_is_not_finite_is_refused(value):
    image = torch.zeros(3, 2, 2)
    image[1, 1, 1] = value
    with pytest.raises(ValueError, match="the picture holds NaN or infinity"):
        to_bytes(image)


@pytest.mark.parametrize(
    ("size", "count", "wanted"),
    [
        (5, 1, [0]),
        (5, 2, [0, 4]),
        (5, 3, [0, 2, 4]),
        (5, 5, [0, 1, 2, 3, 4]),
        (81, 4, [0, 27, 53, 80]),
    ],
)
def test_spacing(size, count, wanted):
    assert evenly_spaced(size, count) == wanted


def test_pictures_belong_to_their_samples():
    levels = torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8]).reshape(5, 1, 1, 1)
    film = Media(video=levels.expand(5, 3, 2, 2), fps=8)
    see_through = Media(image=torch.tensor([0.0, 0.0, 0.0, 0.0]).reshape(4, 1, 1))
    found, owners = pictures([film, see_through, film], 3)
    assert [picture[0, 0, 0] for picture in found] == [0, 102, 204, 255, 0, 102, 204]
    assert owners.tolist() == [0, 0, 0, 1, 2, 2, 2]
    means = mean_per_sample(torch.tensor([1.0, 2, 6, 7, 0, 0, 0]), owners, 3)
    assert means.tolist() == [3.0, 7.0, 0.0]
    assert means.dtype == torch.float64
