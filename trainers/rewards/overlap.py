"""Scores batches as they come, beside whatever makes the next ones, in a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from miles_rollout.media import Media
from trainers.rewards.scores import ScoredParts, Scores

Batch = tuple[Sequence[Media], Sequence[str], Sequence[Mapping[str, Any]]]
"""Media, prompts and metadata of some samples."""


class Scoring:
    """The scores of samples that come in batches; used as a context, which ends its thread.

    With ``overlap`` a batch is scored, by one thread and in order, while the caller makes the next.
    Without, all are scored as one batch when the result is asked for. What a reward raises, or too
    many samples without a score, is raised in the caller's thread: at the next `add`, or at the end.
    A call that is running when the context is left goes on in its daemon thread, and is not heard.
    """

    def __init__(
        self, score_part: Callable[..., None], parts: ScoredParts, *, overlap: bool
    ) -> None:
        self.seconds = 0.0
        """How long rewards were at work, hidden or not."""
        self._score_part = score_part
        self._parts = parts
        self._failure: BaseException | None = None
        self._held: list[Batch] = []
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._stopped = False
        self._thread: threading.Thread | None = None
        if overlap:
            # The CUDA device is set per thread.
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._thread = threading.Thread(
                target=self._work, args=(device,), name="scoring", daemon=True
            )
            self._thread.start()

    def add(
        self,
        media: Sequence[Media],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> None:
        """The next samples. Raises what scoring earlier ones has raised."""
        self._raise()
        batch = (media, prompts, metadata)
        if self._thread is None:
            self._held.append(batch)
        else:
            self._queue.put(batch)

    def result(self) -> Scores:
        """The scores of all samples, in the order of the batches; waits for those still at work."""
        if self._thread is None:
            media = [item for batch in self._held for item in batch[0]]
            prompts = [item for batch in self._held for item in batch[1]]
            metadata = [item for batch in self._held for item in batch[2]]
            self._score((media, prompts, metadata))
        else:
            self._queue.put(None)
            self._thread.join()
            self._raise()
        assert self._parts.rows == self._parts.num_samples
        return self._parts.scores()

    def __enter__(self) -> Scoring:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped = True
        self._queue.put(None)

    def _work(self, device: int | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            while (batch := self._queue.get()) is not None and not self._stopped:
                self._score(batch)
        except BaseException as error:  # any: it is raised again in the caller's thread
            self._failure = error

    def _score(self, batch: Batch) -> None:
        started = time.perf_counter()
        try:
            self._score_part(self._parts, *batch)
        finally:
            self.seconds += time.perf_counter() - started

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure
