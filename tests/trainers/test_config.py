from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import ROOT, tiny_config
from trainers.config import RolloutConfig, TrainConfig
from trainers.config_loader import ConfigError, from_tree, load, to_tree, to_yaml


def _problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(TrainConfig, [], overrides)
    return str(caught.value).splitlines()


def test_the_defaults_are_a_config() -> None:
    config = load(TrainConfig, [])
    assert config == TrainConfig()
    assert config.rollout.num_samples == 96


def test_the_resolved_config_is_read_back_equal(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        "algorithm.clip_range=[1e-4, 2e-4]",
        "model.lora=null",
        "optim.betas=[0.5, 0.9]",
        "rollout.window.steps=[1, 3]",
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(TrainConfig, [tmp_path / "config.yaml"]) == config
    assert from_tree(TrainConfig, to_tree(config), "a checkpoint") == config


def test_a_tree_that_is_no_config_names_its_label() -> None:
    tree = to_tree(TrainConfig()) | {"sead": 1, "iterations": 0.5}
    with pytest.raises(ConfigError) as caught:
        from_tree(TrainConfig, tree, "runs/x/iteration_000001")
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert all(line.endswith("(from runs/x/iteration_000001)") for line in lines)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("iterations=0", "iterations must be at least 1; got 0"),
        ("iterations=1.5", "iterations: input should be a valid integer"),
        ("itertions=3", "itertions: no such key; did you mean iterations?"),
        ("rollout.num_stpes=3", "rollout.num_stpes: no such key; did you mean"),
        ("rollout.num_prompts=0", "num_prompts must be at least 1; got 0"),
        ("rollout.group_size=1", "group_size must be at least 2"),
        ("rollout.chunk_size=97", "chunk_size must be in 1..num_prompts * group_size = 96"),
        ("rollout.height=0", "height must be at least 1; got 0"),
        ("rollout.sde_type=ode", "an ode rollout has no log-prob to train on"),
        ("rollout.sde_type=flow", "rollout.sde_type: input should be"),
        ("rollout.sde_type=cps", "cps has no density in the last step 9"),
        ("rollout.noise_level=0", "a stochastic step without noise has no density"),
        ("rollout.noise_level=nan", "rollout.noise_level: "),
        ("rollout.true_cfg_scale=4", "has no effect without a negative prompt"),
        ("rollout.true_cfg_scale=0.5", "true_cfg_scale must be at least 1"),
        ("rollout.negative_prompt=' '", "negative_prompt has no effect at true_cfg_scale 1"),
        ("rollout.window={type: fixed, steps: [10]}", "step 10 does not exist; got 10 steps"),
        ("rollout.window={type: fixed, steps: [1, 1]}", "one or more different steps"),
        ("rollout.window={type: random, size: 11}", "do not fit; got 10 steps"),
        ("rollout.window={type: sliding}", "rollout.window"),
        ("model.pipeline=tiny-qwen-imag", "did you mean tiny-qwen-image"),
        ("model.pipeline=./nowhere", "the folder holds no model_index.json"),
        ("model.dtype=float16", "model.dtype: input should be 'float32' or 'bfloat16'"),
        ("model.num_threads=0", "must be at least 1 or null; got num_threads 0"),
        ("model.lora.dropout=0.1", "rollout and replay would see different masks"),
        ("model={lora: null, dtype: bfloat16}", "lose small updates"),
        ("optim.updates_per_iteration=0", "updates_per_iteration must be at least 1"),
        ("optim.updates_per_iteration=3", "must divide the iteration's 16 chunks of 6 rows"),
        ("optim.micro_batch_size=0", "micro_batch_size must be at least 1"),
        ("optim.micro_batch_size=7", "splits chunks and joins none; got 7 above the 6 rows"),
        ("optim.lr=-1", "must be >= 0 and max_grad_norm > 0; got -1"),
        ("optim.max_grad_norm=0", "max_grad_norm > 0"),
        ("optim.betas=[1.0, 0.9]", "betas must be within 0..1"),
        ("optim.eps=-1", "eps and weight_decay must be >= 0"),
        ("optim.weight_decay=-1", "eps and weight_decay must be >= 0"),
        ("algorithm.clip_range=0", "clip_range must be positive and finite"),
        ("algorithm.kl_beta=-1", "kl_beta must be finite and >= 0"),
        ("algorithm.type=ppo", "algorithm.type: must be one of 'grpo', 'grpo_guard', "),
        ("eval.samples_per_prompt=0", "samples_per_prompt must be at least 1"),
        ("eval.every=-1", "every must be >= 0"),
        ("checkpoint.every=0", "every and keep must be at least 1"),
        ("checks.max_ratio_abs_minus_1=-1", "max_ratio_abs_minus_1 must be >= 0"),
        ("tracking.wandb=on", "tracking.wandb: input should be"),
        ("debug={save_rollouts: true, load_rollouts: x}", "set one of them"),
    ],
)
def test_a_mistake_is_one_line_with_its_source(override: str, message: str) -> None:
    (line,) = _problems(override)
    assert message in line
    assert override.partition("=")[0] in line
    assert line.endswith(")"), "the source is named last"


def test_all_mistakes_are_told_at_once() -> None:
    lines = _problems("itertions=3", "optim.lr=-1", "rollout.group_size=1", "eval.every=x")
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("window", "is_allowed"),
    [
        ({"type": "all", "exclude_last": True}, True),
        ({"type": "fixed", "steps": [0, 8]}, True),
        ({"type": "fixed", "steps": [0, 9]}, False),
        ({"type": "random", "size": 2}, False),
        ({"type": "random", "size": 2, "start_max": 7}, True),
        ({"type": "random", "size": 2, "start_max": 8}, False),
    ],
)
def test_cps_is_refused_for_every_window_that_reaches_the_last_step(
    window: dict[str, Any], is_allowed: bool
) -> None:
    tree = {"rollout": {"sde_type": "cps", "window": window}}
    if is_allowed:
        from_tree(TrainConfig, tree, "a test")
        return
    with pytest.raises(ConfigError, match="cps has no density in the last step 9"):
        from_tree(TrainConfig, tree, "a test")


@pytest.mark.parametrize("text", ["False", "false", "no", "0", "off"])
def test_a_typed_no_is_false(text: str) -> None:
    config = load(TrainConfig, [], [f"model.gradient_checkpointing={text}"])
    assert config.model.gradient_checkpointing is False


def test_later_sources_win(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("seed: 7\niterations: 9\n")
    path = ROOT / "configs/qwen_image/tiny_cpu.yaml"
    config = load(TrainConfig, [path, overlay], ["iterations=3"])
    assert (config.seed, config.iterations, config.rollout.chunk_size) == (7, 3, 48)


def test_batch_arithmetic() -> None:
    rollout = RolloutConfig(num_prompts=3, group_size=5, chunk_size=4)
    assert (rollout.num_samples, rollout.rows, rollout.num_chunks) == (15, 4, 4)
    assert RolloutConfig(num_prompts=3, group_size=5).num_chunks == 5


def test_only_states_around_stochastic_steps_are_kept() -> None:
    params = RolloutConfig(num_inference_steps=6).params((4, 1))
    assert params.sde_step_indices is not None
    assert params.return_step_indices is not None
    assert sorted(params.sde_step_indices) == [1, 4]
    assert list(params.return_step_indices) == [1, 2, 4, 5]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.share_prefix=true"], "share_prefix needs samples that start from one noise"),
        (
            ["rollout.share_prefix=true", "rollout.same_noise=true", "rollout.chunk_size=4"],
            "share_prefix needs chunks of the same prompts; got chunk_size 4 for 6 prompts",
        ),
    ],
)
def test_a_prefix_is_shared_only_where_it_can_be(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(TrainConfig, ["configs/qwen_image/tiny_cpu.yaml"], overrides)
