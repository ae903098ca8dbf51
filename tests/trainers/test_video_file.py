"""What is written is read back: pictures, frame rate, sound, and its rate."""

import math
import sys
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from torch import Tensor

from miles_rollout import Media
from trainers.video_file import VideoFileError, require_av, write_video

FRAMES, HEIGHT, WIDTH = 25, 48, 64


def _ramp(height: int = HEIGHT, width: int = WIDTH) -> Tensor:
    """Frame i is i / 25 red, green on the left half and never blue."""
    video = torch.zeros(FRAMES, 3, height, width)
    video[:, 0] = (torch.arange(FRAMES) / FRAMES)[:, None, None]
    video[:, 1, :, : width // 2] = 0.8
    return video


def _tones(rate: int, seconds: float, *hertz: float) -> Tensor:
    time = torch.arange(round(rate * seconds)) / rate
    return torch.stack([0.5 * torch.sin(2 * math.pi * h * time) for h in hertz])


def _read(path: Path) -> dict[str, Any]:
    with av.open(str(path)) as container:
        (video,) = container.streams.video
        sound = container.streams.audio
        read: dict[str, Any] = {"rate": video.average_rate, "codec": video.codec_context.name}
        frames = [torch.from_numpy(f.to_ndarray(format="rgb24")) for f in container.decode(video)]
        read["frames"] = torch.stack(frames).permute(0, 3, 1, 2).float() / 255
        read["audio"] = None
    if sound:
        with av.open(str(path)) as container:
            (stream,) = container.streams.audio
            read["sampling_rate"] = stream.rate
            read["audio_codec"] = stream.codec_context.name
            read["seconds"] = float(stream.duration * stream.time_base)
            parts = [torch.from_numpy(f.to_ndarray()) for f in container.decode(stream)]
            read["audio"] = torch.cat(parts, dim=1)
    return read


def _pitch(samples: Tensor, rate: int) -> float:
    spectrum = torch.fft.rfft(samples.double()).abs()
    return spectrum.argmax().item() * rate / len(samples)


@pytest.mark.parametrize("rate", [24000, 32000, 48000])
def test_pictures_and_sound_come_back(tmp_path: Path, rate: int) -> None:
    # Longer than the pictures, which take 1.04 s, as a vocoder's grid makes it.
    audio = _tones(rate, 1.1, 440, 1320)
    media = Media(video=_ramp(), fps=24, audio=audio, sampling_rate=rate)
    path = write_video(tmp_path / "new" / "a.mp4", media)
    assert [p.name for p in path.parent.iterdir()] == ["a.mp4"]
    read = _read(path)
    assert (read["codec"], read["audio_codec"]) == ("h264", "aac")
    assert read["rate"] == 24
    assert read["frames"].shape == (FRAMES, 3, HEIGHT, WIDTH)
    # One by one, so that a frame that is lost, doubled or out of order is seen.
    inner = read["frames"][:, :, 8:-8, 8 : WIDTH // 2 - 8].mean((2, 3))
    wanted = _ramp()[:, :, 8:-8, 8 : WIDTH // 2 - 8].mean((2, 3))
    assert (inner - wanted).abs().max() < 0.02
    assert (read["frames"][:, 1, 8:-8, WIDTH // 2 + 8 :]).abs().max() < 0.05
    assert read["sampling_rate"] == rate
    assert read["seconds"] == pytest.approx(1.1, abs=2048 / rate)
    assert len(read["audio"]) == 2
    for channel, pitch in zip(read["audio"], (440, 1320), strict=True):
        middle = channel[rate // 4 : rate // 4 + rate // 2]
        assert _pitch(middle, rate) == pytest.approx(pitch, abs=5)
        assert middle.abs().max() == pytest.approx(0.5, abs=0.05)


def test_a_frame_rate_need_not_be_whole(tmp_path: Path) -> None:
    for fps in (12.5, 30000 / 1001):
        read = _read(write_video(tmp_path / "a.mp4", Media(video=_ramp(), fps=fps)))
        assert float(read["rate"]) == pytest.approx(fps, rel=1e-4)
        assert len(read["frames"]) == FRAMES
        assert read["audio"] is None


def test_odd_sides_and_one_channel_are_taken(tmp_path: Path) -> None:
    audio = _tones(16000, 1.0, 700)
    media = Media(video=_ramp(33, 47), fps=25, audio=audio, sampling_rate=16000)
    read = _read(write_video(tmp_path / "a.mp4", media))
    assert read["frames"].shape == (FRAMES, 3, 34, 48)
    assert len(read["audio"]) == 1
    assert _pitch(read["audio"][0][4000:12000], 16000) == pytest.approx(700, abs=5)


def test_values_out_of_range_are_clipped_and_nan_is_black_and_silent(tmp_path: Path) -> None:
    video = torch.full((FRAMES, 3, 32, 32), 7.0)
    video[:, :, :16] = math.nan
    audio = 20 * _tones(16000, 1.0, 440, 440)  # clipped, a square wave
    audio[1] = math.nan
    media = Media(video=video, fps=25, audio=audio, sampling_rate=16000)
    read = _read(write_video(tmp_path / "a.mp4", media))
    assert read["frames"][:, :, 20:].min() > 0.97
    assert read["frames"][:, :, :12].max() < 0.03
    assert 0.85 < read["audio"][0][4000:12000].abs().mean() < 1.05
    assert read["audio"][1].abs().max() < 0.01


def test_bfloat16_media_with_gradients_are_taken(tmp_path: Path) -> None:
    video = _ramp().to(torch.bfloat16).requires_grad_()
    assert len(_read(write_video(tmp_path / "a.mp4", Media(video=video, fps=24)))["frames"]) == 25


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ({"image": torch.zeros(3, 8, 8)}, "these media hold none; got an image; write it as a pic"),
        (
            {"video": _ramp(), "fps": 24, "audio": torch.zeros(2, 9), "sampling_rate": 31000},
            "AAC has no such sampling rate; got 31000; resample to one of 7350, 8000",
        ),
        (
            {"video": _ramp(), "fps": 24, "audio": torch.zeros(6, 9), "sampling_rate": 48000},
            r"sound has one channel or two; got \(6, 9\); pass \[channels, samples\]",
        ),
        (
            {"video": _ramp(), "fps": 24, "audio": torch.zeros(2, 0), "sampling_rate": 48000},
            r"sound has one channel or two; got \(2, 0\)",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_before_a_file_is_there(
    tmp_path: Path, media: dict[str, Any], message: str
) -> None:
    with pytest.raises(VideoFileError, match=message):
        write_video(tmp_path / "a.mp4", Media(**media))
    assert not list(tmp_path.iterdir())


def test_a_missing_pyav_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(VideoFileError, match=r"needs PyAV, .*; got .*; install it: pip install av"):
        require_av()
