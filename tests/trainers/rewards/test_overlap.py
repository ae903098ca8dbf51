"""Scores that are taken batch by batch, beside the sampling, are those of all samples at once."""

from __future__ import annotations

import itertools
import math
import random
import threading

import pytest
import torch

from miles_rollout.media import Media
from tests.tiny_run import brightness, tiny_trainer, train, without_perf
from tests.trainers.rewards.test_remote import served
from trainers.rewards.scoring import RewardConfig, RewardFailure, Scorer
from trainers.rewards.serve import create_app

HERE = __name__
NAN = math.nan
WAIT_S = 120.0
"""Longer than anything here takes, so that a test that fails ends."""


def table(media, prompts, metadata, *, name):
    """What the table of the sample says: a number, named components, or an exception."""
    found = [extra[name] for extra in metadata]
    if any(value == "raise" for value in found):
        raise OSError("away")
    if any(isinstance(value, dict) for value in found):
        return {part: [v[part] for v in found] for part in found[0]}
    return found


def test_modes(media, prompts, metadata):
    return {"grad": [float(torch.is_grad_enabled())], "threads": [float(torch.get_num_threads())]}


test_modes.__test__ = False


def scorer(*rewards, overlap, fraction=0.5):
    configs = [RewardConfig(name=n, weight=w, kwargs=k) for n, w, k in rewards]
    return Scorer(configs, timeout_s=WAIT_S, max_masked_fraction=fraction, overlap=overlap)


def in_batches(live, metadata, size):
    """The scores, or the failure, of samples that come ``size`` at a time."""
    try:
        with live.start(len(metadata)) as scoring:
            for start in range(0, len(metadata), size):
                part = metadata[start : start + size]
                prompts = [f"p{start + i}" for i in range(len(part))]
                scoring.add([Media(image=torch.zeros(3, 1, 1))] * len(part), prompts, part)
            return scoring.result()
    except RewardFailure as failure:
        return failure


def told(errors):
    """Without the lines of batches, whose sizes differ."""
    return [error for error in errors if ", batch of " not in error]


@pytest.mark.parametrize("overlap", [False, True], ids=["after", "beside"])
@pytest.mark.parametrize("size", [1, 3, 12])
def test_batches_score_as_the_whole(size, overlap):
    draw = random.Random(size)
    outcomes = {"scores": 0, "fails": 0}
    for case in range(30):
        odds = draw.choice([0.0, 0.1, 0.3])
        components = draw.random() < 0.3

        def value(odds=odds, components=components):
            kind = draw.random()
            if kind < odds:
                return "raise"
            number = None if kind < 2 * odds else draw.gauss(0, 1)
            return {"total": number, "part": draw.random()} if components else number

        metadata = [{name: value() for name in "abc"} for _ in range(12)]
        named = [(f"{HERE}:table_{n}", w, {}) for n, w in zip("abc", (1.0, -0.3, 0.0), strict=True)]
        fraction = draw.choice([0.0, 0.25, 0.5, 1.0])
        whole = in_batches(scorer(*named, overlap=False, fraction=fraction), metadata, 12)
        parts = in_batches(scorer(*named, overlap=overlap, fraction=fraction), metadata, size)
        assert type(whole) is type(parts), case
        if isinstance(whole, RewardFailure):
            outcomes["fails"] += 1
            continue
        outcomes["scores"] += 1
        assert list(whole.components) == list(parts.components)
        pairs = [
            (whole.total, parts.total),
            *((whole.components[n], parts.components[n]) for n in whole.components),
        ]
        for a, b in pairs:
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
        assert torch.equal(whole.masked, parts.masked)
        assert told(whole.errors) == told(parts.errors)
    assert min(outcomes.values()) >= 5, outcomes


def table_a(media, prompts, metadata):
    return table(media, prompts, metadata, name="a")


def table_b(media, prompts, metadata):
    return table(media, prompts, metadata, name="b")


def table_c(media, prompts, metadata):
    return table(media, prompts, metadata, name="c")


def test_a_failure_says_how_many_samples_were_not_waited_for():
    metadata = [{"a": None}] * 3 + [{"a": 1.0}] * 5
    live = scorer((f"{HERE}:table_a", 1.0, {}), overlap=True, fraction=0.25)
    told = str(in_batches(live, metadata, 2))
    cause = "reward 'table_a', sample 0 (prompt 'p0'): has no finite score; got nan"
    assert told.startswith(
        f"rewards: 3 of 8 samples have no score, and 4 are not scored yet; got {cause}; "
    )
    assert told.endswith("repair the reward or raise max_masked_fraction (now 0.25)")
    # One after the other fails, so the rest is not asked for and counts as failed.
    metadata = [{"a": "raise"}] * 8
    assert str(in_batches(live, metadata, 2)).startswith(
        "rewards: 8 of 8 samples have no score; got"
    )


def test_it_runs_without_gradients_and_with_the_threads_that_were_set():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        scores = in_batches(scorer((f"{HERE}:test_modes", 1.0, {}), overlap=True), [{}] * 3, 1)
    finally:
        torch.set_num_threads(before)
    assert scores.components["test_modes/grad"].tolist() == [0, 0, 0]
    assert scores.components["test_modes/threads"].tolist() == [1, 1, 1]


seen: list[int] = []
second_is_sampled = threading.Event()


def waits_for_the_second_chunk(media, prompts, metadata):
    if not seen and not second_is_sampled.wait(WAIT_S):
        raise TimeoutError("the second chunk was not sampled while this one was scored")
    seen.append(len(media))
    return brightness(media, prompts, metadata)


def telling(chunks):
    """Says when the second chunk is asked for."""

    def chunks_of(iteration):
        for number, chunk in enumerate(chunks(iteration)):
            if number == 1:
                second_is_sampled.set()
            yield chunk

    return chunks_of


def test_a_chunk_is_scored_while_the_next_is_sampled(tmp_path, monkeypatch):
    seen.clear()
    second_is_sampled.clear()
    rewards = f"rewards=[{{name: '{HERE}:waits_for_the_second_chunk'}}]"
    trainer = tiny_trainer(tmp_path, rewards, "iterations=1", "eval.every=0")
    monkeypatch.setattr(trainer, "_evaluate", _no_evaluation(trainer))
    monkeypatch.setattr(trainer.rollouts, "chunks", telling(trainer.rollouts.chunks))
    (line, *_) = train(trainer)
    assert seen[:4] == [2, 2, 2, 2]
    assert line["rollout/reward/masked"] == 0
    assert line["perf/reward_wait_s"] <= line["perf/iteration_s"]


def _no_evaluation(trainer):
    """The evaluation of another reward, for one that only knows the rollout."""
    evaluate, live = trainer._evaluate, trainer.eval_scorer
    other = Scorer(
        [RewardConfig(name="tests.tiny_run:brightness")], timeout_s=WAIT_S, max_masked_fraction=0
    )

    def instead():
        trainer.eval_scorer = other
        try:
            return evaluate()
        finally:
            trainer.eval_scorer = live

    return instead


def test_a_server_scores_a_chunk_while_the_next_is_sampled(tmp_path, monkeypatch):
    seen.clear()
    second_is_sampled.clear()
    with served(create_app("waits", waits_for_the_second_chunk)) as url:
        rewards = f"rewards=[{{name: remote, kwargs: {{url: '{url}', timeout_s: {WAIT_S}}}}}]"
        overrides = (rewards, "iterations=1", "eval.every=0", f"scoring.timeout_s={WAIT_S}")
        trainer = tiny_trainer(tmp_path, *overrides)
        monkeypatch.setattr(trainer, "_evaluate", _no_evaluation(trainer))
        monkeypatch.setattr(trainer.rollouts, "chunks", telling(trainer.rollouts.chunks))
        (line, *_) = train(trainer)
    assert seen[:4] == [2, 2, 2, 2]
    assert line["rollout/reward/masked"] == 0


def test_a_run_is_the_same_bits_with_and_without(tmp_path):
    beside = tiny_trainer(tmp_path / "a")
    after = tiny_trainer(tmp_path / "b", "scoring.overlap=false")
    assert (beside.scorer.overlap, after.scorer.overlap) == (True, False)
    assert without_perf(train(beside)) == without_perf(train(after))
    expected = after.policy.tensors()
    assert all(torch.equal(t, expected[name]) for name, t in beside.policy.tensors().items())


def always_raises(media, prompts, metadata):
    raise OSError("away")


def test_a_failure_stops_what_makes_the_samples():
    live = scorer((f"{HERE}:always_raises", 1.0, {}), overlap=True, fraction=0.0)
    batch = ([Media(image=torch.zeros(3, 1, 1))], ["p"], [{}])

    def make_samples(scoring):
        for _ in itertools.count():
            scoring.add(*batch)

    told = "1000000 of 1000000 samples have no score; got"
    with live.start(1_000_000) as scoring, pytest.raises(RewardFailure, match=told):
        make_samples(scoring)


started, go_on = threading.Event(), threading.Event()
calls: list[str] = []


def holds(media, prompts, metadata):
    calls.append(prompts[0])
    started.set()
    assert go_on.wait(WAIT_S)
    return [0.0] * len(media)


def test_leaving_early_ends_the_thread_and_scores_nothing_more():
    live = scorer((f"{HERE}:holds", 1.0, {}), overlap=True)
    with live.start(3) as scoring:
        (thread,) = [t for t in threading.enumerate() if t.name == "scoring"]
        for prompt in "abc":
            scoring.add([Media(image=torch.zeros(3, 1, 1))], [prompt], [{}])
        assert started.wait(WAIT_S)
    go_on.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert calls == ["a"]


def test_a_mistake_in_a_reward_is_raised_as_it_is():
    live = scorer((f"{HERE}:one_too_many", 1.0, {}), overlap=True)
    failure = in_batches(live, [{}] * 4, 2)
    assert "must return one number a sample; got 3 for 2 samples" in str(failure)


def one_too_many(media, prompts, metadata):
    return [0.0] * (len(media) + 1)
