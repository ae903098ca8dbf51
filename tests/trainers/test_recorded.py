from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.miles_rollout.tiny import assert_same
from tests.tiny_run import tiny_config, tiny_trainer, train
from trainers.build import read_inputs
from trainers.recorded import RecordedRolloutError, check_rollouts, load_rollout, save_rollout
from trainers.update import TrainingError

HOLE = ("rewards=[{name: 'tests.tiny_run:brightness_with_a_hole'}]", "scoring.overlap=false")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Any:
    output_dir = tmp_path_factory.mktemp("live")
    trainer = tiny_trainer(output_dir, *HOLE, "debug.save_rollouts=true", "eval.every=0")
    metrics = train(trainer)
    return SimpleNamespace(trainer=trainer, metrics=metrics, root=output_dir / "rollouts")


def test_recorded_rollouts_train_the_same_bits(live: Any, tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, *HOLE, f"debug.load_rollouts={live.root}", "eval.every=0")
    transformer, calls = trainer.engine.pipe.transformer, []
    transformer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    metrics = train(trainer)
    expected = live.trainer.policy.tensors()
    assert all(torch.equal(t, expected[name]) for name, t in trainer.policy.tensors().items())
    for got, wanted in zip(metrics, live.metrics, strict=True):
        for key in wanted.keys() - {k for k in wanted if k.startswith("perf/")}:
            assert got[key] == wanted[key], key
    evaluated = 5 * 2  # first, its base, last, before, after; 2 steps each
    assert calls.count(False) == evaluated, "nothing is rolled out"
    assert metrics[0]["rollout/reward/masked"] == 1


def test_a_rollout_comes_back_as_it_was(live: Any, tmp_path: Path) -> None:
    batches, scores = load_rollout(live.root, 1)
    save_rollout(tmp_path, 7, batches, scores)
    again, scores_again = load_rollout(tmp_path, 7)
    assert len(again) == len(batches) == 4
    for a, b in zip(batches, again, strict=True):
        assert torch.equal(a.latents["image"], b.latents["image"])
        assert_same(a.trajectory, b.trajectory)
        assert torch.equal(a.group_ids, b.group_ids)
        assert torch.equal(a.sample_ids, b.sample_ids)
        assert (a.prompts, a.metadata) == (b.prompts, b.metadata)
    assert torch.equal(scores.masked, scores_again.masked)
    assert torch.equal(scores.total, scores_again.total) or scores.masked.any()
    assert scores.total.nan_to_num().tolist() == scores_again.total.nan_to_num().tolist()
    assert scores.total.dtype == scores_again.total.dtype == torch.float64
    assert scores.errors == scores_again.errors
    assert scores.errors
    assert scores.components.keys() == scores_again.components.keys()
    assert scores_again.weights == scores.weights == {"brightness_with_a_hole": 1.0}


def test_recording_again_leaves_nothing_of_the_old_one(live: Any, tmp_path: Path) -> None:
    batches, scores = load_rollout(live.root, 0)
    save_rollout(tmp_path, 0, batches, scores)
    save_rollout(tmp_path, 0, batches[:1], scores)
    assert len(list((tmp_path / "iteration_000000").glob("chunk_*"))) == 1


def test_what_was_not_recorded_is_told(live: Any) -> None:
    check_rollouts(live.root, range(2))
    with pytest.raises(RecordedRolloutError, match=r"iteration 2; got 2 in .*set iterations to 2"):
        check_rollouts(live.root, range(3))
    with pytest.raises(RecordedRolloutError, match="no recorded rollout of iteration 5"):
        load_rollout(live.root, 5)


def test_rollouts_of_other_weights_stop(live: Any, tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tmp_path,
        *HOLE,
        f"debug.load_rollouts={live.root}",
        "optim.lr=0.01",
        "checks.max_ratio_abs_minus_1=1e-6",
    )
    with pytest.raises(TrainingError, match="a recorded rollout fits the weights that sampled it"):
        train(trainer)
    assert trainer.iteration == 1, "the first rollout is of the initial weights, which are the same"


def test_recorded_chunks_that_do_not_split_into_updates_stop(live: Any, tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tmp_path,
        f"debug.load_rollouts={live.root}",
        "rollout.chunk_size=3",
        "optim.updates_per_iteration=3",
    )
    with pytest.raises(TrainingError, match=r"got 4 for optim\.updates_per_iteration 3"):
        train(trainer)


@pytest.mark.parametrize(
    ("algorithm", "missing"),
    [
        (["algorithm.type=grpo_guard"], "without means"),
        (["algorithm.type=diffusion_nft", "rollout.sde_type=ode"], "without final_latents"),
    ],
)
def test_a_record_for_another_algorithm_is_refused_before_a_model_is_loaded(
    live: Any, tmp_path: Path, algorithm: list[str], missing: str
) -> None:
    config = tiny_config(tmp_path, *algorithm, f"debug.load_rollouts={live.root}", "iterations=2")
    with pytest.raises(
        RecordedRolloutError,
        match=f"recorded for another algorithm, {missing}; got .*; set the alg",
    ):
        read_inputs(config)
