"""Media survive JSON and files; what is none is refused and runs no code."""

import base64
import json
import math

import pytest
import torch

from miles_rollout import Media
from trainers.config_loader import ConfigError
from trainers.rewards.media_files import read_media
from trainers.rewards.media_json import MediaJsonError, decode_media, encode_media
from trainers.video_file import write_video


def picture():
    return torch.randint(0, 256, (3, 12, 8), generator=torch.Generator().manual_seed(0)) / 255


def film(seconds=0.5, rate=16000):
    steps = torch.arange(int(seconds * rate)) / rate
    tone = 0.5 * torch.sin(2 * math.pi * 440 * steps)
    ramp = torch.linspace(0, 1, 12).view(12, 1, 1, 1).expand(12, 3, 32, 32).contiguous()
    return Media(video=ramp, fps=24, audio=torch.stack([tone, -tone]), sampling_rate=rate)


def test_a_picture_is_the_same_to_eight_bits():
    again = decode_media(json.loads(json.dumps(encode_media(Media(image=picture())))))
    assert torch.equal(again.image, picture())


def test_a_grey_picture_keeps_its_one_channel():
    again = decode_media(encode_media(Media(image=picture()[:1])))
    assert torch.equal(again.image, picture()[:1])


def test_a_video_keeps_frames_rates_and_sound():
    film_ = film()
    again = decode_media(json.loads(json.dumps(encode_media(film_))))
    assert again.video.shape == film_.video.shape
    assert (again.video - film_.video).abs().max() < 0.03
    assert (again.fps, again.sampling_rate) == (24, 16000)
    torch.testing.assert_close(again.audio, film_.audio, atol=1 / 32767, rtol=0)


def test_a_silent_video_stays_silent():
    again = decode_media(encode_media(Media(video=film().video, fps=12.5)))
    assert (again.audio, again.fps) == (None, 12.5)


def test_values_out_of_range_are_clipped_as_a_picture_does():
    again = decode_media(encode_media(Media(image=torch.tensor([-1.0, 2.0]).expand(3, 1, 2))))
    assert again.image[0].tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({}, "needs an image or a video and not both; got \\[\\]"),
        ({"image": "", "video": ""}, "not both"),
        ({"image": 3}, "media are base64 strings; got int"),
        ({"image": "%%"}, "not base64"),
        ({"image": base64.b64encode(b"GIF89a").decode()}, "cannot be read: UnidentifiedImageError"),
        ({"video": "AAAA"}, "a video needs its frame rate; got fps None"),
        ({"video": "AAAA", "fps": 0}, "got fps 0"),
        ({"video": "AAAA", "fps": True}, "got fps True"),
        ({"video": "AAAA", "fps": 24}, "cannot be read: InvalidDataError"),
        ({"video": "AAAA", "fps": 24, "audio": "AAAA"}, "cannot be read: (EOFError|Error)"),
    ],
)
def test_what_is_no_medium_is_refused(item, message):
    with pytest.raises(MediaJsonError, match=message):
        decode_media(item)


def test_files_are_read_as_they_were_written(tmp_path):
    path = write_video(tmp_path / "a.mp4", film(seconds=1.0))
    again = read_media(path)
    assert again.video.shape == (12, 3, 32, 32)
    assert (again.video - film().video).abs().max() < 0.03
    assert (again.fps, again.sampling_rate) == (24, 16000)
    loudness = again.audio[:, 2048:12000].square().mean().sqrt()
    assert loudness.item() == pytest.approx(0.5 / math.sqrt(2), rel=0.05)


@pytest.mark.parametrize("name", ["a.png", "a.mp4"])
def test_a_file_that_is_none_is_one_line(tmp_path, name):
    (tmp_path / name).write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=f"{name}: cannot be read; got .*; remove or replace it"):
        read_media(tmp_path / name)
