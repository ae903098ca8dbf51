"""What is measured besides the trained reward, by hand-made numbers and in tiny runs."""

import itertools
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_run import brightness, metrics_of, tiny_config, tiny_trainer, train, without_perf
from trainers.build import read_inputs, run
from trainers.config import EvalConfig
from trainers.config_loader import ConfigError
from trainers.drift import Drift
from trainers.monitors import Monitors, MonitorsConfig, diversity_metrics, rise_of
from trainers.rewards.scores import Scores
from trainers.run_state import evaluation_digest

NAN = math.nan


def _scores(total: list[float], **components: list[float]) -> Scores:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    held = {name: column(values) for name, values in components.items()}
    return Scores(total=column(total), components=held, masked=column(total).isnan(), errors=())


def _messages(caplog: Any) -> list[str]:
    told = [
        r.getMessage() for r in caplog.records if r.name in ("trainers.monitors", "trainers.drift")
    ]
    caplog.clear()
    return told


def test_a_rise_is_that_of_pairs_in_standard_errors() -> None:
    mean, errors = rise_of([0.0, 10.0, 20.0], [1.0, 12.0, 23.0])
    assert mean == 2.0
    assert errors == pytest.approx(2.0 / (1.0 / math.sqrt(3)))
    assert rise_of([0.0, None, 5.0, 1.0], [1.0, 2.0, None, 4.0])[0] == 2.0
    assert rise_of([0.0], [1.0]) == (1.0, 0.0)
    assert rise_of([None], [1.0]) == (0.0, 0.0)
    assert rise_of([0.0, 1.0], [2.0, 3.0]) == (2.0, math.inf)
    assert rise_of([2.0, 3.0], [0.0, 1.0]) == (-2.0, -math.inf)
    assert rise_of([1.0, 2.0], [1.0, 2.0]) == (0.0, 0.0)


def test_a_held_out_reward_that_falls_while_the_trained_one_rises_is_told_once(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    monitors = Monitors(MonitorsConfig(max_held_out_fall=3.0), ["other"])
    first = [0.1, 0.2, 0.3, 0.4]
    up = [0.6, 0.71, 0.79, 0.9]  # + 0.5 and a little, 122.5 standard errors
    down = [-0.1, -0.01, 0.09, 0.2]  # - 0.205, 50 standard errors or so
    monitors.watch_evaluation(_scores(first, other=first), "a")
    monitors.watch_evaluation(_scores(up, other=first), "a")
    monitors.watch_evaluation(_scores(first, other=down), "a")
    monitors.watch_evaluation(_scores(up, other=up), "a")
    assert _messages(caplog) == [], "one of both alone is no sign"
    monitors.watch_evaluation(_scores(up, other=down), "a")
    (message,) = _messages(caplog)
    assert message.startswith("monitors: eval/reward/other, which is not trained, fell by 0.205 (")
    assert "since the first evaluation, while eval/reward/mean rose by 0.5 (" in message
    monitors.watch_evaluation(_scores(up, other=down), "a")
    assert _messages(caplog) == [], "once an event"
    monitors.watch_evaluation(_scores(up, other=first), "a")
    monitors.watch_evaluation(_scores(up, other=down), "a")
    assert len(_messages(caplog)) == 1, "a new event"


def test_changes_within_the_errors_are_not_told(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    first, up, down = [0.0] * 4, [1.0, -0.2, 1.2, -0.1], [-1.0, 0.2, -1.2, 0.1]
    for bound, expected in ((3.0, 0), (1.0, 1)):
        monitors = Monitors(MonitorsConfig(max_held_out_fall=bound), ["other"])
        monitors.watch_evaluation(_scores(first, other=first), "a")
        monitors.watch_evaluation(_scores(up, other=down), "a")
        assert len(_messages(caplog)) == expected
    off = Monitors(MonitorsConfig(max_held_out_fall=None), ["other"])
    off.watch_evaluation(_scores([0.0, 0.0], other=[0.0, 0.0]), "a")
    off.watch_evaluation(_scores([1.0, 1.0], other=[-1.0, -1.0]), "a")
    assert _messages(caplog) == []


def test_samples_without_a_score_are_left_out_of_both(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    monitors = Monitors(MonitorsConfig(), ["other"])
    monitors.watch_evaluation(_scores([0.0, NAN, 0.0], other=[0.0, 0.0, NAN]), "a")
    monitors.watch_evaluation(_scores([1.0, 1.0, 1.0], other=[-1.0, -1.0, 9.0]), "a")
    (message,) = _messages(caplog)
    assert "fell by 1 (inf standard errors)" in message


def test_another_evaluation_begins_anew_and_is_told_once(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    before = Monitors(MonitorsConfig(), ["other"])
    before.watch_evaluation(_scores([0.0, 0.0], other=[0.0, 0.0]), "a")
    before.watch_evaluation(_scores([1.0, 1.0], other=[-1.0, -1.0]), "a")
    assert len(_messages(caplog)) == 1
    monitors = Monitors(MonitorsConfig(), ["other"])
    monitors.load(before.state())
    # As many samples, so that only the digest tells.
    monitors.watch_evaluation(_scores([1.0, 1.0], other=[-1.0, -1.0]), "b")
    (message,) = _messages(caplog)
    assert message.startswith("monitors: the evaluation has other prompts or settings than before")
    assert "; got b after a; set data.eval and eval as they were" in message
    monitors.watch_evaluation(_scores([2.0, 2.0], other=[-2.0, -2.0]), "b")
    (message,) = _messages(caplog)
    assert "fell by 1 (inf standard errors)" in message, "a new event, against the new first"


def test_the_first_evaluation_is_the_first_that_scores_a_reward_at_least_twice(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    monitors = Monitors(MonitorsConfig(), ["early", "late"])
    nothing, one = [NAN] * 3, [NAN, 5.0, NAN]
    monitors.watch_evaluation(_scores([0.0] * 3, early=[0.0] * 3, late=nothing), "a")
    monitors.watch_evaluation(_scores([1.0] * 3, early=[1.0] * 3, late=one), "a")
    monitors.watch_evaluation(_scores([2.0] * 3, early=[2.0] * 3, late=[9.0, 9.0, NAN]), "a")
    assert _messages(caplog) == []
    monitors.watch_evaluation(_scores([2.0] * 3, early=[2.0] * 3, late=[7.0, 7.0, 7.0]), "a")
    assert _messages(caplog) == [], "the trained one has not risen since late's first"
    monitors.watch_evaluation(_scores([2.5] * 3, early=[-1.0] * 3, late=[7.0, 7.0, 7.0]), "a")
    early, late = _messages(caplog)
    assert "eval/reward/early, which is not trained, fell by 1 (inf" in early
    assert "eval/reward/mean rose by 2.5 (" in early
    assert "eval/reward/late, which is not trained, fell by 2 (inf" in late
    assert "eval/reward/mean rose by 0.5 (" in late


def test_a_trained_reward_with_one_score_is_no_first_either(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    monitors = Monitors(MonitorsConfig(), ["other"])
    monitors.watch_evaluation(_scores([0.0, NAN], other=[0.0, 0.0]), "a")
    monitors.watch_evaluation(_scores([1.0, 1.0], other=[5.0, 5.0]), "a")
    monitors.watch_evaluation(_scores([2.0, 2.0], other=[4.0, 4.0]), "a")
    (message,) = _messages(caplog)
    assert "fell by 1 (inf" in message
    assert "rose by 1 (inf" in message


def test_what_makes_the_samples_of_an_evaluation_is_in_its_digest() -> None:
    config = EvalConfig()
    changes: list[dict[str, Any]] = [
        {"seed": 1},
        {"num_inference_steps": 3},
        {"samples_per_prompt": 2},
        {"num_prompts": 5},
    ]
    digests = {evaluation_digest("p", replace(config, **change)) for change in changes}
    digests |= {evaluation_digest("p", config), evaluation_digest("q", config)}
    assert len(digests) == 6
    assert evaluation_digest("p", replace(config, every=3, chunk_size=2)) == evaluation_digest(
        "p", config
    )


def test_diversity_below_a_part_of_the_first_is_told_once(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    monitors = Monitors(MonitorsConfig(min_diversity=0.5), [])
    for value in (0.8, 0.41, 0.4):
        monitors.watch_diversity({"rollout/diversity/image": value})
    assert _messages(caplog) == []
    monitors.watch_diversity({"rollout/diversity/image": 0.39})
    (message,) = _messages(caplog)
    assert message.startswith(
        "monitors: rollout/diversity/image is 0.39, less than 0.5 of the first 0.8: the samples of a"
    )
    monitors.watch_diversity({"rollout/diversity/image": 0.2})
    assert _messages(caplog) == []
    off = Monitors(MonitorsConfig(min_diversity=None), [])
    for value in (0.8, 0.1):
        off.watch_diversity({"rollout/diversity/image": value})
    assert _messages(caplog) == []


def test_what_was_seen_and_told_survives_a_checkpoint(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    before = Monitors(MonitorsConfig(), ["other"])
    before.watch_evaluation(_scores([0.0, 0.0, NAN], other=[0.0, 0.0, 0.0]), "a")
    before.watch_diversity({"rollout/diversity/image": 1.0})
    before.watch_diversity({"rollout/diversity/image": 0.1})
    assert len(_messages(caplog)) == 1
    after = Monitors(MonitorsConfig(), ["other"])
    after.load(before.state())
    after.watch_diversity({"rollout/diversity/image": 0.1})
    assert _messages(caplog) == []
    after.watch_evaluation(_scores([1.0, 1.0, 1.0], other=[-1.0, -1.0, -1.0]), "a")
    assert len(_messages(caplog)) == 1


def test_diversity_is_the_mean_distance_of_the_pairs_of_a_group() -> None:
    # Groups 0: 0, 3, 3 -> 3, 3, 0; 1: 1, 2, 4 -> 1, 3, 2. The chunks hold one sample of each.
    values = [[0.0, 1.0], [3.0, 2.0], [3.0, 4.0]]
    chunks = [{"image": torch.tensor(chunk)[:, None].expand(2, 5)} for chunk in values]
    metrics = diversity_metrics(chunks, torch.tensor([0, 1] * 3))
    assert metrics == {"rollout/diversity/image": pytest.approx((3 + 3 + 0 + 1 + 3 + 2) / 6)}
    spread = torch.tensor([[0.0, 0.0], [3.0, 4.0]])  # RMS, not the norm
    batch = {"a": spread, "b": spread.bfloat16()}
    expected = pytest.approx(math.sqrt(25 / 2))
    assert diversity_metrics([batch], torch.tensor([7, 7])) == {
        "rollout/diversity/a": expected,
        "rollout/diversity/b": expected,
    }
    assert diversity_metrics([batch], torch.tensor([7, 8])) == {}


def test_drift_without_a_reference_is_measured_from_iteration_0_only(caplog: Any) -> None:
    start, later = {"image": torch.zeros(2, 4)}, {"image": torch.full((2, 4), 3.0)}
    fresh = Drift(dict, None)
    assert fresh.metrics(start, 0) == {"eval/drift/image": 0.0}
    assert fresh.metrics(later, 5) == {"eval/drift/image": 3.0}
    resumed = Drift(dict, None)
    assert resumed.metrics(later, 5) == resumed.metrics(later, 6) == {}
    (message,) = _messages(caplog)
    assert "eval/drift is not measured: full weights of a resumed run have no base" in message


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("monitors.drift_samples=-1", "drift_samples must be >= 0, 0 for off; got -1"),
        ("monitors.max_held_out_fall=0", "max_held_out_fall must be above 0 or null; got 0"),
        ("monitors.min_diversity=1", "min_diversity must be between 0 and 1, or null; got 1"),
        (
            "eval.rewards=[{name: jpeg_compressibility, weight: 0.5}]",
            "rewards are only logged, so a weight has no effect; got weight 0.5 for",
        ),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(tmp_path, setting)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (
            "[{name: 'tests.tiny_run:brightness'}]",
            r"eval.rewards: a name is given twice, or is one",
        ),
        ("[{name: jpeg_compresibility}]", "no such reward; did you mean jpeg_compressibility?"),
    ],
)
def test_wrong_evaluation_rewards_are_refused_before_the_model(
    tmp_path: Path, rewards: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_inputs(tiny_config(tmp_path, f"eval.rewards={rewards}"))


def darkness(media: Any, prompts: Any, metadata: Any) -> list[float]:
    """The opposite of what is trained, by design."""
    return [-score for score in brightness(media, prompts, metadata)]


DARKNESS = f"eval.rewards=[{{name: '{__name__}:darkness'}}]"
RISING = (
    "eval={every: 1, num_prompts: 4, samples_per_prompt: 2, num_inference_steps: 4}",
    "rollout.num_prompts=4",
    "rollout.group_size=16",
    "algorithm.advantage_std=group",
    "optim.lr=1e-2",
    "iterations=3",
)


def test_a_reward_that_is_only_watched_trains_nothing(tmp_path: Path) -> None:
    watched = train(tiny_trainer(tmp_path / "a", DARKNESS))
    plain = train(tiny_trainer(tmp_path / "b"))
    held_out = [line.pop("eval/reward/darkness") for line in watched if "eval/reward/mean" in line]
    assert held_out == [
        -line["eval/reward/brightness"] for line in plain if "eval/reward/mean" in line
    ]
    assert without_perf(watched) == without_perf(plain)
    assert not any("rollout/reward/darkness" in line for line in watched)


def test_a_run_that_trades_one_reward_for_another_is_told(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    # What is watched is the opposite of what is trained, so any rise at all is a fall of the other.
    overrides = (DARKNESS, *RISING, "monitors.max_held_out_fall=1e-9")
    metrics = train(tiny_trainer(tmp_path, *overrides))
    first, *later = [line["eval/reward/mean"] for line in metrics if "eval/reward/mean" in line]
    rose = [False, *(mean > first for mean in later)]
    begins = sum(now and not before for before, now in itertools.pairwise(rose))
    messages = [m for m in _messages(caplog) if "eval/reward/darkness, which is not trained" in m]
    assert len(messages) == begins >= 1


def test_drift_starts_at_zero_and_is_resumed(tmp_path: Path) -> None:
    overrides = ("iterations=3", "eval.every=1")
    whole = train(tiny_trainer(tmp_path / "whole", *overrides))
    drifts = [line["eval/drift/image"] for line in whole if "eval/drift/image" in line]
    assert len(drifts) == 4
    assert drifts[0] == 0
    assert all(drift > 0 for drift in drifts[1:])
    assert all(line["rollout/diversity/image"] > 0 for line in whole[:3])
    train(tiny_trainer(tmp_path / "parts", *overrides[1:], "iterations=2"))
    run(tiny_config(tmp_path / "parts", *overrides, "resume=true"))
    assert without_perf(metrics_of(tmp_path / "parts")) == without_perf(whole)


def test_a_run_that_resumes_with_other_evaluation_samples_says_so(
    tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level(logging.WARNING)
    overrides = (DARKNESS, "eval.every=1", "monitors.drift_samples=0")
    train(tiny_trainer(tmp_path, *overrides, "iterations=1"))
    overrides = (*overrides, "monitors.max_held_out_fall=null", "resume=true")
    run(tiny_config(tmp_path, *overrides, "iterations=2"))
    told = "the evaluation has other prompts or settings than before"
    assert not any(told in message for message in _messages(caplog))
    run(tiny_config(tmp_path, *overrides, "iterations=4", "eval.seed=5"))
    assert sum(told in message for message in _messages(caplog)) == 1


def test_the_base_is_sampled_once_and_not_at_all_when_off(tmp_path: Path) -> None:
    calls = []
    for samples in (2, 0):
        overrides = ("iterations=2", "eval.every=1", f"monitors.drift_samples={samples}")
        trainer = tiny_trainer(tmp_path / str(samples), *overrides)
        count: list[int] = []
        trainer.engine.pipe.transformer.register_forward_pre_hook(
            lambda *_, count=count: count.append(1)
        )
        metrics = train(trainer)
        assert ("eval/drift/image" in metrics[0]) == bool(samples)
        calls.append(len(count))
    assert calls[0] - calls[1] == 2, "the denoising steps of one chunk, once"


def test_no_evaluation_reward_is_the_default() -> None:
    assert EvalConfig().rewards == ()
    assert replace(EvalConfig(), num_prompts=3).rewards == ()
