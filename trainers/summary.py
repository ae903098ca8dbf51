"""What came out of a run, in a few lines: read back from its own record."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

REWARD, EVALUATION = "rollout/reward/mean", "eval/reward/mean"


def summarise(output_dir: Path) -> str:
    """The reward at both ends of training, the evaluations, and where to look."""
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    rewards = [r[REWARD] for r in records if r.get(REWARD) is not None]
    evaluations = [r for r in records if r.get(EVALUATION) is not None]
    report = []
    num = min(10, len(rewards) // 2)
    if num:
        first, last = rewards[:num], rewards[-num:]
        rise = fmean(last) - fmean(first)
        error = _standard_error(first, last)
        apart = f" ({rise / error:+.1f} standard errors)" if error else ""
        report.append(
            f"reward: first {num} iterations {fmean(first):.3f}, last {num} {fmean(last):.3f}, "
            f"{rise:+.3f}{apart}"
        )
    if len(evaluations) > 1:
        before, after = evaluations[0][EVALUATION], evaluations[-1][EVALUATION]
        best = max(evaluations, key=lambda r: r[EVALUATION])
        report.append(
            f"held-out prompts: {before:.3f} before, {after:.3f} after, {after - before:+.3f}; best "
            f"{best[EVALUATION]:.3f} at iteration {best['iteration']}"
        )
    for name in ("metrics.jsonl", "samples/before_after.png", "checkpoints", "wandb"):
        if (output_dir / name).exists():
            report.append(f"  {output_dir / name}")
    return "\n".join(report)


def _standard_error(first: list[float], last: list[float]) -> float:
    """Of the difference of the two means; 0 where it cannot be estimated."""
    if len(first) < 2:
        return 0.0
    return float((stdev(first) ** 2 / len(first) + stdev(last) ** 2 / len(last)) ** 0.5)
