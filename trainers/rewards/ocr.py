"""Reward: does the picture show the text that the prompt quotes? (Flow-GRPO, arXiv 2505.05470)"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from miles_rollout import Media
from trainers.config_loader import ConfigError
from trainers.rewards.engines import Engines
from trainers.rewards.pixels import to_bytes
from trainers.rewards.pretrained import require

_QUOTED = re.compile(r'"([^"]*)"')
_EVERY_NTH_FRAME = 4


class Ocr:
    """1 - distance / length of the target, in 0..1, from a text recogniser that runs on the CPU.

    The target is ``target`` of the metadata, or else the text in the first pair of straight double
    quotes of the prompt. Target and recognised text are compared without white space and in lower case.
    The distance is that of Levenshtein, at most the target's length, and 0 if the target is a part
    of what was recognised. Of a video every fourth frame is read, a part is no hit, and the score is
    the mean over the frames with a score above 0, or 0 if there is none.

    The models are those of RapidOCR (PP-OCRv6), which are files of its package. ``workers`` pictures are
    read at once, each by an engine of its own with one thread: the scores do not depend on it.
    ``max_side`` is the longest side, in pixels, at which text is looked for; a picture is shrunk
    to it, never enlarged, and letters are read at full size. What the engine raises is raised. A
    call that is given up keeps the engines that are stuck in it; later calls get new ones.
    """

    def __init__(self, *, workers: int | None = None, max_side: int = 736) -> None:
        for name, value in (("workers", workers), ("max_side", max_side)):
            if value is not None and value < 1:
                raise ConfigError(
                    f"reward 'ocr': {name}: must be positive; got {value}; set 1 or more"
                )
        self._distance = require("ocr", "ocr", "rapidfuzz.distance").Levenshtein.distance
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self._engines = Engines(lambda: _engine(max_side), self.workers)
        self._try_out()

    @staticmethod
    def check_prompt(prompt: str, metadata: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if there is no text to look for."""
        target(prompt, metadata)

    def __call__(
        self,
        media: Sequence[Media],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        """One score a sample, in order."""
        targets = [target(p, m) for p, m in zip(prompts, metadata, strict=True)]
        jobs = [(i, picture) for i, item in enumerate(media) for picture in _pictures(item)]
        texts = self._engines.map(_read, [picture for _, picture in jobs])
        read: list[list[str]] = [[] for _ in media]
        for (i, _), text in zip(jobs, texts, strict=True):
            read[i].append(text)
        return [
            self._of_image(found[0], wanted)
            if item.video is None
            else self._of_video(found, wanted)
            for item, found, wanted in zip(media, read, targets, strict=True)
        ]

    def read(self, picture: np.ndarray) -> str:
        """All text in a picture, uint8 [height, width, 3], without white space and in lower case."""
        text: str = self._engines.map(_read, [picture])[0]
        return text

    def _try_out(self) -> None:
        """An engine reads its models at its first picture: better now than after a rollout."""
        word = Image.new("RGB", (64, 32), "white")
        ImageDraw.Draw(word).text((4, 8), "word", fill="black")
        try:
            self.read(np.asarray(word))
        except Exception as error:  # of any package below; told, not passed over
            raise ConfigError(
                f"reward 'ocr': its engine does not run; got {type(error).__name__}: {error}; repair "
                "the packages of pip install 'miles-rollout[ocr]'"
            ) from error

    def _of_image(self, text: str, wanted: str) -> float:
        return 1.0 if wanted in text else self._similarity(text, wanted)

    def _of_video(self, texts: Sequence[str], wanted: str) -> float:
        scores = [score for text in texts if (score := self._similarity(text, wanted)) > 0]
        return sum(scores) / len(scores) if scores else 0.0

    def _similarity(self, text: str, wanted: str) -> float:
        distance: int = self._distance(text, wanted)
        return 1 - min(distance, len(wanted)) / len(wanted)


def target(prompt: str, metadata: Mapping[str, Any]) -> str:
    """The text to look for, without white space and in lower case. Raises ``ValueError`` if there is none."""
    if "target" in metadata:
        wanted = metadata["target"]
        if not isinstance(wanted, str) or not _normal(wanted):
            raise ValueError(
                f"'target' holds no text to look for; got {wanted!r}; set a string, or leave it out"
            )
        return _normal(wanted)
    quoted = _QUOTED.search(prompt)
    if quoted is None or not _normal(quoted[1]):
        raise ValueError(
            f"the prompt quotes no text to look for; got {prompt[:80]!r}; put it in straight double "
            "quotes, or set 'target' in a .jsonl file"
        )
    return _normal(quoted[1])


def _normal(text: str) -> str:
    """As the public score has it, and alike for letters that Unicode writes in two ways."""
    return "".join(unicodedata.normalize("NFC", text).split()).lower()


def _read(engine: Any, picture: np.ndarray) -> str:
    # The engine's arrays are as OpenCV reads files: blue first.
    found = engine(np.ascontiguousarray(picture[:, :, ::-1]))
    lines = zip(found.txts or (), found.scores or (), strict=True)
    return _normal("".join(text for text, confidence in lines if confidence > 0))


def _pictures(media: Media) -> list[np.ndarray]:
    if media.video is not None:
        return [to_bytes(frame) for frame in media.video[::_EVERY_NTH_FRAME]]
    assert media.rgb is not None
    return [to_bytes(media.rgb)]


def _engine(max_side: int) -> Any:
    """One thread each: pools of their own in every worker slow each other down by a factor of ten."""
    rapidocr = require("ocr", "ocr", "rapidocr")
    return rapidocr.RapidOCR(
        params={
            "Global.text_score": 0.0,
            "Global.use_cls": False,  # as in Flow-GRPO: text upside down is not read
            "Global.log_level": "error",
            "Det.limit_type": "max",
            "Det.limit_side_len": max_side,
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )
