from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest
import torch

from miles_rollout.errors import MilesRolloutError
from miles_rollout.media import Media
from trainers.config_loader import ConfigError
from trainers.rewards.scoring import RewardConfig, RewardFailure, Scorer

HERE = __name__
METADATA = [{"n": n} for n in range(4)]
PROMPTS = ["p0", "p1", "p2", "p3"]
MEDIA = [Media(image=torch.full((3, 2, 2), n / 10)) for n in range(4)]
calls: list[int] = []


def number(media, prompts, metadata):
    """The sample's own number: shows that media, prompts and metadata stay together."""
    for item, prompt, extra in zip(media, prompts, metadata, strict=True):
        n = extra["n"]
        assert item is MEDIA[n]
        assert prompt == PROMPTS[n]
    return [float(extra["n"]) for extra in metadata]


def given(media, prompts, metadata, *, values):
    return [values[extra["n"]] for extra in metadata]


def as_given(media, prompts, metadata, *, values):
    return values


def as_tensor(media, prompts, metadata):
    return torch.tensor(number(media, prompts, metadata), requires_grad=True)


def as_array(media, prompts, metadata):
    return np.asarray(number(media, prompts, metadata), dtype=np.float32)


def mapping(media, prompts, metadata, *, columns):
    return {name: [column[e["n"]] for e in metadata] for name, column in columns.items()}


def raises(media, prompts, metadata, *, at):
    calls.append(len(media))
    if any(extra["n"] in at for extra in metadata):
        raise OSError("server is away")
    return number(media, prompts, metadata)


def sleeps(media, prompts, metadata, *, at):
    if any(extra["n"] in at for extra in metadata):
        threading.Event().wait()
    return number(media, prompts, metadata)


def exits(media, prompts, metadata):
    raise SystemExit


def wrong(media, prompts, metadata, *, result):
    return result


def grad_mode(media, prompts, metadata):
    return [float(torch.is_grad_enabled())] * len(media)


class Asking:
    """Knows how long it may take, and takes longer."""

    def time_limit_s(self, count):
        return 0.1 * count

    def __call__(self, media, prompts, metadata):
        calls.append(len(media))
        threading.Event().wait()


class Model:
    built = 0

    def __init__(self) -> None:
        Model.built += 1


def scorer(*rewards, timeout_s=5.0, max_masked_fraction=0.5):
    configs = [
        RewardConfig(name=f"{HERE}:{name}", weight=weight, kwargs=kwargs)
        for name, weight, kwargs in rewards
    ]
    return Scorer(configs, timeout_s=timeout_s, max_masked_fraction=max_masked_fraction)


def score(*rewards, **options):
    return scorer(*rewards, **options).score(MEDIA, PROMPTS, METADATA)


def assert_equal(actual, expected):
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12, equal_nan=True)


NAN = float("nan")
INF = float("inf")


def test_the_total_is_the_weighted_sum_and_components_stay_as_they_are():
    scores = score(("number", 2.0, {}), ("given", -0.5, {"values": [1.0, 1.0, 3.0, 5.0]}))
    assert_equal(scores.total, [-0.5, 1.5, 2.5, 3.5])
    assert_equal(scores.components["number"], [0.0, 1.0, 2.0, 3.0])
    assert_equal(scores.components["given"], [1.0, 1.0, 3.0, 5.0])
    assert scores.component_means() == {"number": 1.5, "given": 2.5}
    assert not scores.masked.any()
    assert scores.errors == ()


@pytest.mark.parametrize("name", ["as_tensor", "as_array"])
def test_tensors_and_arrays_are_numbers_too(name):
    scores = score((name, 1.0, {}))
    assert_equal(scores.total, [0.0, 1.0, 2.0, 3.0])
    assert not scores.total.requires_grad


def test_a_reward_of_weight_zero_is_logged_and_trains_and_masks_nothing():
    scores = score(("number", 1.0, {}), ("given", 0.0, {"values": [1.0, NAN, 3.0, 5.0]}))
    assert_equal(scores.total, [0.0, 1.0, 2.0, 3.0])
    assert_equal(scores.components["given"], [1.0, NAN, 3.0, 5.0])
    assert scores.component_means()["given"] == 3.0
    assert len(scores.errors) == 1
    scores = score(("number", 1.0, {}), ("raises", 0.0, {"at": [0, 1, 2, 3]}))
    assert not scores.masked.any()
    assert "raises" not in scores.component_means()


@pytest.mark.parametrize("bad", [None, NAN, INF, -INF])
def test_a_sample_without_a_finite_score_is_masked_and_not_zero(bad):
    scores = score(("number", 1.0, {}), ("given", 1.0, {"values": [1.0, bad, 1.0, 1.0]}))
    assert_equal(scores.total, [1.0, NAN, 3.0, 4.0])
    assert scores.masked.tolist() == [False, True, False, False]
    assert_equal(scores.components["number"], [0.0, 1.0, 2.0, 3.0])
    shown = NAN if bad is None else bad
    assert scores.errors == (
        f"reward 'given', sample 1 (prompt 'p1'): has no finite score; got {shown}",
    )


def test_a_reward_that_raises_for_one_sample_masks_that_one_only():
    calls.clear()
    scores = score(("raises", 1.0, {"at": [2]}))
    assert_equal(scores.total, [0.0, 1.0, NAN, 3.0])
    assert calls == [4, 1, 1, 1, 1]
    assert scores.errors == (
        "reward 'raises', batch of 4: OSError: server is away",
        "reward 'raises', sample 2 (prompt 'p2'): OSError: server is away",
    )


def test_a_reward_that_sleeps_forever_on_one_sample_masks_that_one_only():
    start = time.monotonic()
    scores = score(("sleeps", 1.0, {"at": [1]}), timeout_s=0.2)
    assert 0.4 <= time.monotonic() - start < 5
    assert_equal(scores.total, [0.0, NAN, 2.0, 3.0])
    assert scores.errors[-1] == (
        "reward 'sleeps', sample 1 (prompt 'p1'): TimeoutError: no answer within 0.2 s"
    )


def test_retries_stop_when_more_have_failed_than_may_be_masked():
    calls.clear()
    with pytest.raises(RewardFailure) as caught:
        score(("raises", 1.0, {"at": [0, 1, 2, 3]}), max_masked_fraction=0.25)
    assert calls == [4, 1, 1]
    assert str(caught.value) == (
        "rewards: 4 of 4 samples have no score; got reward 'raises', batch of 4: OSError: server is "
        "away; reward 'raises', sample 0 (prompt 'p0'): OSError: server is away; reward 'raises', "
        "sample 1 (prompt 'p1'): OSError: server is away; repair the reward or raise "
        "max_masked_fraction (now 0.25)"
    )


def test_too_many_masked_samples_stop_the_run():
    values = {"values": [NAN, NAN, 1.0, 2.0]}
    assert score(("given", 1.0, values), max_masked_fraction=0.5).masked.sum() == 2
    with pytest.raises(RewardFailure, match="2 of 4 samples have no score; got reward 'given'"):
        score(("given", 1.0, values), max_masked_fraction=0.49)
    many = Scorer(
        [RewardConfig(name=f"{HERE}:as_given", kwargs={"values": [NAN] * 29 + [1.0] * 71})],
        timeout_s=5,
        max_masked_fraction=0.29,
    )
    assert many.score(MEDIA[:1] * 100, [""] * 100, [{}] * 100).masked.sum() == 29
    # Even where any share may be masked, nothing is left to train on.
    with pytest.raises(RewardFailure, match="4 of 4 samples have no score"):
        score(("given", 1.0, {"values": [NAN] * 4}), max_masked_fraction=1.0)


def test_components_are_logged_under_the_reward_and_summed_without_a_total():
    columns = {"a": [1.0, 2.0, 3.0, 4.0], "b": [10.0, 20.0, 30.0, 40.0]}
    scores = score(("mapping", 2.0, {"columns": columns}))
    assert_equal(scores.total, [22.0, 44.0, 66.0, 88.0])
    assert_equal(scores.components["mapping/a"], columns["a"])
    assert_equal(scores.components["mapping"], [11.0, 22.0, 33.0, 44.0])


def test_a_component_named_total_is_the_reward():
    columns = {"a": [None, 2.0, 3.0, 4.0], "total": [10.0, 20.0, 30.0, 40.0]}
    scores = score(("mapping", 1.0, {"columns": columns}))
    assert_equal(scores.total, [10.0, 20.0, 30.0, 40.0])
    assert set(scores.components) == {"mapping", "mapping/a"}


def test_a_missing_component_masks_its_sample_and_logs_take_what_is_there():
    columns = {"a": [1.0, None, 1.0, 1.0], "b": [2.0, 3.0, 2.0, 3.0]}
    scores = score(("mapping", 1.0, {"columns": columns}))
    assert_equal(scores.total, [3.0, NAN, 3.0, 4.0])
    means = scores.component_means()
    assert means["mapping/a"] == 1.0
    assert means["mapping/b"] == 2.5


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "reward 'wrong': must return one number a sample; got 1 for 4 samples; return a"),
        (0.5, "reward 'wrong': must return one number a sample; got 0.5 for 4 samples"),
        (None, "reward 'wrong': must return one number a sample; got None for 4 samples"),
        (torch.zeros(4, 1), "reward 'wrong': must return numbers; got [0.0]; return a number or"),
        (["1"] * 4, "reward 'wrong': must return numbers; got '1'"),
        ({"a": [1.0]}, "reward 'wrong': must return one number a sample for component 'a'; got 1"),
        ({}, "reward 'wrong': returned no component; got {}; return at least one"),
    ],
    ids=str,
)
def test_a_reward_that_breaks_its_contract_is_named(result, message):
    with pytest.raises(RewardFailure, match=f"^{re.escape(message)}"):
        score(("wrong", 1.0, {"result": result}))


def test_a_reward_that_ends_its_thread_is_a_failure():
    with pytest.raises(RewardFailure, match=r"RuntimeError: ended its thread with SystemExit\(\)"):
        score(("exits", 1.0, {}))


def test_rewards_run_without_gradients():
    assert_equal(score(("grad_mode", 1.0, {})).total, [0.0] * 4)


def test_a_mistake_in_any_reward_is_told_before_the_first_is_built():
    Model.built = 0
    with pytest.raises(ConfigError, match="wrong kwargs: got an unexpected keyword argument 'x'"):
        scorer(("Model", 1.0, {}), ("number", 1.0, {"x": 1}))
    assert Model.built == 0


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ([], {}, "rewards: none has a weight, so nothing is trained"),
        ([("number", 0.0, {})], {}, "rewards: none has a weight, so nothing is trained"),
        ([("number", 1.0, {})] * 2, {}, "rewards: a name is given twice; got"),
        ([("number", NAN, {})], {}, "weight: must be finite; got nan; set a number"),
        ([("number", 1.0, {})], {"timeout_s": 0}, "timeout_s: must be within 0..1e6; got 0"),
        ([("number", 1.0, {})], {"timeout_s": NAN}, "timeout_s: must be within 0..1e6; got nan"),
        ([("number", 1.0, {})], {"max_masked_fraction": 1.5}, "max_masked_fraction: must be"),
    ],
)
def test_settings_that_train_nothing_are_refused(rewards, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        scorer(*rewards, **options)


def test_lists_of_other_lengths_are_refused():
    with pytest.raises(RewardFailure, match="got 4 media, 1 prompts, 4 metadata; pass lists of"):
        scorer(("number", 1.0, {})).score(MEDIA, ["p"], METADATA)


def test_the_failure_is_one_of_ours_and_a_runtime_error():
    assert issubclass(RewardFailure, MilesRolloutError)
    assert issubclass(RewardFailure, RuntimeError)


def test_what_asks_beyond_its_own_limit_is_not_asked_for_every_sample():
    calls.clear()
    scorer = Scorer([RewardConfig(name=f"{HERE}:Asking")], timeout_s=0.01, max_masked_fraction=1.0)
    with pytest.raises(RewardFailure, match=r"4 of 4 samples have no score; got .* within 0.4 s"):
        scorer.score(MEDIA, PROMPTS, METADATA)
    assert calls == [4]
