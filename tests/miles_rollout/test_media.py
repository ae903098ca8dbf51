import pytest
import torch

from miles_rollout import Media


def test_exactly_one_of_image_and_video():
    with pytest.raises(ValueError, match="needs an image or a video and not both"):
        Media()
    with pytest.raises(ValueError, match="pass exactly one"):
        Media(image=torch.zeros(3, 4, 4), video=torch.zeros(2, 3, 4, 4), fps=24)


def test_rates_come_with_their_medium():
    with pytest.raises(ValueError, match="a video needs its frame rate"):
        Media(video=torch.zeros(2, 3, 4, 4))
    with pytest.raises(ValueError, match="sound needs its sampling rate"):
        Media(image=torch.zeros(3, 4, 4), audio=torch.zeros(1, 8))
