"""Seconds and memory of GRPO iterations: ``python -m benchmarks.iteration``.

16 samples of 64x64 pixels, 10 steps, CFG 4, 2 trained steps, LoRA of rank 8, one thread; the median
of the iterations after the first. ``--demo N`` runs N iterations of the shipped recipe instead and
prints the peak resident memory after iterations 3 and N.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
from pathlib import Path
from typing import Any

from trainers.build import build_trainer, read_inputs
from trainers.config import TrainConfig
from trainers.config_loader import load, to_tree
from trainers.tracking import Tracker

TIMED = [
    "model.pipeline=tiny-qwen-image",
    "model.num_threads=1",
    "model.lora.rank=8",
    "rollout.num_prompts=2",
    "rollout.group_size=8",
    "rollout.chunk_size=16",
    "rollout.height=64",
    "rollout.width=64",
    "rollout.true_cfg_scale=4.0",
    'rollout.negative_prompt=" "',
    "rollout.window={type: fixed, steps: [3, 4]}",
    "eval.every=0",
    "eval.num_prompts=1",
    "eval.samples_per_prompt=1",
    "tracking.wandb=disabled",
    "tracking.media_every=0",
    "checkpoint.every=1000",
]
PARTS = ("rollout_s", "decode_s", "reward_s", "train_s", "iteration_s")


class PeakTracker(Tracker):
    """Adds the process's peak memory, in MiB, to each line."""

    def log(self, iteration: int, metrics: Any, **kwargs: Any) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        super().log(iteration, {**metrics, "perf/peak_mib": peak}, **kwargs)


def run(paths: list[str], overrides: list[str]) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        config = load(TrainConfig, paths, [*overrides, f"output_dir={folder}/run"])
        trainer = build_trainer(config, read_inputs(config))
        with PeakTracker(config.output_dir, config.tracking, to_tree(config)) as tracker:
            trainer.run(tracker)
        lines = (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--demo", type=int, metavar="N", default=0)
    arguments = parser.parse_args()
    if arguments.demo:
        lines = run(["configs/qwen_image/tiny_cpu.yaml"], [f"iterations={arguments.demo}"])
        peaks = [line["perf/peak_mib"] for line in lines]
        print(
            f"peak after iteration 3: {peaks[3]:.0f} MiB, after {arguments.demo}: {peaks[-1]:.0f} MiB"
        )
        return
    lines = run([], [*TIMED, f"iterations={arguments.iterations}"])
    timed = [line for line in lines if "perf/train_s" in line][1:]
    for part in PARTS:
        print(f"{part:12} {statistics.median(line[f'perf/{part}'] for line in timed):.3f}")


if __name__ == "__main__":
    main()
