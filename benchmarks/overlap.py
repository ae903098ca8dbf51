"""What scoring beside the sampling saves, and costs: ``python -m benchmarks.overlap``.

Rollouts of one iteration with ``scoring.overlap`` over those without, in turn: tiny Qwen-Image, four
chunks of two samples, 10 steps, one thread. The rewards: one that waits (a server, or another device:
as long for a chunk as its sampling takes), the JPEG size (C code), and a count in Python, which holds
the interpreter as long as it runs. ``--cpu`` takes this process's own time: what is computed in all.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.pairs import paired, seconds
from miles_rollout import Media
from trainers.build import build_trainer, read_inputs
from trainers.config import TrainConfig
from trainers.config_loader import load
from trainers.iteration_metrics import Clock

SETTINGS = [
    "model.pipeline=tiny-qwen-image",
    "model.device=cpu",
    "model.num_threads=1",
    "rollout.num_prompts=2",
    "rollout.group_size=4",
    "rollout.height=64",
    "rollout.width=64",
    "tracking.wandb=disabled",
]
CHUNKS = 4


def waits(
    media: Sequence[Media],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    seconds_each: float = 0.0,
) -> list[float]:
    time.sleep(seconds_each * len(media))
    return [float(i) for i in range(len(media))]


def counts(
    media: Sequence[Media],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    number: int = 200_000,
) -> list[float]:
    return [float(sum(i & 1 for i in range(number))) for _ in media]


def collect_with(reward: str, overlap: bool) -> Callable[[], Any]:
    """A call that samples and scores iteration 0."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [*SETTINGS, f"rewards=[{reward}]", f"scoring.overlap={str(overlap).lower()}"]
        config = load(TrainConfig, [], [*settings, f"output_dir={folder}/run"])
        trainer = build_trainer(config, read_inputs(config))
    return lambda: trainer.rollouts.collect(0, Clock())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--cpu", action="store_true", help="this process's time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if arguments.cpu else time.perf_counter
    here = "benchmarks.overlap"
    idle = collect_with(f"{{name: '{here}:waits'}}", False)
    idle()
    each = seconds(idle) / (2 * CHUNKS)
    rewards = {
        "waits": f"{{name: '{here}:waits', kwargs: {{seconds_each: {each:.4f}}}}}",
        "jpeg_compressibility": "{name: jpeg_compressibility}",
        "counts": f"{{name: '{here}:counts'}}",
    }
    print(f"sampling and decoding: {each:.4f} s a sample")
    print(f"without / without: {paired(idle, idle, arguments.pairs, clock)}")
    for name, reward in rewards.items():
        beside, after = collect_with(reward, True), collect_with(reward, False)
        print(f"{name:20} with / without: {paired(beside, after, arguments.pairs, clock)}")


if __name__ == "__main__":
    main()
