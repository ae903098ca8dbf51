import logging
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import trainers.trainer
from miles_rollout import RolloutBatch
from miles_rollout.testing import tiny_qwen_image
from tests.tiny_run import brightness, metrics_of, tiny_config, tiny_trainer, train, without_perf
from trainers.build import build_trainer, read_inputs, run
from trainers.evaluation import Evaluation
from trainers.recorded import load_rollout
from trainers.rewards.scoring import RewardFailure, Scores
from trainers.trainer import Trainer
from trainers.update import TrainingError
from trainers.windows import RandomWindow

TWO_UPDATES = "optim.updates_per_iteration=2"


def _rollout(trainer: Trainer) -> list[RolloutBatch]:
    return list(trainer.rollouts.chunks(trainer.iteration))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three iterations of two updates each, with what they sampled."""
    output_dir = tmp_path_factory.mktemp("live")
    trainer = tiny_trainer(
        output_dir,
        TWO_UPDATES,
        "iterations=3",
        "optim.warmup_updates=4",
        "debug.save_rollouts=true",
        "tracking.media_every=2",
    )
    start = trainer.policy.tensors()
    metrics = train(trainer)
    return SimpleNamespace(trainer=trainer, start=start, metrics=metrics, output_dir=output_dir)


def test_the_ratio_is_one_at_the_first_update_and_not_at_the_second(live: Any) -> None:
    for line in live.metrics[:3]:
        assert line["train/ratio_abs_minus_1"] == 0
        assert line["train/ratio_abs_minus_1/update_0"] == 0
        assert line["train/log_prob_mean_abs_diff"] == line["train/log_prob_max_abs_diff"] == 0
        assert line["train/log_prob_abs_diff/step_0"] == line["train/log_prob_abs_diff/step_2"] == 0
        assert 0 < line["train/ratio_abs_minus_1/update_1"] < 0.1


def test_clip_fraction_and_kl_are_those_of_all_updates(live: Any) -> None:
    clipped = [
        (line["train/clipfrac/update_0"], line["train/clipfrac/update_1"], line["train/clipfrac"])
        for line in live.metrics[:3]
    ]
    assert any(second > 0 for _, second, _ in clipped)
    for first, second, mean in clipped:
        assert first == 0
        assert mean == second / 2
    assert all(line["train/approx_kl"] > 0 for line in live.metrics[:3])


def test_two_updates_are_two_optimizer_steps_an_iteration(live: Any) -> None:
    assert live.trainer.num_updates == 6
    counts = {int(s["step"]) for s in live.trainer.optimizer.state.values() if "step" in s}
    assert counts == {6}


def test_the_learning_rate_warms_up_by_updates(live: Any) -> None:
    # 1/4, 2/4 | 3/4, 1 | 1, 1: the last of each iteration is told
    assert [line["train/lr"] for line in live.metrics[:3]] == [5e-4, 1e-3, 1e-3]


def test_only_the_lora_moved(live: Any) -> None:
    moved = live.trainer.policy.tensors()
    assert any(not torch.equal(moved[name], t) for name, t in live.start.items())
    stock = tiny_qwen_image()
    for component in ("transformer", "vae", "text_encoder"):
        trained = getattr(live.trainer.engine.pipe, component).state_dict()
        for name, tensor in getattr(stock, component).state_dict().items():
            inside = trained.get(name)
            if inside is None:
                head, _, tail = name.rpartition(".")
                inside = trained[f"{head}.base_layer.{tail}"]
            assert torch.equal(inside, tensor), f"{component}.{name}"


def test_every_metric_of_the_contract_is_there_and_finite(live: Any) -> None:
    expected = {
        "iteration",
        *(f"rollout/reward/{n}" for n in ("mean", "std", "brightness", "zero_std_groups")),
        "rollout/reward/masked",
        "rollout/log_prob/mean",
        *(f"rollout/log_prob/image/step_{step}" for step in (0, 2)),
        *(f"train/{n}" for n in ("loss", "ratio_mean", "ratio_abs_minus_1", "clipfrac", "lr")),
        *(f"train/{n}" for n in ("log_prob_mean_abs_diff", "log_prob_max_abs_diff")),
        *(f"train/{n}" for n in ("approx_kl", "grad_norm")),
        *(f"perf/{n}_s" for n in ("rollout", "decode", "reward", "train", "iteration")),
        "perf/samples_per_s",
    }
    assert [line["iteration"] for line in live.metrics] == [0, 1, 2, 3]
    for line in live.metrics[:3]:
        assert expected <= line.keys()
    for line in live.metrics:
        assert all(value is not None and math.isfinite(value) for value in line.values())
    assert ["eval/reward/mean" in line for line in live.metrics] == [True, False, True, True]


def test_pictures_are_written_when_due(live: Any) -> None:
    names = {path.name for path in (live.output_dir / "samples").iterdir()}
    assert names == {
        "iteration_000000_eval_samples.png",
        "iteration_000000_rollout_samples.png",
        "iteration_000002_eval_samples.png",
        "iteration_000002_rollout_samples.png",
        "iteration_000003_eval_samples.png",
        "before_after.png",
    }


def test_prompts_and_noise_follow_seed_and_iteration(live: Any, tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    seen, latents = [], []
    for iteration in (0, 1, 0):
        trainer.iteration = iteration
        batches = _rollout(trainer)
        rollouts = trainer.rollouts
        records = [rollouts.prompts[i] for i in rollouts.sampler.indices(iteration)]
        for number, batch in enumerate(batches):
            assert batch.prompts == [record.prompt for record in records]
            assert batch.sample_ids.tolist() == [number] * 2
            assert batch.group_ids.tolist() == [0, 1]
        seen.append(batches[0].prompts)
        latents.append(torch.cat([batch.latents["image"] for batch in batches]))
    assert seen[0] != seen[1]
    assert torch.equal(latents[0], latents[2])
    assert len({row.numpy().tobytes() for part in latents[:2] for row in part}) == 16
    other = tiny_trainer(tmp_path, "seed=1")
    assert not torch.equal(torch.cat([b.latents["image"] for b in _rollout(other)]), latents[0])


def test_the_window_of_the_iteration_is_rolled_out(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    window = RandomWindow(size=1)
    config = replace(config, rollout=replace(config.rollout, window=window))
    trainer = build_trainer(config, read_inputs(config))
    found = []
    for iteration in range(4):
        found.append(next(trainer.rollouts.chunks(iteration)).trajectory.replayable_steps)
    assert found == [window.choose(i, 4, config.seed) for i in range(4)]
    assert len(set(found)) > 1


def test_the_next_rollout_uses_the_updated_weights(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, "iterations=1")
    before = _rollout(trainer)
    train(trainer)
    trainer.iteration = 0
    after = _rollout(trainer)
    assert before[0].prompts == after[0].prompts
    assert not torch.equal(before[0].latents["image"], after[0].latents["image"])


def test_learning_rate_zero_leaves_every_bit(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, "iterations=1", "optim.lr=0", TWO_UPDATES)
    before = trainer.policy.tensors()
    (line, _) = train(trainer)
    assert all(torch.equal(t, before[name]) for name, t in trainer.policy.tensors().items())
    assert line["train/ratio_abs_minus_1/update_1"] == 0
    assert line["train/grad_norm"] > 0


def test_the_denoiser_runs_no_more_than_it_must(tmp_path: Path) -> None:
    """Samples counted by hooks, with guidance (two branches) and the KL's reference."""
    trainer = tiny_trainer(
        tmp_path,
        "rollout.true_cfg_scale=4",
        "rollout.negative_prompt=' '",
        "eval.every=0",
        "monitors.drift_samples=0",
        "optim.micro_batch_size=1",
    )
    pipe = trainer.engine.pipe
    counts: Counter[str] = Counter()

    def count(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        kind = "train" if torch.is_grad_enabled() else "rollout"
        counts[kind] += len(kwargs["hidden_states"])

    pipe.transformer.register_forward_pre_hook(count, with_kwargs=True)
    pipe.text_encoder.register_forward_pre_hook(lambda *_: counts.update(["text"]))
    train(trainer)
    branches = 2
    evaluated = (2 + 2 + 8 + 8) * 2 * branches  # first, last, the pictures of before and after
    assert counts["rollout"] - evaluated == 2 * 8 * 4 * branches, "iterations x samples x steps"
    assert counts["train"] == 2 * 8 * 2 * branches, "iterations x samples x window"
    sampler = trainer.rollouts.sampler
    assert len(set(sampler.indices(0)) | set(sampler.indices(1))) == 4
    assert counts["text"] == 4 + 9 + 1, "4 training and 9 held-out prompts, and the negative one"


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.true_cfg_scale=4", "rollout.negative_prompt=' '"],
        ["model.dtype=bfloat16", "model.gradient_checkpointing=true"],
        ["model.dtype=bfloat16", "rollout.latent_dtype=float32", "algorithm.kl_beta=0.1"],
        ["rollout.sde_type=cps", "rollout.same_noise=true", "rollout.chunk_size=5"],
    ],
    ids=["guided", "bf16", "bf16-float32-latents", "cps"],
)
def test_the_ratio_starts_at_one_whatever_is_sampled(tmp_path: Path, overrides: list[str]) -> None:
    (line, _) = train(tiny_trainer(tmp_path, "iterations=1", "eval.every=0", *overrides))
    assert line["train/ratio_abs_minus_1"] == 0
    assert line["train/grad_norm"] > 0


def test_a_sample_without_a_score_is_left_out_and_counted(tmp_path: Path) -> None:
    hole = ("rewards=[{name: 'tests.tiny_run:brightness_with_a_hole'}]", "scoring.overlap=false")
    (line, _) = train(tiny_trainer(tmp_path / "a", "iterations=1", *hole, "eval.every=0"))
    assert line["rollout/reward/masked"] == 1
    assert all(value is not None and math.isfinite(value) for value in line.values())
    strict = tiny_trainer(tmp_path / "b", *hole, "scoring.max_masked_fraction=0.1")
    with pytest.raises(RewardFailure, match="1 of 8 samples have no score; got"):
        train(strict)


def test_training_on_other_weights_than_sampled_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny_trainer(tmp_path, "checks.max_ratio_abs_minus_1=1e-6")
    sample = trainer.rollouts.collect

    def sample_then_move(*arguments: Any) -> Any:
        rolled_out = sample(*arguments)
        with torch.no_grad():
            for parameter in trainer.policy.parameters.values():
                parameter.add_(0.01)
        return rolled_out

    monkeypatch.setattr(trainer.rollouts, "collect", sample_then_move)
    with pytest.raises(
        TrainingError,
        match=r"replay is not the rollout.* above 1e-06, largest at step_\d \(log-prob gap",
    ):
        train(trainer)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_full_weights_train_with_and_without_a_reference(tmp_path: Path, beta: float) -> None:
    overrides = ("model.lora=null", "optim.lr=1e-4", f"algorithm.kl_beta={beta}", TWO_UPDATES)
    trainer = tiny_trainer(tmp_path / "whole", *overrides)
    start = trainer.policy.tensors()
    metrics = train(trainer)
    assert metrics[0]["train/ratio_abs_minus_1"] == 0
    assert any(not torch.equal(t, start[name]) for name, t in trainer.policy.tensors().items())
    assert ("train/kl" in metrics[0]) == (beta > 0)
    assert (tmp_path / "whole/samples/before_after.png").exists() == (beta > 0)
    if beta:
        with trainer.policy.reference():
            reference = trainer.engine.pipe.transformer.state_dict()
        stock = tiny_qwen_image().transformer.state_dict()
        assert all(torch.equal(reference[name], tensor) for name, tensor in stock.items())
        # The KL of a resumed run is to the base as well, not to what it resumed from.
        train(tiny_trainer(tmp_path / "parts", *overrides, "iterations=1"))
        run(tiny_config(tmp_path / "parts", *overrides, "resume=true"))
        assert without_perf(metrics_of(tmp_path / "parts")) == without_perf(metrics)


@pytest.mark.parametrize("reward", ["brightness", "brightness_with_a_hole"])
def test_every_sample_is_trained_with_its_own_advantage(tmp_path: Path, reward: str) -> None:
    """The iteration's gradient, computed again from the pictures, in chunks that mix the groups."""
    overrides = ("iterations=1", "rollout.chunk_size=3", "optim.max_grad_norm=1e9")
    # The fourth of all has no score, not that of a chunk.
    rewards = (f"rewards=[{{name: 'tests.tiny_run:{reward}'}}]", "scoring.overlap=false")
    trainer = tiny_trainer(tmp_path / "a", *overrides, *rewards, "debug.save_rollouts=true")
    train(trainer)
    got = {n: p.grad for n, p in trainer.policy.parameters.items() if p.grad is not None}

    fresh = tiny_trainer(tmp_path / "b", *overrides)
    batches, _ = load_rollout(tmp_path / "a/rollouts", 0)
    scores: dict[tuple[int, int], float] = {}
    for batch in batches:
        media = fresh.engine.decode(batch.latents, **batch.trajectory.request)
        keys = zip(batch.group_ids.tolist(), batch.sample_ids.tolist(), strict=True)
        scores |= dict(zip(keys, brightness(media, [], []), strict=True))
    live = [key for i, key in enumerate(scores) if reward == "brightness" or i != 3]
    spread = stdev([scores[key] for key in live]) + 1e-4
    terms = []
    for batch in batches:
        for row, (group, number) in enumerate(
            zip(batch.group_ids.tolist(), batch.sample_ids.tolist(), strict=True)
        ):
            if (group, number) not in live:
                continue
            mean = fmean(scores[key] for key in live if key[0] == group)
            advantage = (scores[group, number] - mean) / spread
            for step in (0, 2):
                log_prob = fresh.engine.replay(batch.trajectory, step, [row]).log_prob
                terms.append(-advantage * (log_prob - log_prob.detach()).exp())
    loss = torch.cat(terms).mean()
    assert len(terms) == 2 * len(live)
    expected = torch.autograd.grad(
        loss, [fresh.policy.parameters[name] for name in got], allow_unused=True
    )
    for (name, gradient), wanted in zip(got.items(), expected, strict=True):
        assert wanted is not None
        assert torch.allclose(gradient, wanted, rtol=1e-3, atol=1e-8), name
    assert max(gradient.abs().max() for gradient in got.values()) > 1e-4


def test_accumulating_micro_batches_trains_alike(tmp_path: Path) -> None:
    whole = tiny_trainer(tmp_path / "a", "iterations=1", "rollout.chunk_size=5")
    parts = tiny_trainer(
        tmp_path / "b", "iterations=1", "rollout.chunk_size=5", "optim.micro_batch_size=2"
    )
    (a, _), (b, _) = train(whole), train(parts)
    assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4)
    assert a["train/ratio_abs_minus_1"] == 0
    assert b["train/ratio_abs_minus_1"] < 1e-5


def _scripted(monkeypatch: pytest.MonkeyPatch, means: list[float]) -> None:
    left = iter(means)

    def evaluate(*_: Any, **__: Any) -> Evaluation:
        total = torch.tensor([next(left)], dtype=torch.float64)
        scores = Scores(total=total, components={}, masked=torch.tensor([False]), errors=())
        return Evaluation(scores=scores, media=[], prompts=[])

    monkeypatch.setattr(trainers.trainer, "evaluate", evaluate)
    monkeypatch.setattr(trainers.trainer.Drift, "metrics", lambda *_: {})
    monkeypatch.setattr(Trainer, "_show_before_and_after", lambda self: None)
    monkeypatch.setattr(Evaluation, "samples", lambda evaluation: [])


def test_the_best_checkpoint_outlives_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _scripted(monkeypatch, [0.1, 0.9, 0.3, 0.2, 0.5])
    trainer = tiny_trainer(tmp_path, "iterations=4", "eval.every=1", "checkpoint.keep=1")
    train(trainer)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["best.json", "iteration_000001", "iteration_000004"]
    assert trainer.best == {"iteration": 1, "reward": 0.9}
    assert '"folder": "iteration_000001"' in (tmp_path / "checkpoints/best.json").read_text()


def test_the_pointer_to_the_best_is_mended_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _scripted(monkeypatch, [0.1, 0.9, 0.9])
    train(tiny_trainer(tmp_path, "iterations=1", "eval.every=1"))
    pointer = tmp_path / "checkpoints/best.json"
    before = pointer.read_text()
    pointer.unlink()
    run(tiny_config(tmp_path, "iterations=1", "resume=true"))
    assert pointer.read_text() == before


def test_a_failing_last_evaluation_does_not_lose_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _scripted(monkeypatch, [0.1])
    with pytest.raises(StopIteration):
        train(tiny_trainer(tmp_path, "iterations=1", "checkpoint.every=5"))
    assert (tmp_path / "checkpoints/iteration_000001/state.json").exists()


def test_a_missing_wandb_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        metrics = train(tiny_trainer(tmp_path, "iterations=1", "tracking.wandb=offline"))
    assert len(metrics) == 2
    assert "W&B is off from here on" in caplog.text


def test_no_trajectory_holds_a_graph(tmp_path: Path) -> None:
    tensors: list[Tensor] = []
    for batch in _rollout(tiny_trainer(tmp_path)):
        tensors += [*batch.latents.values(), batch.trajectory.log_probs]
        tensors += [stream.latents for stream in batch.trajectory.streams.values()]
    assert not any(tensor.requires_grad for tensor in tensors)
