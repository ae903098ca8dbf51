from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.advantages import (
    AdvantageError,
    best_and_worst,
    gdpo_advantages,
    group_advantages,
    zero_std_groups,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/losses.json").read_text())["advantages"]
NAN, INF = math.nan, math.inf


def assert_close(actual, expected, atol=1e-6):
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=atol)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_advantages_match_a_public_implementation(case):
    std = "none"
    if case["normalize_by_std"]:
        std = "batch" if case["global_std"] else "group"
    ids = [ord(name) for name in case["groups"]]
    actual = group_advantages(case["rewards"], ids, std=std, epsilon=case["epsilon"])
    assert_close(actual, case["advantages"], atol=1e-5)


def test_advantages_by_hand():
    # Group means 2 and 7; squares about the mean 4: 9 + 1 + 4 + 16 = 30, over n - 1 = 3.
    rewards, ids = [1.0, 3.0, 6.0, 8.0], [5, 5, 2, 2]
    batch = math.sqrt((3.5**2 + 1.5**2 + 1.5**2 + 3.5**2) / 3) + 1e-4
    assert_close(group_advantages(rewards, ids), [-1 / batch, 1 / batch, -1 / batch, 1 / batch])
    group = math.sqrt(2) + 1e-4
    assert_close(
        group_advantages(rewards, ids, std="group"), [-1 / group, 1 / group, -1 / group, 1 / group]
    )
    assert_close(group_advantages(rewards, ids, std="none"), [-1.0, 1.0, -1.0, 1.0])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_reward_that_is_not_finite_is_left_out_and_gets_zero(bad):
    rewards = torch.tensor([1.0, bad, 3.0])
    assert_close(group_advantages(rewards, [0, 0, 0], std="none"), [-1.0, 0.0, 1.0])
    for std in ("batch", "group"):
        with_bad = group_advantages(rewards, [0, 0, 0], std=std)
        without = group_advantages(rewards[[0, 2]], [0, 0], std=std)
        assert torch.equal(with_bad[[0, 2]], without)
        assert with_bad[1] == 0


@pytest.mark.parametrize("std", ["batch", "group", "none"])
def test_constant_single_and_wholly_invalid_groups_are_exactly_zero(std):
    # The float64 mean of five times 0.1 is not 0.1.
    rewards = [0.1] * 5 + [7.0] + [NAN, NAN] + [2.0, NAN] + [1.0, 2.0]
    ids = [0] * 5 + [1] + [2, 2] + [3, 3] + [4, 4]
    advantages = group_advantages(rewards, ids, std=std)
    assert torch.equal(advantages[:10], torch.zeros(10))
    assert advantages[10] < 0 < advantages[11]
    assert zero_std_groups(rewards, ids) == 4


@pytest.mark.parametrize("std", ["batch", "group", "none"])
def test_one_sample_and_no_sample_are_no_nan(std):
    assert torch.equal(group_advantages([3.0], [0], std=std), torch.zeros(1))
    assert group_advantages([], torch.zeros(0, dtype=torch.long), std=std).shape == (0,)


def test_the_result_is_float32_without_graph():
    rewards = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    advantages = group_advantages(rewards, [0, 0])
    assert advantages.dtype == torch.float32
    assert not advantages.requires_grad


def test_a_small_difference_on_a_large_reward_survives():
    # In float32 1e6 + 0.01 would be 1e6: float64 inside keeps it.
    rewards = torch.tensor([1e6, 1e6 + 0.01], dtype=torch.float64)
    assert_close(group_advantages(rewards, [0, 0], std="none"), [-0.005, 0.005])


batches = st.lists(
    st.tuples(st.floats(-10, 10, width=32) | st.just(NAN), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


@given(batches, st.randoms(use_true_random=False), st.sampled_from(["batch", "group", "none"]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_order_of_samples_and_names_of_groups_do_not_matter(batch, random, std):
    rewards, ids = (list(column) for column in zip(*batch, strict=True))
    expected = group_advantages(rewards, ids, std=std)
    order = list(range(len(batch)))
    random.shuffle(order)
    moved = group_advantages([rewards[i] for i in order], [7 - 2 * ids[i] for i in order], std=std)
    assert torch.equal(moved, expected[order])


@given(batches, st.sampled_from(["batch", "none"]))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_group_sums_to_zero(batch, std):
    rewards, ids = (torch.tensor(column) for column in zip(*batch, strict=True))
    advantages = group_advantages(rewards, ids, std=std)
    for group in ids.unique():
        bound = 1e-5 * (1 + float(advantages.abs().max()))
        assert abs(float(advantages[ids == group].sum())) <= bound


@pytest.mark.parametrize("std", ["batch", "group", "none"])
def test_rounding_does_not_depend_on_the_order(std):
    # Summed from left to right these give 0, 1, 3 or 4.
    rewards = [1e16, 1.0, -1e16, 3.0]
    expected = group_advantages(rewards, [0] * 4, std=std, epsilon=0.0)
    for order in itertools.permutations(range(4)):
        moved = group_advantages([rewards[i] for i in order], [0] * 4, std=std, epsilon=0.0)
        assert torch.equal(moved, expected[list(order)])


def test_text_ids_are_refused():
    with pytest.raises(AdvantageError, match=r"must be integers; got \['a cat', 'a cat'\]; pass"):
        group_advantages([1.0, 2.0], ["a cat", "a cat"])
    with pytest.raises(AdvantageError, match="group ids must be integers"):
        group_advantages([1.0, 2.0], torch.tensor([0.0, 0.0]))


def test_other_shapes_are_refused():
    message = r"got rewards \(3,\) and group ids \(2,\); pass two of shape \[N\]"
    with pytest.raises(AdvantageError, match=message):
        group_advantages([1.0, 2.0, 3.0], [0, 0])
    with pytest.raises(AdvantageError, match=r"got rewards \(2, 2\)"):
        group_advantages(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.long))


def test_unknown_options_are_refused():
    with pytest.raises(AdvantageError, match="epsilon must be finite and not negative; got -1"):
        group_advantages([1.0], [0], epsilon=-1.0)


def test_every_reward_has_its_own_scale_in_gdpo():
    # Both say the opposite of each other, the second a thousand times as loud.
    quiet, loud = torch.tensor([0.0, 2.0, 1.0, 3.0]), torch.tensor([2000.0, 0.0, 3000.0, 1000.0])
    ids = torch.tensor([0, 0, 1, 1])
    rewards = {"quiet": quiet, "loud": loud}
    even = gdpo_advantages(rewards, {"quiet": 1.0, "loud": 1.0}, ids, epsilon=0)
    assert_close(even, [0.0, 0.0, 0.0, 0.0])
    summed = group_advantages(quiet + loud, ids, std="group", epsilon=0)
    assert_close(summed, [0.5**0.5, -(0.5**0.5)] * 2)
    # 2 * -1/sqrt(2) and 0.5 * 1/sqrt(2): the weights alone decide.
    weighed = gdpo_advantages(rewards, {"quiet": 2.0, "loud": 0.5}, ids, epsilon=0)
    assert_close(weighed, [-1.5 * 0.5**0.5, 1.5 * 0.5**0.5] * 2)


def test_gdpo_takes_the_std_that_it_is_told_and_only_what_has_a_weight():
    rewards = {"a": torch.tensor([1.0, 3.0, 6.0, 8.0]), "b": torch.tensor([NAN] * 4)}
    ids = torch.tensor([0, 0, 1, 1])
    for std in ("batch", "group", "none"):
        alone = gdpo_advantages(rewards, {"a": 3.0}, ids, std=std, epsilon=1e-8)
        assert torch.equal(alone, 3 * group_advantages(rewards["a"], ids, std=std, epsilon=1e-8))


def test_a_missing_score_of_one_reward_leaves_the_other():
    rewards = {"a": torch.tensor([1.0, NAN, 3.0]), "b": torch.tensor([2.0, 4.0, 6.0])}
    got = gdpo_advantages(
        rewards, {"a": 1.0, "b": 1.0}, torch.zeros(3, dtype=torch.long), std="none"
    )
    assert_close(got, [-1.0 - 2.0, 0.0, 1.0 + 2.0])


def test_gdpo_without_the_scores_of_a_weighted_reward_is_refused():
    ids = torch.tensor([0, 0])
    with pytest.raises(AdvantageError, match=r"got \['a'\] for weights of \['b'\]; pass those"):
        gdpo_advantages({"a": torch.zeros(2)}, {"b": 1.0}, ids)
    with pytest.raises(AdvantageError, match=r"needs the scores of every weighted reward"):
        gdpo_advantages({"a": torch.zeros(2)}, {}, ids)


@pytest.mark.parametrize(
    ("best", "worst", "expected"),
    [
        (1, 1, [0, 1, 1, 0, 0, 1, 0, 1]),
        (2, 0, [1, 1, 0, 0, 0, 1, 1, 0]),
        (0, 1, [0, 0, 1, 0, 0, 0, 0, 1]),
        (2, 2, [1, 1, 1, 1, 1, 1, 1, 1]),
        (0, 0, [1, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_the_best_and_the_worst_of_each_group(best, worst, expected):
    rewards = torch.tensor([5.0, 7.0, 1.0, 3.0, 20.0, 40.0, 30.0, 10.0])
    ids = torch.tensor([7] * 4 + [2] * 4)
    got = best_and_worst(rewards, ids, best=best, worst=worst)
    assert got.tolist() == [bool(e) for e in expected]


def test_of_equal_rewards_the_earlier_is_the_better_and_a_missing_one_is_neither():
    ids = torch.zeros(5, dtype=torch.long)
    tied = torch.tensor([1.0, NAN, 1.0, 1.0, -INF])
    assert best_and_worst(tied, ids, best=1, worst=1).tolist() == [True, False, False, True, False]
    assert best_and_worst(tied, ids, best=1, worst=0).tolist() == [True, False, False, False, False]
    # Fewer are left than are asked for: those are trained, each once.
    left = torch.tensor([1.0, NAN, 2.0, NAN, NAN])
    assert best_and_worst(left, ids, best=2, worst=2).tolist() == [True, False, True, False, False]
    assert best_and_worst(left, ids, best=0, worst=3).tolist() == [True, False, True, False, False]
    assert not best_and_worst(torch.full((5,), NAN), ids, best=1, worst=1).any()
