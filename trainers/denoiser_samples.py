"""How many samples pass through the denoiser in an iteration: its cost, whatever the machine."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.algorithms import build_algorithm
from trainers.config import TrainConfig
from trainers.short_schedule import steps_in_all


@dataclass(frozen=True, kw_only=True, slots=True)
class DenoiserSamples:
    """Of one iteration. A sample that is guided counts once for each branch."""

    steps: int
    """Of a sample: all, or fewer with ``steps_after_window``."""
    prefix_steps: int
    """The steps before the window, which ``share_prefix`` computes once a prompt."""
    rollout: int
    """Forward, without gradients."""
    trained_samples: int
    trained_steps: int
    train: int
    """Forward and backward."""
    beside: dict[str, int]
    """Forward on the trained steps with the reference's or the old policy's weights."""


def denoiser_samples(
    config: TrainConfig, *, evaluations: int, branches: int, iteration: int = 0
) -> DenoiserSamples:
    """Count them: ``evaluations`` steps in a schedule, ``branches`` calls a step."""
    rollout, needs = config.rollout, build_algorithm(config.algorithm).needs
    steps = rollout.window.choose(iteration, evaluations, config.seed)
    taken = steps_in_all(steps, evaluations, rollout.steps_after_window)
    prefix = min(steps)
    once = prefix if rollout.share_prefix else 0
    sampled = rollout.num_prompts * once + rollout.num_samples * (taken - once)
    samples = rollout.num_prompts * (needs.samples_of_group or rollout.group_size)
    trained = len(needs.fraction.choose(steps))
    pairs = samples * trained * branches
    others = {"reference": needs.reference, "old policy": needs.old_policy}
    return DenoiserSamples(
        steps=taken,
        prefix_steps=prefix,
        rollout=sampled * branches,
        trained_samples=samples,
        trained_steps=trained,
        train=pairs,
        beside={name: pairs for name, need in others.items() if need is not None},
    )
