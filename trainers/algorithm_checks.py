"""What an algorithm and a rollout have to agree on, checked before a model is loaded."""

from __future__ import annotations

from typing import Any

from miles_rollout.pipelines import PipelineAdapter
from trainers.algorithms import build_algorithm
from trainers.family_checks import largest_scale
from trainers.lora import LoraConfig
from trainers.rollout_config import RolloutConfig
from trainers.windows import ProgressiveWindow, RandomWindow


def check_algorithm(algorithm: Any, rollout: RolloutConfig, lora: LoraConfig | None) -> None:
    """Raise ``ValueError`` where a rollout does not give what the algorithm needs."""
    needs, kind = build_algorithm(algorithm).needs, algorithm.type
    if needs.log_probs and rollout.sde_type == "ode":
        raise ValueError(
            f"algorithm {kind}: an ode rollout has no log-prob to train on; got rollout.sde_type "
            "ode; set sde, cps or dance_sde, or algorithm.type diffusion_nft"
        )
    if needs.sde_types is not None and rollout.sde_type not in needs.sde_types:
        raise ValueError(
            f"algorithm {kind}: is for steps of another kind; got rollout.sde_type "
            f"{rollout.sde_type}; set {' or '.join(needs.sde_types)}"
        )
    moves = isinstance(rollout.window, ProgressiveWindow | RandomWindow)
    if needs.moving_window and not moves:
        raise ValueError(
            f"algorithm {kind}: the window has to move in the course of the run; got rollout.window "
            f"of type {rollout.window.type}; set progressive or random"
        )
    steps = rollout.window.choose(0, rollout.num_inference_steps, 0)
    needs.fraction.choose(steps)
    if needs.max_trained_steps is not None and len(steps) > needs.max_trained_steps:
        raise ValueError(
            f"algorithm {kind}: trains at most {needs.max_trained_steps} steps an iteration; got a "
            f"rollout.window of {len(steps)}; set a smaller one, or algorithm.type grpo"
        )
    if not needs.log_probs and (rollout.true_cfg_scale > 1 or rollout.negative_prompt is not None):
        raise ValueError(
            f"algorithm {kind}: its loss is on the velocity of one denoiser call; got guidance with "
            f"true_cfg_scale {rollout.true_cfg_scale} and negative_prompt "
            f"{rollout.negative_prompt!r}; set them to 1 and null"
        )
    if rollout.sde_type == "ode" and rollout.same_noise:
        raise ValueError(
            f"algorithm {kind}: an ode rollout makes one picture of one noise, so the samples of a "
            "group would be equal; got rollout.same_noise true; set it false, or a stochastic "
            "rollout.sde_type"
        )
    if needs.reference == "start" and (lora is None or lora.start is None):
        raise ValueError(
            "algorithm.reference start: the run starts from no LoRA, so its start is the base; got "
            "model.lora.start null; set it, or algorithm.reference base"
        )
    count = needs.samples_of_group
    if count is not None and not 2 <= count <= rollout.group_size:
        raise ValueError(
            f"algorithm {kind}: best_of_group and worst_of_group choose 2 or more of the group's "
            f"{rollout.group_size} samples; got {count}; set for example 4 and 4, or 0 and 0 for all"
        )
    outside = [step for step in needs.named_steps if step >= rollout.num_inference_steps]
    if outside:
        raise ValueError(
            f"algorithm.step_weights: there is no step {outside[0]}; got "
            f"{rollout.num_inference_steps} steps; set steps within 0.."
            f"{rollout.num_inference_steps - 1}"
        )


def check_unguided(algorithm: Any, rollout: RolloutConfig, adapter: PipelineAdapter) -> None:
    """Raise ``ValueError`` for guidance by the family's own argument, where it has to be off."""
    scale, argument = largest_scale(rollout, adapter), adapter.scale_argument
    if build_algorithm(algorithm).needs.log_probs or scale <= adapter.scale_off:
        return
    raise ValueError(
        f"algorithm {algorithm.type}: its loss is on the velocity of one denoiser call; got guidance "
        f"with {argument} {scale}; set {argument} to {adapter.scale_off:g}"
    )
