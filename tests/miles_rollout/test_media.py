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


def test_alpha_is_laid_over_white():
    image = torch.tensor([0.2, 0.4, 0.6, 0.25]).view(4, 1, 1)
    expected = torch.tensor([0.8, 0.85, 0.9]).view(3, 1, 1)
    torch.testing.assert_close(Media(image=image).rgb, expected)
    for plain in (image[:3], image[:1]):
        assert Media(image=plain).rgb is plain
    assert Media(video=torch.zeros(2, 3, 4, 4), fps=24).rgb is None


def test_every_tensor_moves():
    made = Media(
        video=torch.zeros(2, 3, 4, 4), fps=24, audio=torch.zeros(1, 8), sampling_rate=8,
        action=torch.zeros(2, 9),
    ).to("meta")  # fmt: skip
    assert {t.device.type for t in (made.video, made.audio, made.action)} == {"meta"}
    assert made.image is None
    assert made.fps == 24
