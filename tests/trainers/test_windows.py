from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from trainers.config_loader import STRICT, ConfigError, load, to_yaml
from trainers.windows import (
    AllSteps,
    FixedWindow,
    ProgressiveWindow,
    RandomWindow,
    TrainedFraction,
    Window,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    __pydantic_config__ = STRICT
    window: Window = field(default_factory=AllSteps)


def test_all_steps_can_leave_out_the_last():
    assert AllSteps().choose(0, 4, seed=1) == (0, 1, 2, 3)
    assert AllSteps(exclude_last=True).choose(7, 4, seed=1) == (0, 1, 2)
    with pytest.raises(ConfigError, match="no step to train; got 1 steps and exclude_last True"):
        AllSteps(exclude_last=True).choose(0, 1, seed=1)


def test_a_fixed_window_is_the_same_in_every_iteration():
    window = FixedWindow(steps=(3, 1))
    assert {window.choose(i, 4, seed=i) for i in range(5)} == {(3, 1)}


def test_the_first_iteration_is_number_0_and_uses_its_own_window():
    window = RandomWindow(size=2)
    sequence = [window.choose(i, 6, seed=3) for i in range(20)]
    # As a resume would see it: any iteration alone, in any order.
    assert [window.choose(i, 6, seed=3) for i in reversed(range(20))] == sequence[::-1]
    assert sequence[0] != sequence[1] or sequence[1] != sequence[2]


def test_every_start_occurs_about_equally_often():
    # 4000 draws of 5 starts: mean 800, standard deviation 25; a deviation of 5 sigma is excluded
    # for good since the draws are fixed by the seed.
    counts = Counter(RandomWindow(size=2).choose(i, 6, seed=0) for i in range(4000))
    assert set(counts) == {(s, s + 1) for s in range(5)}
    assert all(abs(count - 800) < 125 for count in counts.values())


def test_every_start_occurs_within_few_iterations():
    starts = {
        RandomWindow(size=2, start_min=1, start_max=3).choose(i, 10, 42)[0] for i in range(20)
    }
    assert starts == {1, 2, 3}


def test_a_window_ignores_and_leaves_alone_the_global_rngs():
    expected = [RandomWindow(size=3).choose(i, 10, seed=5) for i in range(8)]
    state = random.getstate()
    random.seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        assert [RandomWindow(size=3).choose(i, 10, seed=5) for i in range(8)] == expected
    random.setstate(state)


def test_a_window_depends_on_the_seed():
    draws = {tuple(RandomWindow(size=1).choose(i, 10, seed=s) for i in range(8)) for s in range(8)}
    assert len(draws) == 8


def test_a_window_that_does_not_fit_names_step_count_and_range():
    with pytest.raises(ConfigError, match=r"step 4 does not exist; got 4 steps; .* 0\.\.3"):
        FixedWindow(steps=(0, 4)).choose(0, 4, seed=0)
    with pytest.raises(ConfigError, match=r"2 steps from step 3 on .*; got 4 steps; .* 0\.\.2 or"):
        RandomWindow(size=2, start_max=3).choose(0, 4, seed=0)
    with pytest.raises(ConfigError, match=r"3 steps from step 2 on do not fit; got 4 steps"):
        RandomWindow(size=3, start_min=2).choose(0, 4, seed=0)
    assert RandomWindow(size=4).choose(0, 4, seed=0) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{type: fixed, steps: []}", r"window: steps: must be one or more different steps"),
        ("{type: fixed, steps: [1, 1]}", r"different steps, counted from 0; got \(1, 1\)"),
        ("{type: fixed, steps: [-1]}", r"counted from 0; got \(-1,\)"),
        ("{type: fixed, steps: [true]}", r"window\.steps\.0: input should be a valid integer"),
        ("{type: fixed}", r"window\.steps: required"),
        ("{type: random, size: 0}", r"window: size: must be positive; got 0; set size >= 1"),
        ("{type: random, size: 2, start_min: -1}", r"start_min: must not be negative; got -1"),
        ("{type: random, size: 2, start_min: 3, start_max: 2}", r"start_max >= 3"),
        ("{type: progressive, size: 0}", r"size and shift: must be positive; got 0, 1; set >= 1"),
        ("{type: progressive, shift: 0}", r"size and shift: must be positive; got 4, 0"),
        (
            "{type: progressive, iterations: 0}",
            r"at least min_iterations, .*; got 0 and 1; set for",
        ),
        ("{type: progressive, iterations: 3, min_iterations: 4}", r"got 3 and 4; set for"),
        (
            "{type: progressive, decay: exponential, decay_rate: -1}",
            r"must not be negative; got -1\.0, 13, 0; set >= 0",
        ),
        ("{type: progressive, start_min: 3, start_max: 2}", r"below start_min; got 2 and 3; set"),
        (
            "{type: sliding}",
            r"must be one of 'all', 'fixed', 'random', 'progressive'; got 'sliding'",
        ),
    ],
)
def test_a_window_that_never_fits_fails_at_load(text, message):
    with pytest.raises(ConfigError, match=message):
        load(Config, [], [f"window={text}"])


@pytest.mark.parametrize(
    "window",
    [
        AllSteps(exclude_last=True),
        FixedWindow(steps=(1, 2)),
        RandomWindow(size=2),
        ProgressiveWindow(size=2, shift=None, decay="linear"),
    ],
)
def test_windows_are_read_from_and_written_to_yaml(tmp_path, window):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(Config(window=window)))
    assert load(Config, [path]).window == window


def _starts(window: ProgressiveWindow, iterations: int, num_steps: int) -> list[int]:
    """Where the window begins in each iteration; its steps are consecutive."""
    chosen = [window.choose(i, num_steps, seed=9) for i in range(iterations)]
    assert all(steps == tuple(range(steps[0], steps[0] + window.size)) for steps in chosen)
    return [steps[0] for steps in chosen]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        # Places 0, 1, 2 of 5 steps, two iterations each, and from the start again.
        (ProgressiveWindow(size=3, iterations=2), [0, 0, 1, 1, 2, 2, 0, 0, 1]),
        (ProgressiveWindow(size=3, iterations=2, roll_back=False), [0, 0, 1, 1, 2, 2, 2, 2, 2]),
        # Side by side, without overlap; a place that does not fit whole is none.
        (ProgressiveWindow(size=2, shift=None, iterations=1), [0, 2, 0, 2]),
        (ProgressiveWindow(size=2, shift=3, iterations=1), [0, 3, 0, 3]),
        (ProgressiveWindow(size=2, iterations=1, start_min=1, start_max=2), [1, 2, 1, 2]),
        # 5, 4.5, 4, 3.5 ... are rounded half to even: from 4 to 1 in three places: 4, 2.5, 1.
        (
            ProgressiveWindow(size=3, iterations=4, decay="linear"),
            [0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 1],
        ),
        (
            ProgressiveWindow(size=3, iterations=5, min_iterations=3, decay="linear"),
            [0] * 5 + [1] * 4 + [2] * 3 + [0],
        ),
        # 3 exp(0), 3 exp(-0.5) = 1.82, 3 exp(-1) = 1.10, rounded up; nothing decays up to step 0.
        (
            ProgressiveWindow(
                size=3, iterations=3, decay="exponential", decay_rate=0.5, decay_start=0
            ),
            [0, 0, 0, 1, 1, 2, 2, 0],
        ),
        # Up to step 1: 3, 3, 1.82.
        (
            ProgressiveWindow(
                size=3, iterations=3, decay="exponential", decay_rate=0.5, decay_start=1
            ),
            [0, 0, 0, 1, 1, 1, 2, 2, 0],
        ),
        # A single place stays, whatever the decay.
        (ProgressiveWindow(size=5, iterations=2, decay="linear"), [0, 0, 0, 0]),
    ],
)  # fmt: skip
def test_a_progressive_window_by_hand(window: ProgressiveWindow, expected: list[int]):
    assert _starts(window, len(expected), 5) == expected


def test_a_progressive_window_has_the_published_size_and_pace():
    window = ProgressiveWindow()
    starts = _starts(window, 300, 25)
    assert starts == [i // 25 for i in range(300)], "300 iterations visit the starts 0 to 11"
    assert window.choose(22 * 25, 25, 0) == (0, 1, 2, 3), "after 22 places it begins anew"


def test_a_progressive_window_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"4 steps from step 0 on do not fit; got 3 steps; set"):
        ProgressiveWindow().choose(0, 3, 0)
    with pytest.raises(ConfigError, match=r"4 steps from step 2 on do not fit; got 5 .* 0\.\.1 or"):
        ProgressiveWindow(start_max=2).choose(0, 5, 0)


@pytest.mark.parametrize(
    "window",
    [
        AllSteps(),
        AllSteps(exclude_last=True),
        FixedWindow(steps=(4, 1)),
        RandomWindow(size=2),
        RandomWindow(size=2, start_max=1),
        ProgressiveWindow(size=2, iterations=1),
        ProgressiveWindow(size=2, iterations=1, start_max=1),
        ProgressiveWindow(size=2, iterations=1, shift=3),
        ProgressiveWindow(size=2, iterations=2, decay="linear"),
    ],
)
def test_reach_is_the_last_step_that_any_iteration_trains(window):
    chosen = {step for i in range(60) for step in window.choose(i, 6, seed=0)}
    assert window.reach(6) == max(chosen)


@pytest.mark.parametrize(
    ("fraction", "count", "expected"),
    # 0.29 * 100 is 28.999... in floating point.
    [(1.0, 10, 10), (0.99, 10, 9), (0.6, 10, 6), (0.6, 4, 2), (0.29, 100, 29), (0.5, 2, 1)],
)
def test_a_fraction_is_rounded_down(fraction: float, count: int, expected: int):
    first = TrainedFraction(fraction=fraction).choose(range(count))
    assert first == list(range(expected)), "the earliest ones"
    drawn = TrainedFraction(fraction=fraction, order="random").choose(range(count), 1)
    assert len(set(drawn)) == expected
    assert drawn == sorted(drawn)


def test_the_earliest_are_those_of_the_schedule_not_of_the_list():
    assert TrainedFraction(fraction=0.5).choose((3, 1, 2, 0)) == [0, 1]


def test_a_random_part_goes_by_its_key_alone_and_all_steps_take_part():
    part = TrainedFraction(fraction=0.6, order="random")
    keys = [(0, iteration, 0, sample) for iteration in range(20) for sample in range(3)]
    draws = [tuple(part.choose((5, 6, 7, 8, 9), *key)) for key in keys]
    state = random.getstate()
    random.seed(3)
    assert [tuple(part.choose([9, 8, 7, 6, 5], *key)) for key in keys[::-1]] == draws[::-1]
    random.setstate(state)
    assert len(set(draws)) == 10, "of 5 steps 3 can be drawn in 10 ways"
    assert any(len(set(draws[i : i + 3])) > 1 for i in range(0, 60, 3)), "chunks differ"
    assert Counter(step for draw in draws for step in draw).keys() == {5, 6, 7, 8, 9}


def test_a_fraction_of_nothing_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"timestep_fraction: leaves no step to train; got 0\.4 of 2 steps; set it",
    ):
        TrainedFraction(fraction=0.4).choose((0, 1))
