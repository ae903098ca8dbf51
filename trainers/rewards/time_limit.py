"""Calls a function with a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


def call_within(timeout_s: float | int, function: Callable[[], Any]) -> Any:
    """What ``function`` returns or raises, or ``TimeoutError`` after ``timeout_s``.

    It runs without gradients in a daemon thread, on the caller's CUDA device: both are set per
    thread. A call that ran out of time is abandoned there, since Python cannot end a thread.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            with torch.no_grad():
                if device is not None:
                    torch.cuda.set_device(device)
                outcome.append((function(), None))
        except BaseException as error:  # any: it is raised again in the caller's thread
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(min(timeout_s, threading.TIMEOUT_MAX))
    if thread.is_alive():
        raise TimeoutError(f"no answer within {timeout_s} s")
    result, error = outcome[0]
    if error is not None and not isinstance(error, Exception):
        raise RuntimeError(f"ended its thread with {error!r}") from error
    if error is not None:
        raise error
    return result
