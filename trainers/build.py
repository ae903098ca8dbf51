"""From a configuration to a run: what is cheap to check comes first, the model last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from miles_rollout import RolloutEngine
from miles_rollout.errors import MilesRolloutError
from miles_rollout.loading import load_pipeline
from trainers.checkpoint import latest_checkpoint, load_checkpoint
from trainers.config import TrainConfig
from trainers.config_loader import ConfigError, to_tree, to_yaml
from trainers.data import PromptRecord, load_prompts
from trainers.grpo import GRPO
from trainers.policy import Policy
from trainers.rewards.scoring import Scorer
from trainers.tracking import Tracker
from trainers.trainer import Trainer


class RunError(MilesRolloutError, RuntimeError):
    """A run cannot start where it was told to."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All that a run needs besides the model; read and checked before the model is loaded."""

    train_prompts: list[PromptRecord]
    eval_prompts: list[PromptRecord]
    scorer: Scorer
    device: torch.device


def read_inputs(config: TrainConfig) -> Inputs:
    """Read prompts, build rewards, resolve the device. Raises before anything expensive."""
    train, held_out = load_prompts(config.data.train), load_prompts(config.data.eval)
    if config.rollout.num_prompts > len(train):
        raise ConfigError(
            f"rollout.num_prompts: more prompts an iteration than {config.data.train} has; got "
            f"{config.rollout.num_prompts} of {len(train)}; set rollout.num_prompts lower"
        )
    if config.eval.num_prompts is not None and config.eval.num_prompts > len(held_out):
        raise ConfigError(
            f"eval.num_prompts: more than {config.data.eval} has; got {config.eval.num_prompts} of "
            f"{len(held_out)}; set eval.num_prompts lower or null"
        )
    scorer = Scorer(
        config.rewards,
        timeout_s=config.scoring.timeout_s,
        max_masked_fraction=config.scoring.max_masked_fraction,
    )
    return Inputs(
        train_prompts=train,
        eval_prompts=held_out,
        scorer=scorer,
        device=build_device(config.model.device),
    )


def run(config: TrainConfig) -> Path:
    """Train as configured; returns ``output_dir``."""
    inputs = read_inputs(config)
    checkpoint = find_checkpoint(config)
    saved = None if checkpoint is None else load_checkpoint(checkpoint)
    trainer = build_trainer(config, inputs)
    if saved is not None and checkpoint is not None:
        trainer.restore(*saved)
        # A kill between a checkpoint and its export leaves the first without the second.
        trainer.policy.export(checkpoint)
    output_dir = Path(config.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "config.yaml").write_text(to_yaml(config))
    resume_from = trainer.iteration if config.resume else None
    with Tracker(output_dir, config.tracking, to_tree(config), resume_from=resume_from) as tracker:
        trainer.run(tracker)
    return output_dir


def build_trainer(config: TrainConfig, inputs: Inputs) -> Trainer:
    """Load the pipeline, attach what is trained, and hand everything to a `Trainer`."""
    if config.model.num_threads is not None:
        torch.set_num_threads(config.model.num_threads)
    engine = RolloutEngine(load_policy_pipeline(config, inputs.device))
    algorithm = GRPO(config.algorithm)
    policy = Policy(
        engine,
        config.model.lora,
        seed=config.seed,
        gradient_checkpointing=config.model.gradient_checkpointing,
        keep_reference=algorithm.needs_reference,
    )
    return Trainer(
        config,
        engine,
        policy,
        algorithm,
        inputs.scorer,
        inputs.train_prompts,
        inputs.eval_prompts,
    )


def load_policy_pipeline(config: TrainConfig, device: torch.device) -> Any:
    """The configured pipeline, on its device."""
    return load_pipeline(config.model.pipeline, getattr(torch, config.model.dtype)).to(device)


def find_checkpoint(config: TrainConfig) -> Path | None:
    """Where to resume from, or None for a fresh start. Raises ``RunError`` for an occupied folder."""
    output_dir = Path(config.output_dir)
    latest = latest_checkpoint(output_dir / "checkpoints")
    if config.resume is False:
        metrics = output_dir / "metrics.jsonl"
        if latest is not None or (metrics.exists() and metrics.stat().st_size):
            raise RunError(
                f"output_dir: holds another run, which would be lost; got {str(output_dir)!r}; set "
                "resume=true to go on with it, or another output_dir"
            )
        return None
    if config.resume is True or config.resume == "latest":
        return latest
    folder = Path(config.resume)
    if not (folder / "state.json").is_file():
        raise RunError(
            f"resume: no checkpoint there; got {str(folder)!r}; set true for the latest one of "
            "output_dir, or a folder like runs/x/checkpoints/iteration_000010"
        )
    return folder


def build_device(name: str) -> torch.device:
    """A torch device by name; "auto" is the accelerator, if there is one."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator()
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"model.device: not available here; got {name!r} ({str(error).splitlines()[0]}); set "
            "auto or cpu"
        ) from error
    return device
