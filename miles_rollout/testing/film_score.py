"""How well a film shows its prompt: two scores in 0..1 from the media alone, without a model."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_rollout.errors import RolloutParamsError
from miles_rollout.shapes import Float
from miles_rollout.testing import films
from miles_rollout.testing.shapes import PALETTE

_COLOR_TOLERANCE = 0.3  # RGB distance at which a pixel's score has fallen to 1/e
_LOUDNESS_TOLERANCE = 0.2  # the same for the loudness of a window; "soft" is 0.45, "loud" is 1
_WINDOW_S = 0.25  # long enough for many periods of a tone, short enough to follow a rise


def color_score(video: Float[Tensor, "frames 3 height width"], theme: films.Theme) -> float:
    """Mean over all pixels of all frames of ``exp(-(distance / 0.3) ** 2)`` to the named colour."""
    color = torch.tensor(PALETTE[theme.color]).view(3, 1, 1)
    distance = (video.detach().float().cpu() - color).square().sum(1)
    return float(torch.exp(-distance / _COLOR_TOLERANCE**2).mean())


def loudness_score(
    audio: Float[Tensor, "channels samples"], sampling_rate: int, theme: films.Theme
) -> float:
    """Mean over windows of 0.25 s of ``exp(-(difference / 0.2) ** 2)`` to the named loudness.

    Too loud costs as much as too soft. Raises ``RolloutParamsError`` for less than one window.
    """
    heard = window_loudness(audio, sampling_rate)
    first, last = films.SOUNDS[theme.sound]
    time = (torch.arange(len(heard)) + 0.5) / len(heard)
    asked = first + (last - first) * time
    return float(torch.exp(-(((heard - asked) / _LOUDNESS_TOLERANCE) ** 2)).mean())


def window_loudness(
    audio: Float[Tensor, "channels samples"], sampling_rate: int
) -> Float[Tensor, " windows"]:
    """The loudness of each whole window of 0.25 s, from the power of all channels."""
    length = round(_WINDOW_S * sampling_rate)
    if length < 1 or audio.shape[1] < length:
        raise RolloutParamsError(
            f"loudness_score: the sound is shorter than one window; got {audio.shape[1]} samples "
            f"at {sampling_rate} Hz; pass {_WINDOW_S:g} s or more"
        )
    audio = audio.detach().float().cpu()
    whole = audio[:, : audio.shape[1] // length * length]
    rms = whole.reshape(len(audio), -1, length).square().mean((0, 2)).sqrt()
    return (rms / films.LOUD_RMS) ** films.LOUDNESS_EXPONENT
