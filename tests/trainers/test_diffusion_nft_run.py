"""Runs on the forward process: an old policy samples, and nothing has a log-prob."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_run import metrics_of, tiny_config, tiny_trainer, train, without_perf
from tests.trainers.test_update import move_adapter
from trainers.build import read_inputs, run
from trainers.checkpoint import load_checkpoint
from trainers.dry_run import describe
from trainers.iteration_metrics import Clock

NFT = (
    "algorithm={type: diffusion_nft, old_policy: {flat: 1, rate: 0.25, hold: 0.5}}",
    "rollout.sde_type=ode",
    "rollout.group_size=2",
    "rollout.chunk_size=4",
    "rollout.num_inference_steps=3",
    "rollout.window={type: fixed, steps: [0, 1]}",
    "iterations=3",
    "eval.every=0",
)


@pytest.mark.parametrize("lora", ["{rank: 4, alpha: 8}", "null"], ids=["lora", "full"])
def test_a_resumed_run_is_the_uninterrupted_one_with_its_old_policy(
    tmp_path: Path, lora: str
) -> None:
    overrides = (*NFT, f"model.lora={lora}", "optim.lr=1e-3")
    run(tiny_config(tmp_path / "whole", *overrides))
    run(tiny_config(tmp_path / "parts", *overrides, "iterations=2"))
    run(tiny_config(tmp_path / "parts", *overrides, "resume=true"))
    whole, parts = (metrics_of(tmp_path / name) for name in ("whole", "parts"))
    assert without_perf(whole) == without_perf(parts)
    assert [line["train/old_policy_decay"] for line in whole[:3]] == [0.0, 0.0, 0.25]
    for line in whole[:3]:
        assert line["train/old_deviation"] == 0, "before the first update they are equal"
        assert line["train/nft_loss"] > 0
        assert line["train/grad_norm"] > 0
        assert not [name for name in line if "ratio_" in name or "log_prob" in name]
    # Full weights: the base is no copy of what is trained, so the KL starts at 0 and grows.
    assert 0 == whole[0]["train/velocity_kl"] < whole[2]["train/velocity_kl"]
    saved = [
        load_checkpoint(tmp_path / name / "checkpoints/iteration_000003")[0]
        for name in ("whole", "parts")
    ]
    assert saved[0].keys() == {"policy", "old", "optimizer"}
    for group, members in saved[0].items():
        assert all(torch.equal(t, saved[1][group][name]) for name, t in members.items()), group
    last, before = saved[0], load_checkpoint(tmp_path / "whole/checkpoints/iteration_000002")[0]
    followed = {
        name: 0.25 * before["old"][name] + 0.75 * tensor for name, tensor in last["policy"].items()
    }
    for name, tensor in last["old"].items():
        torch.testing.assert_close(tensor, followed[name])
    assert any(not torch.equal(t, last["policy"][name]) for name, t in last["old"].items())


def _collected(trainer: Any) -> Tensor:
    batches, _ = trainer.rollouts.collect(0, Clock())
    return torch.cat([batch.latents["image"] for batch in batches])


def test_the_old_policy_samples_and_keeps_no_trajectory(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, *NFT, "rollout.chunk_size=2")
    before = _collected(trainer)
    move_adapter(trainer.policy)
    assert torch.equal(_collected(trainer), before)
    trainer.policy.update_old(0.0)
    assert not torch.equal(_collected(trainer), before)
    (batch, _) = trainer.rollouts.collect(0, Clock())[0]
    held = batch.trajectory.streams["image"]
    assert held.latent_step_indices.tolist() == [3]
    assert torch.equal(held.latents[:, 0], batch.latents["image"])
    assert batch.trajectory.call_steps == (0, 1)
    assert not held.log_probs.any()


def test_a_stochastic_sampler_may_sample_too_and_in_micro_batches(tmp_path: Path) -> None:
    """The forward process draws its own noise, so a row's does not depend on the micro-batch."""
    lines = []
    for micro in ("null", "1"):
        trainer = tiny_trainer(
            tmp_path / micro, *NFT, "rollout.sde_type=sde", f"optim.micro_batch_size={micro}",
            "iterations=1",
        )  # fmt: skip
        lines.append(train(trainer)[0])
    whole, parts = lines
    for name in ("train/loss", "train/grad_norm", "train/nft_loss"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-3), name
    assert parts["rollout/reward/mean"] == whole["rollout/reward/mean"]


def test_what_a_run_costs_is_told_before(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *NFT)
    text = describe(config, read_inputs(config))
    assert "train 8 = 4 x 2 steps x 1, with backward" in text
    assert "  reference 8, without backward: the same samples and steps" in text
    assert "  old policy 8, without backward: the same samples and steps" in text
    trainer = tiny_trainer(tmp_path / "run", *NFT, "iterations=1")
    counts = {True: 0, False: 0}

    def count(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        counts[torch.is_grad_enabled()] += len(kwargs["hidden_states"])

    batches, scores = trainer.rollouts.collect(0, Clock())
    group_ids = torch.cat([b.group_ids for b in batches])
    advantages = trainer.algorithm.advantages(scores, group_ids)
    trainer.engine.pipe.transformer.register_forward_pre_hook(count, with_kwargs=True)
    trainer._train(batches, advantages, ~scores.masked)
    assert counts == {True: 8, False: 16}
