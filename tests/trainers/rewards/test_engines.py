"""Engines that hang, raise, or work."""

import subprocess
import sys
import threading

import pytest

from trainers.rewards.engines import Engines
from trainers.rewards.time_limit import call_within


class Engine:
    made = 0

    def __init__(self):
        type(self).made += 1

    def __call__(self, item):
        if item == "hang":
            threading.Event().wait()
        if item == "raise":
            raise ValueError("what a picture")
        return item.upper()


def of(engine, item):
    return engine(item)


@pytest.fixture(name="engines")
def _engines():
    Engine.made = 0
    return Engines(Engine, 2)


def test_results_are_in_order_and_engines_are_kept(engines):
    letters = list("abcdefghijklmnop")
    for _ in range(20):
        assert engines.map(of, letters) == [letter.upper() for letter in letters]
    assert engines.map(of, []) == []
    assert Engine.made == 2


def test_what_one_raises_is_raised_and_it_goes_on(engines):
    for _ in range(5):
        with pytest.raises(ValueError, match="what a picture"):
            engines.map(of, ["raise"])
        assert engines.map(of, ["a", "b", "c"]) == ["A", "B", "C"]
    assert Engine.made == 2


def test_one_that_hangs_is_replaced(engines):
    for lost in (1, 2, 3):
        with pytest.raises(TimeoutError):
            call_within(0.2, lambda: engines.map(of, ["hang"]))
        assert engines.map(of, ["a", "b", "c"]) == ["A", "B", "C"]
        assert Engine.made <= 2 + lost, "one for each that was lost"


HEAD = f"""
import os, signal, threading
from {__name__} import Engine, Engines, call_within, of
engines = Engines(Engine, 2)
"""
GIVEN_UP = """
try:
    call_within(0.1, lambda: engines.map(of, ["hang", "hang", "a"]))
except TimeoutError:
    print(engines.map(of, ["still", "here"]))
"""
INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script put aside
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
engines.map(of, ["hang"])
"""


def ended(code):
    """The process, which has to end by itself."""
    command = [sys.executable, "-c", HEAD + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_one_that_hangs_does_not_keep_the_process():
    done = ended(GIVEN_UP)
    assert (done.returncode, done.stdout) == (0, "['STILL', 'HERE']\n"), done.stderr


def test_an_interrupt_does_not_wait_for_one_that_hangs():
    done = ended(INTERRUPTED)
    assert done.returncode != 0
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
