"""DNSMOS, against numbers that its own package computed (speechmos 0.0.1.1 with librosa 0.11)."""

import re

import numpy as np
import pytest
import soxr
import torch

import trainers.rewards.speech_quality
from miles_rollout import Media
from trainers.config_loader import ConfigError
from trainers.rewards import build_reward

RATE = 16000


def voice(seconds: float, rate: int = RATE) -> np.ndarray:
    """Syllables of a rising voice."""
    t = np.arange(int(seconds * rate)) / rate
    loud = np.clip(np.sin(2 * np.pi * (1.5 + 0.05 * t) * t), 0, 1)
    tones = sum(np.sin(2 * np.pi * (120 + 4 * t) * k * t) / k for k in range(1, 12))
    return (0.2 * loud * tones / 2).astype(np.float32)


def noisy(seconds: float) -> np.ndarray:
    noise = np.random.default_rng(0).standard_normal(int(seconds * RATE))
    return (voice(seconds) + 0.05 * noise).astype(np.float32)


@pytest.fixture(name="reward", scope="module")
def _reward():
    return build_reward("speech_quality", {})


def film(sound: np.ndarray, rate: int = RATE) -> Media:
    audio = torch.from_numpy(np.atleast_2d(sound))
    return Media(video=torch.zeros(1, 3, 4, 4), fps=8, audio=audio, sampling_rate=rate)


def score(reward, *media):
    return reward(media, [""] * len(media), [{}] * len(media))


@pytest.mark.parametrize(
    ("sound", "total", "signal", "background"),
    [
        (voice(3.0), 1.84063, 2.13341, 3.50123),
        (voice(12.2), 1.78438, 2.06919, 3.67213),
        (noisy(9.5), 1.08258, 1.18989, 1.13486),
        (np.zeros(10 * RATE, np.float32), 1.83986, 2.51356, 3.47242),
    ],
    ids=["short", "long", "noisy", "silence"],
)
def test_the_opinions_are_those_of_the_package(reward, sound, total, signal, background):
    found = score(reward, film(sound))
    wanted = {"total": [total], "signal": [signal], "background": [background]}
    assert found == {name: pytest.approx(value, abs=1e-4) for name, value in wanted.items()}


def test_channels_are_averaged_and_the_rate_is_the_models(reward):
    sound = voice(9.1, 48000)
    stereo = np.stack([sound * 1.5, sound * 0.5])
    resampled = soxr.resample(sound, 48000, RATE)
    found = score(reward, film(stereo, 48000), film(resampled), film(stereo[:1], 48000))["total"]
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert abs(found[0] - found[2]) > 0.01


def test_a_sample_without_sound_is_told(reward):
    with pytest.raises(
        ValueError, match="speech_quality: listens to the sound of a video; got an im"
    ):
        score(reward, Media(image=torch.zeros(3, 4, 4)))


def test_a_missing_package_is_told(monkeypatch):
    module = trainers.rewards.speech_quality.importlib.util
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    message = (
        "reward 'speech_quality': needs the model in the package speechmos; got none; pip install"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_reward("speech_quality", {})
