"""Do the algorithms learn, and at what cost? Reward curves of the tiny Qwen-Image, three seeds each.

    python -m benchmarks.learning train RUNS [--only NAME ...] [--seeds 0 1 2]
    python -m benchmarks.learning collect RUNS
    python -m benchmarks.learning plot

``train`` runs the recipes of ``configs/qwen_image`` (40 iterations of 96 samples, one thread, one after
the other; what is finished is not run again), ``collect`` writes their curves to ``learning.json`` beside
this file, and ``plot`` draws ``docs/results/*.png`` and prints the table of ``docs/results.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainers.config import TrainConfig
from trainers.config_loader import load
from trainers.denoiser_samples import denoiser_samples

HERE = Path(__file__).parent
ROOT = HERE.parent
CURVES = HERE / "learning.json"
FIGURES = ROOT / "docs/results"
ITERATIONS = 40

_LATE = [
    "rollout.num_prompts=12",
    "rollout.group_size=8",
    "rollout.chunk_size=null",
    "rollout.same_noise=true",
    "rollout.noise_level=1.0",
    "rollout.window={type: fixed, steps: [3, 4, 5]}",
]

RUNS: dict[str, tuple[str, list[str]]] = {
    "grpo": ("grpo", []),
    "grpo_guard": ("grpo_guard", []),
    "dance_grpo": ("dance_grpo", []),
    "mix_grpo": ("mix_grpo", []),
    "flow_grpo_fast": ("flow_grpo_fast", []),
    "cps": ("cps", []),
    "diffusion_nft": ("diffusion_nft", []),
    "grpo, late window": ("grpo", _LATE),
    "grpo, late window, shared prefix": ("grpo", [*_LATE, "rollout.share_prefix=true"]),
}
"""Name of a curve -> the config's name, and what is changed in it."""

COMPARED = [name for name in RUNS if "late window" not in name]
PREFIX_PAIR = [name for name in RUNS if "late window" in name]
_FIXED = [f"iterations={ITERATIONS}", "tracking.media_every=0", "checkpoint.every=1000"]


def train(root: Path, names: Sequence[str], seeds: Sequence[int]) -> None:
    """Run what is not there yet."""
    for seed in seeds:
        for name in names:
            folder = _folder(root, name, seed)
            if len(_metrics(folder)) > ITERATIONS:
                continue
            file, changes = RUNS[name]
            command = [sys.executable, "-m", "recipes.grpo_qwen_image"]
            command += [f"configs/qwen_image/{file}.yaml", *changes, *_FIXED]
            command += [f"seed={seed}", f"output_dir={folder}"]
            print(f"{name}, seed {seed}", flush=True)
            subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)


def collect(root: Path) -> None:
    """Write reward, seconds and denoiser samples of every iteration."""
    curves = []
    for name in RUNS:
        config = _config(name)
        counts = [_passes(config, iteration) for iteration in range(ITERATIONS)]
        for folder in sorted(root.glob(f"{_slug(name)}_seed_*")):
            rows = [row for row in _metrics(folder) if "rollout/reward/mean" in row]
            if len(rows) < ITERATIONS:
                continue
            evaluations = [
                r["eval/reward/mean"] for r in _metrics(folder) if "eval/reward/mean" in r
            ]
            curves.append(
                {
                    "name": name,
                    "seed": int(folder.name.rpartition("_")[2]),
                    "reward": [round(row["rollout/reward/mean"], 4) for row in rows],
                    "seconds": [
                        round(row["perf/iteration_s"] - row["perf/eval_s"], 3) for row in rows
                    ],
                    "passes": counts,
                    "held_out": [round(value, 4) for value in (evaluations[0], evaluations[-1])],
                    "gap": max(row.get("train/ratio_abs_minus_1", 0.0) for row in rows),
                }
            )
    lines = ",\n".join(json.dumps(curve) for curve in curves)
    CURVES.write_text(f"[\n{lines}\n]\n")


def plot() -> None:
    """Draw the figures and print the table."""
    curves = json.loads(CURVES.read_text())
    FIGURES.mkdir(exist_ok=True)
    _draw(curves, COMPARED, "iteration", None, FIGURES / "iterations.png")
    _draw(
        curves,
        COMPARED,
        "denoiser samples (a backward counts as two)",
        "passes",
        FIGURES / "samples.png",
    )
    _draw(
        curves,
        PREFIX_PAIR,
        "seconds of rollout, reward and training",
        "seconds",
        FIGURES / "prefix.png",
    )
    print(table(curves))


def table(curves: Sequence[dict[str, Any]]) -> str:
    """First ten against last ten iterations of every run."""
    lines = [
        "| run | seed | reward, first 10 to last 10 | standard errors | held out | samples through "
        "the denoiser an iteration |",
        "|---|---|---|---|---|---|",
    ]
    for curve in curves:
        first, last = curve["reward"][:10], curve["reward"][-10:]
        rise = statistics.mean(last) - statistics.mean(first)
        error = (statistics.variance(first) / 10 + statistics.variance(last) / 10) ** 0.5
        before, after = curve["held_out"]
        lines.append(
            f"| {curve['name']} | {curve['seed']} | {statistics.mean(first):.3f} to "
            f"{statistics.mean(last):.3f} | {rise / error:+.1f} | {before:.3f} to {after:.3f} | "
            f"{statistics.mean(curve['passes']):.0f} |"
        )
    return "\n".join(lines)


def _draw(
    curves: Sequence[dict[str, Any]], names: Sequence[str], label: str, axis: str | None, path: Path
) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name in names:
        runs = [curve for curve in curves if curve["name"] == name]
        if not runs:
            continue
        means = [
            statistics.mean(values) for values in zip(*(r["reward"] for r in runs), strict=True)
        ]
        places: Sequence[float] = range(1, ITERATIONS + 1)
        if axis is not None:
            steps = [statistics.mean(v) for v in zip(*(r[axis] for r in runs), strict=True)]
            places = [sum(steps[: i + 1]) for i in range(ITERATIONS)]
        (line,) = axes.plot(places, _smooth(means), label=f"{name} ({len(runs)} seeds)")
        for run in runs:
            axes.plot(
                places, _smooth(run["reward"]), color=line.get_color(), alpha=0.2, linewidth=0.8
            )
    axes.set_xlabel(label)
    axes.set_ylabel("mean reward, mean of 5 iterations")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """The mean of the last ``width`` values: prompts differ from iteration to iteration."""
    return [statistics.mean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def _passes(config: TrainConfig, iteration: int) -> int:
    steps = config.rollout.num_inference_steps
    counts = denoiser_samples(config, evaluations=steps, branches=1, iteration=iteration)
    return counts.rollout + 3 * counts.train + sum(counts.beside.values())


def _config(name: str) -> TrainConfig:
    file, changes = RUNS[name]
    return load(TrainConfig, [ROOT / f"configs/qwen_image/{file}.yaml"], changes)


def _slug(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_")


def _folder(root: Path, name: str, seed: int) -> Path:
    return root.resolve() / f"{_slug(name)}_seed_{seed}"


def _metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Parse ``sys.argv`` and do one of the three."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["train", "collect", "plot"])
    parser.add_argument("runs", type=Path, nargs="?", default=Path("runs/learning"))
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    if arguments.action == "train":
        train(arguments.runs, arguments.only, arguments.seeds)
    elif arguments.action == "collect":
        collect(arguments.runs)
    else:
        plot()


if __name__ == "__main__":
    main()
