"""Runs of GRPO's relatives: what is trained is what was asked for, counted at the denoiser."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import generate
from tests.tiny_run import metrics_of, tiny_config, tiny_trainer, train, without_perf
from trainers.build import read_inputs, run
from trainers.checkpoint import load_checkpoint
from trainers.config import TrainConfig
from trainers.dry_run import describe
from trainers.trainer import Trainer

ONE = ("iterations=1", "eval={every: 0, num_prompts: 1, samples_per_prompt: 1}")
DANCE = (
    "algorithm.type=dance_grpo",
    "rollout.sde_type=dance_sde",
    "rollout.same_noise=true",
    "rollout.window={type: all, exclude_last: true}",
)


def _trained_samples(trainer: Trainer) -> Counter[str]:
    """Samples that pass through the denoiser with gradients, once `train` has run."""
    counts: Counter[str] = Counter()

    def count(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            counts["train"] += len(kwargs["hidden_states"])

    trainer.engine.pipe.transformer.register_forward_pre_hook(count, with_kwargs=True)
    return counts


def _described(config: TrainConfig) -> str:
    return describe(config, read_inputs(config))


def test_dance_trains_a_part_of_the_window_drawn_for_each_chunk(tmp_path: Path) -> None:
    """0.6 of three steps is one; the chunks draw theirs apart."""
    trainer = tiny_trainer(tmp_path, *ONE, *DANCE)
    counts = _trained_samples(trainer)
    (line, _) = train(trainer)
    assert counts["train"] == 8 * 1
    assert line["train/ratio_abs_minus_1"] == 0
    told = {name for name in line if name.startswith("train/log_prob_abs_diff/")}
    assert 1 < len(told) <= 3, "four chunks, one step each"
    text = _described(tiny_config(tmp_path, *ONE, *DANCE))
    assert "train 8 = 8 x 1 steps x 1, with backward" in text
    assert "1 updates of 8 samples x 1 trained steps drawn of [0, 1, 2] for each chunk" in text


def test_the_first_part_of_the_window_is_trained_where_asked_for(tmp_path: Path) -> None:
    part = ("algorithm.timestep_fraction=0.99", "rollout.window={type: all}")
    trainer = tiny_trainer(tmp_path, *ONE, *part)
    counts = _trained_samples(trainer)
    (line, _) = train(trainer)
    assert counts["train"] == 8 * 3
    told = {n.rpartition("_")[2] for n in line if n.startswith("train/log_prob_abs_diff/")}
    assert told == {"0", "1", "2"}
    text = _described(tiny_config(tmp_path, *ONE, *part))
    assert "x 3 trained steps [0, 1, 2] (window of iteration 0)" in text


def test_only_the_best_and_the_worst_of_a_group_are_replayed(tmp_path: Path) -> None:
    chosen = ("algorithm.best_of_group=1", "algorithm.worst_of_group=1", "rollout.chunk_size=8")
    trainer = tiny_trainer(tmp_path, *ONE, *chosen)
    counts = _trained_samples(trainer)
    (line, _) = train(trainer)
    assert counts["train"] == 4 * 2, "two of four samples of each prompt, two steps"
    assert line["train/num_samples"] == 4
    assert line["train/ratio_abs_minus_1"] < 1e-5
    assert line["train/grad_norm"] > 0
    text = _described(tiny_config(tmp_path, *ONE, *chosen))
    assert "train 8 = 4 x 2 steps x 1, with backward" in text


def test_a_chunk_of_which_nothing_is_trained_adds_nothing(tmp_path: Path) -> None:
    """One row a chunk: those that are not chosen weigh 0, and the mean is over the others."""
    chosen = ("algorithm.best_of_group=1", "algorithm.worst_of_group=1")
    lines = [
        train(tiny_trainer(tmp_path / rows, *ONE, *chosen, f"rollout.chunk_size={rows}"))[0]
        for rows in ("1", "8")
    ]
    assert [line["train/num_samples"] for line in lines] == [4, 4]
    assert lines[0]["train/grad_norm"] == pytest.approx(lines[1]["train/grad_norm"], rel=1e-3)


def test_samples_without_an_advantage_are_not_replayed(tmp_path: Path) -> None:
    """The samples of one prompt have one score, so it teaches nothing."""
    settings = (
        "algorithm.skip_zero_advantages=true",
        "rollout.chunk_size=8",
        "rewards=[{name: 'tests.trainers.test_algorithm_runs:first_prompt'}]",
    )
    trainer = tiny_trainer(tmp_path, *ONE, *settings)
    counts = _trained_samples(trainer)
    (line, _) = train(trainer)
    assert counts["train"] == 4 * 2
    assert line["train/num_samples"] == 4


def first_prompt(media: Any, prompts: list[str], metadata: Any) -> list[float]:
    """Tells the samples of the first prompt apart, and no others."""
    return [float(i) if prompt == prompts[0] else 1.0 for i, prompt in enumerate(prompts)]


def test_a_run_from_a_lora_starts_there_and_resumes(tmp_path: Path) -> None:
    first = run(tiny_config(tmp_path / "first", *ONE, "optim.lr=1e-2"))
    saved = first / "checkpoints/iteration_000001"
    settings = (
        *ONE, "iterations=2", f"model.lora.start={saved}",
        "algorithm={kl_beta: 0.1, reference: start}",
    )  # fmt: skip
    run(tiny_config(tmp_path / "whole", *settings))
    run(tiny_config(tmp_path / "parts", *settings, "iterations=1"))
    run(tiny_config(tmp_path / "parts", *settings, "resume=true"))
    whole = metrics_of(tmp_path / "whole")
    assert without_perf(metrics_of(tmp_path / "parts")) == without_perf(whole)
    assert whole[0]["train/ratio_abs_minus_1"] == 0
    assert 0 == whole[0]["train/kl"] < whole[1]["train/kl"]
    tensors, _ = load_checkpoint(tmp_path / "whole/checkpoints/iteration_000002")
    start, _ = load_checkpoint(saved)
    assert tensors["start"].keys() == start["policy"].keys()
    assert all(torch.equal(tensors["start"][n], t) for n, t in start["policy"].items())
    assert any(not torch.equal(tensors["policy"][n], t) for n, t in start["policy"].items())
    shutil.rmtree(first)
    drawn = generate.generate(tmp_path / "whole", ["a cat"], tmp_path / "out", seed=0, count=1)
    assert drawn.is_file(), "a checkpoint holds all weights, also where the start is gone"
