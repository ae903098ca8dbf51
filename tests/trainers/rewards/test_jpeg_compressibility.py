from __future__ import annotations

import io

import pytest
import torch
from PIL import Image

from miles_rollout.media import Media
from trainers.rewards.jpeg_compressibility import jpeg_compressibility


def score(*media: Media) -> list[float]:
    return jpeg_compressibility(media, [""] * len(media), [{}] * len(media))


def noise(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def test_the_score_is_minus_kilobytes_over_500_at_quality_95():
    image = Image.new("RGB", (64, 48), (255, 0, 128))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95)
    pixels = torch.tensor([1.0, 0.0, 128 / 255]).reshape(3, 1, 1).expand(3, 48, 64)
    assert score(Media(image=pixels)) == [-buffer.tell() / 1000 / 500]


def test_a_flat_picture_scores_above_a_noisy_one():
    flat, noisy = score(Media(image=torch.zeros(3, 32, 32)), Media(image=noise(3, 32, 32)))
    assert -0.01 < noisy < flat < 0


def test_values_are_rounded_and_clamped_to_bytes():
    image = noise(3, 16, 16).mul(255).round() / 255
    assert score(Media(image=image + 0.4 / 255)) == score(Media(image=image))
    over = torch.full((3, 16, 16), 1.5)
    assert score(Media(image=over)) == score(Media(image=torch.ones(3, 16, 16)))


def test_a_video_is_the_mean_over_its_frames():
    frames = torch.stack([torch.zeros(3, 32, 32), noise(3, 32, 32)])
    singles = score(*(Media(image=frame) for frame in frames))
    assert score(Media(video=frames, fps=8.0)) == pytest.approx([sum(singles) / 2])


def test_grey_pictures_are_scored():
    assert score(Media(image=noise(1, 16, 16)))[0] < 0
