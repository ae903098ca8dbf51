"""Paired timing: A and B in turn, the ratio pair by pair, so that a drifting machine cancels out."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ratio:
    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return (
            f"{self.median:.3f} (quartiles {self.low:.3f} to {self.high:.3f}, {self.pairs} pairs)"
        )


Clock = Callable[[], float]
"""``time.perf_counter``, or ``time.process_time`` where other processes share the cores."""


def seconds(call: Callable[[], Any], clock: Clock = time.perf_counter) -> float:
    started = clock()
    call()
    return clock() - started


def paired(
    subject: Callable[[], Any],
    baseline: Callable[[], Any],
    pairs: int,
    clock: Clock = time.perf_counter,
) -> Ratio:
    """Time of ``subject`` over that of ``baseline``; which goes first alternates."""
    for warm_up in (subject, baseline):
        warm_up()
    ratios = []
    for i in range(pairs):
        gc.collect()
        if i % 2:
            base = seconds(baseline, clock)
            ratios.append(seconds(subject, clock) / base)
        else:
            own = seconds(subject, clock)
            ratios.append(own / seconds(baseline, clock))
    quartiles = statistics.quantiles(ratios, n=4)
    return Ratio(statistics.median(ratios), quartiles[0], quartiles[2], pairs)
