"""Samples for the eye and the ear: a contact sheet, and a file for each video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from miles_rollout import Media
from miles_rollout.shapes import Float
from trainers.image_grid import save_grid
from trainers.video_file import write_video


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A picture or a video with what it was made from and what it earned."""

    media: Media
    prompt: str
    """Shown up to its 160th character."""
    reward: float | None = None
    """Shown behind the prompt, if there is one."""

    @property
    def caption(self) -> str:
        """``prompt | reward``."""
        reward = "" if self.reward is None else f" | {self.reward:.4f}"
        return self.prompt[:160] + reward

    @property
    def picture(self) -> Float[Tensor, "3 height width"]:
        """The image, one with alpha over white; or the frame in the middle of a video."""
        if self.media.video is not None:
            return self.media.video[len(self.media.video) // 2]
        assert self.media.rgb is not None
        return self.media.rgb


def samples_of(
    media: Sequence[Media], prompts: Sequence[str], rewards: Sequence[float]
) -> list[Sample]:
    """One a medium."""
    return [
        Sample(media=m, prompt=p, reward=r) for m, p, r in zip(media, prompts, rewards, strict=True)
    ]


def save_samples(
    folder: Path, name: str, samples: Sequence[Sample], captions: Sequence[str] | None = None
) -> list[Path | None]:
    """Write ``name.png``, a contact sheet of all, and ``name_00.mp4`` for each that is a video.

    Returns the path of each sample's video, None for a picture. ``captions``: others than the
    samples' own.
    """
    shown = [sample.caption for sample in samples] if captions is None else captions
    save_grid(folder / f"{name}.png", [sample.picture for sample in samples], shown)
    paths: list[Path | None] = []
    for number, sample in enumerate(samples):
        path = folder / f"{name}_{number:02d}.mp4"
        paths.append(None if sample.media.video is None else write_video(path, sample.media))
    return paths
