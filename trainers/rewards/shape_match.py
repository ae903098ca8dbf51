"""Reward: does the picture show the shape and the two colours that the prompt names?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_rollout import Media
from miles_rollout.errors import RolloutParamsError
from miles_rollout.testing.shape_score import score
from miles_rollout.testing.shapes import parse_prompt
from trainers.rewards.prompt_check import with_prompt_check


@with_prompt_check(lambda prompt, _: parse_prompt(prompt))
def shape_match(
    media: Sequence[Media], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Scores in 0..1, one a picture, from pixels alone; ``metadata`` is not looked at.

    Raises ``RolloutParamsError`` for a prompt that is not of the form of
    ``miles_rollout.testing.shapes.prompt``, and for media without an image.
    """
    return [_score(item, prompt) for item, prompt in zip(media, prompts, strict=True)]


def _score(media: Media, prompt: str) -> float:
    if media.rgb is None:
        raise RolloutParamsError(
            "shape_match: looks at images only; got a video; set another reward for this pipeline"
        )
    return score(media.rgb, parse_prompt(prompt))
