from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from trainers.config_loader import STRICT, ConfigError, load, to_yaml
from trainers.windows import AllSteps, FixedWindow, RandomWindow, Window


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
    "window", [AllSteps(exclude_last=True), FixedWindow(steps=(1, 2)), RandomWindow(size=2)]
)
def test_windows_are_read_from_and_written_to_yaml(tmp_path, window):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(Config(window=window)))
    assert load(Config, [path]).window == window
