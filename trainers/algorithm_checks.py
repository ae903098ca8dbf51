"""What an algorithm and a rollout have to agree on, checked before a model is loaded."""

from __future__ import annotations

from typing import Any

from miles_rollout.pipelines import PipelineAdapter
from trainers.algorithms import build_algorithm
from trainers.algorithms.base import Needs
from trainers.family_checks import largest_scale
from trainers.lora import LoraConfig
from trainers.rollout_config import RolloutConfig

_FOLLOWED = 5_000
"""Iterations whose windows are looked at, whatever the length of the run."""


def check_algorithm(
    algorithm: Any,
    rollout: RolloutConfig,
    lora: LoraConfig | None,
    *,
    num_steps: int,
) -> None:
    """Raise ``ValueError`` where a rollout does not give what the algorithm needs.

    ``num_steps`` are the denoiser's evaluations of a sample.
    """
    needs, kind = build_algorithm(algorithm).needs, f"algorithm {algorithm.type}"
    _check_sampler(kind, needs, rollout)
    _check_window(kind, needs, rollout, num_steps)
    if needs.reference == "start" and (lora is None or lora.start is None):
        raise ValueError(
            "algorithm.reference start: the run starts from no LoRA, so its start is the base; got "
            "model.lora.start null; set it, or algorithm.reference base"
        )
    count = needs.samples_of_group
    if count is not None and not 2 <= count <= rollout.group_size:
        raise ValueError(
            f"{kind}: best_of_group and worst_of_group choose 2 or more of the group's "
            f"{rollout.group_size} samples; got {count}; set for example 4 and 4, or 0 and 0 for all"
        )


def check_forward_process(
    algorithm: Any, pipeline: str, rollout: RolloutConfig, adapter: PipelineAdapter
) -> None:
    """Raise ``ValueError`` where the denoiser cannot be called on a noised sample by itself."""
    if build_algorithm(algorithm).needs.log_probs:
        return
    if not adapter.sees_state:
        raise ValueError(
            f"algorithm {algorithm.type}: noises finished samples, but this pipeline's denoiser is "
            f"called with more than the sample in one argument; got {pipeline!r}; set an algorithm on "
            "log-probs, such as grpo"
        )
    scale, argument = largest_scale(rollout, adapter), adapter.scale_argument
    if scale > adapter.scale_off:
        raise ValueError(
            f"algorithm {algorithm.type}: its loss is on the velocity of one denoiser call; got "
            f"guidance with {argument} {scale}; set {argument} to {adapter.scale_off:g}"
        )


def _check_sampler(kind: str, needs: Needs, rollout: RolloutConfig) -> None:
    if needs.log_probs and rollout.sde_type == "ode":
        raise ValueError(
            f"{kind}: an ode rollout has no log-prob to train on; got rollout.sde_type ode; set sde, "
            "cps or dance_sde, or algorithm.type diffusion_nft"
        )
    if needs.sde_types is not None and rollout.sde_type not in needs.sde_types:
        raise ValueError(
            f"{kind}: is for steps of another kind; got rollout.sde_type {rollout.sde_type}; set "
            f"{' or '.join(needs.sde_types)}"
        )
    if rollout.sde_type == "ode" and rollout.same_noise:
        raise ValueError(
            f"{kind}: an ode rollout makes one picture of one noise, so the samples of a group would "
            "be equal; got rollout.same_noise true; set it false, or a stochastic rollout.sde_type"
        )
    if needs.log_probs:
        return
    if rollout.true_cfg_scale > 1 or rollout.negative_prompt is not None:
        raise ValueError(
            f"{kind}: its loss is on the velocity of one denoiser call; got guidance with "
            f"true_cfg_scale {rollout.true_cfg_scale} and negative_prompt "
            f"{rollout.negative_prompt!r}; set them to 1 and null"
        )
    if rollout.sde_streams is not None:
        raise ValueError(
            f"{kind}: trains all streams by their weights; got rollout.sde_streams "
            f"{list(rollout.sde_streams)}; set null, and rollout.stream_weights"
        )


def _check_window(kind: str, needs: Needs, rollout: RolloutConfig, num_steps: int) -> None:
    window = rollout.window
    steps = window.choose(0, num_steps, 0)
    needs.fraction.choose(steps)
    if needs.max_trained_steps is not None and len(steps) > needs.max_trained_steps:
        raise ValueError(
            f"{kind}: trains at most {needs.max_trained_steps} steps an iteration; got a "
            f"rollout.window of {len(steps)}; set a smaller one, or algorithm.type grpo"
        )
    later = (window.choose(i, num_steps, 0) for i in range(_FOLLOWED))
    if needs.moving_window and all(places == steps for places in later):
        raise ValueError(
            f"{kind}: the window has to move in the course of the run; got rollout.window of type "
            f"{window.type}, always at steps {list(steps)} of {num_steps}; set progressive or random, "
            "and a size that leaves room"
        )
    if needs.named_steps:
        reached = sorted({s for i in range(_FOLLOWED) for s in window.choose(i, num_steps, 0)})
        never = [step for step in needs.named_steps if step not in reached]
        if never:
            raise ValueError(
                f"algorithm.step_weights: step {never[0]} is never trained, so its weight has no "
                f"effect; got a rollout.window over {reached} of {num_steps} steps; leave it out"
            )
