from pathlib import Path

import pytest

from miles_rollout.testing import tiny_qwen_image
from tests.tiny_run import ROOT, tiny_config, tiny_trainer
from trainers.build import read_inputs
from trainers.config import TrainConfig
from trainers.config_loader import load, to_yaml
from trainers.dry_run import describe


def _described(*overrides: str) -> str:
    config = tiny_config(Path("runs/x"), *overrides)
    return describe(config, read_inputs(config))


def test_the_resolved_config_comes_first() -> None:
    config = tiny_config(Path("runs/x"))
    assert describe(config, read_inputs(config)).startswith(to_yaml(config))


def test_batch_arithmetic_is_told() -> None:
    text = _described("rollout.chunk_size=3", "optim.micro_batch_size=2")
    assert "2 prompts x 4 samples = 8 samples an iteration, in 3 chunks of 3 rows" in text
    assert "1 updates of 8 samples x 2 trained steps [0, 2]" in text
    assert "backward of 2 rows at a time" in text
    assert "192 prompts to train on; 32 prompts held out" in text
    assert "evaluation of 2 held-out prompts x 1 samples" in text


@pytest.mark.parametrize(
    ("overrides", "rollout", "train"),
    [
        ([], "rollout 32 = 8 x 4 steps x 1", "train 16 = 8 x 2 steps x 1,"),
        (
            ["rollout.true_cfg_scale=4", "rollout.negative_prompt=' '", "algorithm.kl_beta=0.1"],
            "rollout 64 = 8 x 4 steps x 2 (guidance)",
            "train 32 = 8 x 2 steps x 2, with backward\n  reference 32, without backward",
        ),
    ],
)
def test_denoiser_forwards_are_those_that_a_run_makes(
    overrides: list[str], rollout: str, train: str
) -> None:
    text = _described(*overrides)
    assert rollout in text
    assert train in text


@pytest.mark.parametrize("lora", ["{rank: 4, alpha: 8}", "null"])
def test_parameters_are_those_of_the_model(tmp_path: Path, lora: str) -> None:
    text = _described(f"model.lora={lora}")
    trainer = tiny_trainer(tmp_path, f"model.lora={lora}")
    trained = sum(p.numel() for p in trainer.policy.parameters.values())
    assert f"trained {trained / 1e6:.2f} M parameters" in text
    total = sum(p.numel() for p in tiny_qwen_image().transformer.parameters())
    assert f"denoiser {total / 1e6:.1f} M parameters" in text


def test_the_released_model_is_measured_without_loading_it() -> None:
    path = ROOT / "configs/qwen_image/flow_grpo_aligned.yaml"
    config = load(TrainConfig, [path], [f"data.{k}={ROOT / v}" for k, v in _files().items()])
    text = describe(config, read_inputs(config))
    assert "denoiser 20430.4 M parameters, 38.1 GiB (sizes of the released Qwen-Image)" in text
    assert "512.0 MiB (65536 image elements each)" in text
    assert "rollout 10240 = 512 x 10 steps x 2 (guidance)" in text
    assert "2 updates of 256 samples x 2 trained steps" in text


def _files() -> dict[str, str]:
    return {
        "train": "configs/prompts/general_train.txt",
        "eval": "configs/prompts/general_eval.txt",
    }


def test_the_released_h3_is_measured_in_both_streams_and_in_host_memory() -> None:
    path = ROOT / "configs/minimax_h3/t2va_video_only.yaml"
    config = load(TrainConfig, [path], [f"data.{k}={ROOT / v}" for k, v in _files().items()])
    text = describe(config, read_inputs(config))
    # Of the two partitions that the release holds only that of the workflow is loaded.
    assert "denoiser 33123.0 M parameters, 61.7 GiB (sizes of the released MiniMax-H3)" in text
    # 37 latent frames of 48 x 84 positions and 24 channels; 207 latents of 2 x 32 channels.
    assert f"({37 * 48 * 84 * 24} video, {207 * 2 * 32} audio elements each)" in text
    assert "rollout 160 = 16 x 10 steps x 1" in text
    assert f"decoded videos of an iteration {16 * 124 * 3 * 768 * 1344 * 4 / 2**30:.1f} GiB" in text


def test_what_is_not_known_is_said() -> None:
    text = _described("model.pipeline=someone/else")
    assert "not known: 'someone/else' is no folder here" in text
    assert "rollout 32 = 8 x 4 steps x 1" in text


def test_a_shared_prefix_is_counted_and_its_memory_told(tmp_path: Path) -> None:
    overrides = (
        "rollout.same_noise=true", "rollout.share_prefix=true",
        "rollout.window={type: fixed, steps: [2]}",
    )  # fmt: skip
    text = _described(*overrides)
    assert "rollout 20 = (2 prompts x 2 shared steps + 8 x 2) x 1" in text
    trainer = tiny_trainer(tmp_path, *overrides)
    rows: list[int] = []
    trainer.engine.pipe.transformer.register_forward_pre_hook(
        lambda _, __, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    batches = list(trainer.rollouts.chunks(0))
    assert sum(rows) == 20
    state = batches[0].trajectory.streams["image"].latents[0, 0]
    size = 2 * 2 * state.numel() * 4
    assert f"shared prefix: answers of at most {size / 1024:.1f} KiB" in text
