"""Engines that are used by one thread each, and that a call which hangs takes with it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")


class Engines:
    """``count`` engines that ``make`` builds; each call of `map` works with as many.

    A call that does not return, since an engine hangs in native code, can be left behind in its thread:
    all threads are daemons, so none keeps the process from its end, and what is stuck there is
    no part of later calls, for which engines are made anew.
    """

    def __init__(self, make: Callable[[], Any], count: int) -> None:
        self.count = count
        self._make = make
        self._lock = threading.Lock()
        self._idle = [make() for _ in range(count)]

    def map(self, work: Callable[[Any, Item], Any], items: Sequence[Item]) -> list[Any]:
        """``work(engine, item)`` of each item, in order. Raises what the first that failed raised."""
        jobs: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()
        for job in enumerate(items):
            jobs.put(job)
        done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        failed = threading.Event()

        def run() -> None:
            while not failed.is_set():
                try:
                    index, item = jobs.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((index, self._with_engine(work, item), None))
                except BaseException as error:  # any: it is raised again in the caller's thread
                    failed.set()
                    done.put((index, None, error))

        for _ in range(min(self.count, len(items))):
            threading.Thread(target=run, name="engine", daemon=True).start()
        results: list[Any] = [None] * len(items)
        for _ in items:
            index, result, error = done.get()
            if error is not None:
                raise error
            results[index] = result
        return results

    def _with_engine(self, work: Callable[[Any, Item], Any], item: Item) -> Any:
        with self._lock:
            engine = self._idle.pop() if self._idle else None
        engine = (
            self._make() if engine is None else engine
        )  # the others are stuck, or still at work
        try:
            return work(engine, item)
        finally:
            with self._lock:
                if len(self._idle) < self.count:  # else it has been replaced
                    self._idle.append(engine)
