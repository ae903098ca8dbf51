"""A whole run on the tiny Qwen-Image with random weights: small, quick, and the same every time."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_rollout import Media
from trainers.build import build_trainer, read_inputs
from trainers.config import TrainConfig
from trainers.config_loader import load
from trainers.tracking import Tracker
from trainers.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent

OVERRIDES = (
    "iterations=2",
    "model.pipeline=tiny-qwen-image",
    "model.device=cpu",
    "model.num_threads=1",
    "model.lora={rank: 4, alpha: 8}",
    f"data.train={ROOT / 'configs/prompts/shapes_train.txt'}",
    f"data.eval={ROOT / 'configs/prompts/shapes_eval.txt'}",
    "rollout.num_prompts=2",
    "rollout.group_size=4",
    "rollout.num_inference_steps=4",
    "rollout.window={type: fixed, steps: [0, 2]}",
    "rewards=[{name: 'tests.tiny_run:brightness'}]",
    "optim.lr=1e-3",
    "eval={every: 2, num_prompts: 2, samples_per_prompt: 1, num_inference_steps: 2}",
    "checkpoint.every=1",
    "tracking={wandb: disabled, media_every: 0}",
)


H3_OVERRIDES = (
    *(o for o in OVERRIDES if not o.startswith(("model.pipe", "model.lora", "rollout.", "track"))),
    "tracking={wandb: disabled, media_every: 0, num_media: 1}",
    "model.pipeline=tiny-minimax-h3",
    "model.denoisers=[transformer]",
    "model.lora={rank: 2, alpha: 4, targets: [attn.to_q, attn.to_v, ff.net.2]}",
    "rollout.num_prompts=2",
    "rollout.group_size=2",
    "rollout.num_inference_steps=4",
    "rollout.num_frames=124",
    "rollout.window={type: fixed, steps: [1, 2]}",
    "rewards=[{name: 'tests.tiny_run:bright_and_loud'}]",
)
"""Of MiniMax H3: grid points are one more than evaluations, and a chunk is one sample."""


def bright_and_loud(
    media: Sequence[Media], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> dict[str, list[float]]:
    """Looks at both media of a video with sound."""
    videos = [m.video.double().mean().item() for m in media if m.video is not None]
    sounds = [m.audio.double().abs().mean().item() for m in media if m.audio is not None]
    return {"bright": [100 * x for x in videos], "loud": [1000 * x for x in sounds]}


def brightness(
    media: Sequence[Media], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Differs enough between the samples of random weights."""
    return [100 * m.image.double().mean().item() for m in media if m.image is not None]


def brightness_with_a_hole(
    media: Sequence[Media], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    """The fourth sample of a batch has no score."""
    scores = brightness(media, prompts, metadata)
    return [math.nan if i == 3 else score for i, score in enumerate(scores)]


def tiny_config(output_dir: Path, *overrides: str) -> TrainConfig:
    """``overrides`` come last; a window among them is in place of the usual one."""
    usual = OVERRIDES
    if any(o.startswith("rollout.window={") for o in overrides):
        usual = tuple(o for o in OVERRIDES if not o.startswith("rollout.window="))
    return load(TrainConfig, [], [f"output_dir={output_dir}", *usual, *overrides])


def tiny_h3_config(output_dir: Path, *overrides: str) -> TrainConfig:
    return load(TrainConfig, [], [f"output_dir={output_dir}", *H3_OVERRIDES, *overrides])


def tiny_trainer(output_dir: Path, *overrides: str) -> Trainer:
    return trainer_of(tiny_config(output_dir, *overrides))


def trainer_of(config: TrainConfig) -> Trainer:
    return build_trainer(config, read_inputs(config))


def train(trainer: Trainer) -> list[dict[str, Any]]:
    """Run to the end; the metrics of every iteration."""
    output_dir = Path(trainer.config.output_dir)
    with Tracker(output_dir, trainer.config.tracking, {}) as tracker:
        trainer.run(tracker)
    return metrics_of(output_dir)


def metrics_of(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def without_perf(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in metrics]
