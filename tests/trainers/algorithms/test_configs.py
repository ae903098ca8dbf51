"""The config of each algorithm, on the random pipeline and with few samples: one whole iteration."""

from pathlib import Path

import pytest

from tests.tiny_run import OVERRIDES, metrics_of
from trainers.algorithms import ALGORITHMS, build_algorithm
from trainers.build import run
from trainers.config import TrainConfig
from trainers.config_loader import load

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "configs/qwen_image"
SMALL = (
    "iterations=1",
    "model.lora={rank: 2, alpha: 4}",
    "rollout.num_prompts=2",
    "rollout.group_size=2",
    "rollout.chunk_size=2",
    "rollout.num_inference_steps=4",
    "eval={every: 0, num_prompts: 1, samples_per_prompt: 1, num_inference_steps: 2}",
    *(
        o
        for o in OVERRIDES
        if o.startswith(("model.pipe", "model.dev", "data.", "rewards", "track"))
    ),
)
WINDOWS = {
    "grpo": ["rollout.window.steps=[0, 2]"],
    "grpo_guard": ["rollout.window.steps=[0, 2]"],
    "dance_grpo": ["rollout.window.steps=[0, 1, 2]"],
    "mix_grpo": [
        "rollout.window.size=2",
        "rollout.window.start_min=1",
        "rollout.window.start_max=2",
    ],
    "flow_grpo_fast": [],
    "cps": ["rollout.window.steps=[0, 2]"],
    "diffusion_nft": ["rollout.window.steps=[0, 2]"],
}
TWO_REWARDS = (
    "rewards=[{name: 'tests.tiny_run:brightness'}, {name: jpeg_compressibility, weight: 0.5}]"
)


def test_every_algorithm_has_a_config() -> None:
    kinds = {config().type for config in ALGORITHMS}
    assert kinds == WINDOWS.keys()
    for config in ALGORITHMS:
        assert build_algorithm(config()).needs is not None


@pytest.mark.parametrize("name", WINDOWS)
def test_a_config_is_that_of_its_name_and_makes_an_iteration(name: str, tmp_path: Path) -> None:
    path = FOLDER / f"{name}.yaml"
    rewards = [TWO_REWARDS] if name == "mix_grpo" else []
    sources = [*SMALL, *WINDOWS[name], *rewards, f"output_dir={tmp_path / 'run'}"]
    config = load(TrainConfig, [path], sources)
    assert config.algorithm.type == name
    run(config)
    line, _ = metrics_of(tmp_path / "run")
    assert line["train/grad_norm"] > 0
    assert line["train/num_samples"] == 4
    gaps = {n: value for n, value in line.items() if "log_prob_abs_diff" in n}
    if build_algorithm(config.algorithm).needs.log_probs:
        assert line["train/ratio_abs_minus_1"] == 0
        assert gaps
        assert not any(gaps.values())
    else:
        assert not gaps
