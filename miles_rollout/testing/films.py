"""Coloured pictures with a loudness, and the prompts that name both: a world for text to video.

A film is a colour that fills the frame, a little brighter to one side, and a tone whose loudness
stays, rises or fades. Both are functions of time, so that the media of any size and their latents
are samples of the same film.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles_rollout.errors import RolloutParamsError
from miles_rollout.shapes import Float, Int
from miles_rollout.testing.shapes import PALETTE

SOUNDS: dict[str, tuple[float, float]] = {
    "no": (0.0, 0.0),
    "soft": (0.45, 0.45),
    "loud": (1.0, 1.0),
    "rising": (0.0, 1.0),
    "fading": (1.0, 0.0),
}
"""Loudness at the start and at the end; it changes evenly in between."""

LOUD_RMS = 0.25
"""Root mean square of a tone of loudness 1, a quarter of full scale."""

LOUDNESS_EXPONENT = 0.6
"""Loudness is ``(rms / LOUD_RMS) ** 0.6``: twice as loud is 10 dB more (S. S. Stevens, 1955)."""

TONES = (400.0, 1200.0)
"""Hz. Multiples of 40, H3's audio latents a second: each latent holds the same whole periods."""

_SHADE = 0.05  # how much brighter or darker the picture's edges are than its middle
_PROMPT = re.compile(rf"a ({'|'.join(PALETTE)}) picture with ({'|'.join(SOUNDS)}) sound")


class Theme(NamedTuple):
    """What a prompt asks for."""

    color: str
    sound: str


class Film(NamedTuple):
    """What is shown and heard."""

    color: tuple[float, float, float]
    """RGB in 0..1 of the middle of the picture."""
    light: float
    """Direction in radians from which the picture is lit at the start."""
    loudness: tuple[float, float]
    """At the start and at the end."""
    timbre: float
    """In -1..1: from the lower of ``TONES`` alone to the higher one alone."""


def prompt(color: str, sound: str) -> str:
    """The sentence that names this theme."""
    return f"a {color} picture with {sound} sound"


def parse_prompt(text: str) -> Theme:
    """The theme that ``text`` names: the inverse of ``prompt``.

    Raises ``RolloutParamsError`` for any other sentence.
    """
    match = _PROMPT.fullmatch(text.strip())
    if match is None:
        raise RolloutParamsError(
            f"parse_prompt: the prompt names no film; got {text!r}; write 'a COLOR picture with "
            f"SOUND sound' with a colour of {', '.join(PALETTE)} and a sound of "
            f"{', '.join(SOUNDS)}"
        )
    return Theme(color=match[1], sound=match[2])


def named(theme: Theme, generator: torch.Generator) -> Film:
    """A film that shows the theme exactly; light and timbre are at random."""
    light, timbre = torch.rand(2, generator=generator).tolist()
    return Film(
        color=PALETTE[theme.color],
        light=2 * math.pi * light,
        loudness=SOUNDS[theme.sound],
        timbre=2 * timbre - 1,
    )


def loose(theme: Theme, generator: torch.Generator) -> Film:
    """A film whose prompt is half right, as captions are: mixed with another colour and loudness.

    The two shares of the other are drawn apart, more often small than large.
    """
    film = named(theme, generator)
    color = PALETTE[_another(PALETTE, theme.color, generator)]
    sound = SOUNDS[_another(SOUNDS, theme.sound, generator)]
    share = torch.rand(2, generator=generator).square()
    return film._replace(
        color=_mix(film.color, color, share[0]), loudness=_mix(film.loudness, sound, share[1])
    )


def _another(names: Iterable[str], name: str, generator: torch.Generator) -> str:
    others = [other for other in names if other != name]
    return others[int(torch.randint(len(others), (), generator=generator))]


def _mix(one: tuple[float, ...], other: tuple[float, ...], share: Float[Tensor, ""]) -> Any:
    return tuple(torch.lerp(torch.tensor(one), torch.tensor(other), share).tolist())


def colors(
    film: Film,
    time: Float[Tensor, " times"],
    y: Float[Tensor, " height"],
    x: Float[Tensor, " width"],
) -> Float[Tensor, "times 3 height width"]:
    """RGB in 0..1 at relative times in 0..1 and places in -1..1. The light turns by half a circle."""
    angle = film.light + math.pi * time.view(-1, 1, 1)
    shade = _SHADE * (angle.sin() * y.view(-1, 1) + angle.cos() * x.view(1, -1))
    color = torch.tensor(film.color).view(3, 1, 1)
    return (color + shade.unsqueeze(1)).clamp(0, 1)


def loudness(film: Film, time: Float[Tensor, " times"]) -> Float[Tensor, " times"]:
    """Loudness at relative times in 0..1; 0 is silence."""
    first, last = film.loudness
    return torch.lerp(torch.tensor(first), torch.tensor(last), time)


def draw_video(film: Film, *, frames: int, size: int) -> Float[Tensor, "frames 3 size size"]:
    """The pictures, in 0..1."""
    at = (torch.arange(size) + 0.5) / size * 2 - 1
    return colors(film, (torch.arange(frames) + 0.5) / frames, at, at)


def draw_audio(film: Film, *, samples: int, sampling_rate: int) -> Float[Tensor, "2 samples"]:
    """The soundtrack in -1..1, the same in both channels."""
    wave = tone(film, torch.arange(samples), samples, sampling_rate)
    return wave.expand(2, samples).clone()


def tone(
    film: Film, at: Int[Tensor, " excerpt"], samples: int, sampling_rate: int
) -> Float[Tensor, " excerpt"]:
    """These samples of a soundtrack of so many."""
    low, high = (torch.sin(2 * math.pi * pitch / sampling_rate * at) for pitch in TONES)
    angle = math.pi / 4 * (film.timbre + 1)
    level = loudness(film, (at + 0.5) / samples)
    peak = LOUD_RMS * math.sqrt(2) * level ** (1 / LOUDNESS_EXPONENT)
    return peak * (math.cos(angle) * low + math.sin(angle) * high)


def video_latents(film: Film) -> Float[Tensor, "3 37 2 2"]:
    """What the tiny H3 denoises for 124 frames: the colours at the middle of each latent's pixels.

    An H3 latent spans 1, 4, 4, 4, 4 frames in turn, and half of a side of 32 pixels.
    """
    spans = torch.tensor([1.0, 4.0, 4.0, 4.0, 4.0]).repeat(8)[:37]
    middle = (spans.cumsum(0) - spans / 2) / spans.sum()
    halves = torch.tensor([-0.5, 0.5])
    return colors(film, middle, halves, halves).movedim(1, 0)


def audio_latents(film: Film) -> Float[Tensor, "2 2 207"]:
    """Loudness and timbre, 40 a second, for each of the two channels of the sound."""
    level = loudness(film, (torch.arange(207) + 0.5) / 207)
    latents = torch.stack([level, torch.full_like(level, film.timbre)])
    return latents.expand(2, 2, 207).clone()


def _themes(*, held_out: bool) -> Iterator[Theme]:
    """One theme in five is held out: one sound of each colour."""
    for c, color in enumerate(PALETTE):
        for s, sound in enumerate(SOUNDS):
            if ((2 * c + s) % len(SOUNDS) == 0) == held_out:
                yield Theme(color, sound)


TRAIN_PROMPTS: tuple[str, ...] = tuple(prompt(*theme) for theme in _themes(held_out=False))
HELD_OUT_PROMPTS: tuple[str, ...] = tuple(prompt(*theme) for theme in _themes(held_out=True))
