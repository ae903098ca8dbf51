"""Reward: does the film show the colour, and sound as loud, as the prompt names?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_rollout import Media
from miles_rollout.errors import RolloutParamsError
from miles_rollout.testing.film_score import color_score, loudness_score
from miles_rollout.testing.films import Theme, parse_prompt
from trainers.rewards.prompt_check import with_prompt_check


@with_prompt_check(lambda prompt, _: parse_prompt(prompt))
def colour_and_loudness(
    media: Sequence[Media], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> dict[str, list[float]]:
    """Components ``video`` and ``audio`` in 0..1, and ``total``, their mean, one a film.

    ``video`` compares every pixel with the named colour, ``audio`` the loudness in windows of
    0.25 s with the named one, by the sampling rate of the sound; ``metadata`` is not looked at.
    Raises ``RolloutParamsError`` for a prompt that is not of the form of
    ``miles_rollout.testing.films.prompt``, and for media without a video or without sound.
    """
    themes = [parse_prompt(prompt) for prompt in prompts]
    video = [_video(item, theme) for item, theme in zip(media, themes, strict=True)]
    audio = [_audio(item, theme) for item, theme in zip(media, themes, strict=True)]
    total = [(seen + heard) / 2 for seen, heard in zip(video, audio, strict=True)]
    return {"video": video, "audio": audio, "total": total}


def _video(media: Media, theme: Theme) -> float:
    if media.video is None:
        raise RolloutParamsError(
            "colour_and_loudness: looks at videos with sound; got an image; set another reward "
            "for this pipeline"
        )
    return color_score(media.video, theme)


def _audio(media: Media, theme: Theme) -> float:
    if media.audio is None or media.sampling_rate is None:
        raise RolloutParamsError(
            "colour_and_loudness: listens to the sound of a video; got a video without sound; set "
            "another reward for this pipeline"
        )
    return loudness_score(media.audio, media.sampling_rate, theme)
