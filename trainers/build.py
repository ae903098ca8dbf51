"""From a configuration to a run: what is cheap to check comes first, the model last."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from miles_rollout import RolloutEngine
from miles_rollout.encodings import text_encoders
from miles_rollout.errors import MilesRolloutError
from miles_rollout.families import find_adapter
from miles_rollout.loading import load_pipeline
from trainers.algorithms import build_algorithm
from trainers.algorithms.base import Algorithm
from trainers.checkpoint import latest_checkpoint, load_checkpoint
from trainers.config import TrainConfig, for_family
from trainers.config_loader import ConfigError, to_tree, to_yaml
from trainers.data import PromptFile, PromptRecord, read_prompts
from trainers.devices import build_device
from trainers.family_checks import check_inputs, check_request, makes_video
from trainers.first_line import first_line
from trainers.lora import check_start
from trainers.policy import Beside, Policy
from trainers.prompt_inputs import inputs_of
from trainers.prompt_lengths import warn_of_cut_prompts
from trainers.recorded import check_needs, check_rollouts
from trainers.rewards.prompt_check import check_prompts
from trainers.rewards.scoring import Scorer
from trainers.tracking import Tracker
from trainers.trainer import Trainer
from trainers.video_file import require_av

logger = logging.getLogger(__name__)


class RunError(MilesRolloutError, RuntimeError):
    """A run cannot start where it was told to."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All that a run needs besides the model; read and checked before the model is loaded."""

    train: PromptFile
    held_out: PromptFile
    scorer: Scorer
    eval_scorer: Scorer
    """With ``eval.rewards`` as well."""
    device: torch.device

    @property
    def train_prompts(self) -> list[PromptRecord]:
        """Of ``data.train``."""
        return self.train.records

    @property
    def eval_prompts(self) -> list[PromptRecord]:
        """Of ``data.eval``."""
        return self.held_out.records


def read_inputs(config: TrainConfig) -> Inputs:
    """Read prompts, find rewards, resolve the device. Raises before any model is loaded."""
    files = read_prompts(config.data.train), read_prompts(config.data.eval)
    train, held_out = (file.records for file in files)
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
        overlap=config.scoring.overlap,
    )
    eval_scorer = scorer.watching(config.eval.rewards)
    check_prompts(scorer.sources, config.data.train, train)
    check_prompts(eval_scorer.sources, config.data.eval, held_out)
    if config.model.lora is not None and not config.resume:
        check_start(config.model.lora)
    adapter = find_adapter(config.model.pipeline)
    if adapter is not None:
        for name, records in (("data.train", train), ("data.eval", held_out)):
            check_inputs(name, inputs_of(records) or [], adapter)
    if adapter is not None and makes_video(config.rollout, adapter):
        require_av()
    if config.debug.load_rollouts:
        recorded = Path(config.debug.load_rollouts)
        check_rollouts(recorded, range(config.iterations))
        needs = build_algorithm(config.algorithm).needs
        check_needs(recorded, range(config.iterations), needs)
    return Inputs(
        train=files[0],
        held_out=files[1],
        scorer=scorer,
        eval_scorer=eval_scorer,
        device=build_device(config.model.device),
    )


def run(config: TrainConfig) -> Path:
    """Train as configured; returns ``output_dir``."""
    inputs = read_inputs(config)
    for file in (inputs.train, inputs.held_out):
        logger.info("%s: %s", file.source, file.told)
    checkpoint = find_checkpoint(config)
    saved = None if checkpoint is None else load_checkpoint(checkpoint)
    if saved is not None:
        check_groups(config, saved[0])
    # Before the model is loaded: minutes later is too late to hear of a folder without access.
    output_dir = make_folder(config.output_dir, "output_dir")
    trainer = build_trainer(config, inputs, resumed=saved is not None)
    if saved is not None and checkpoint is not None:
        trainer.restore(*saved)
        if not trainer.policy.is_exported(checkpoint):  # killed between a checkpoint and its export
            trainer.export(checkpoint)
        _set_later_aside(trainer.checkpoints, trainer.iteration)
    config = trainer.config  # as its family resolved it
    (output_dir / "config.yaml").write_text(to_yaml(config))
    resume_from = trainer.iteration if config.resume else None
    with Tracker(output_dir, config.tracking, to_tree(config), resume_from=resume_from) as tracker:
        trainer.run(tracker)
    return output_dir


def check_groups(config: TrainConfig, groups: Collection[str]) -> None:
    """Raise ``RunError`` where a checkpoint lacks weights that the config asks for."""
    needs = build_algorithm(config.algorithm).needs
    wanted = {
        "ema": (config.ema is not None, "ema null"),
        "old": (needs.old_policy is not None, "the algorithm"),
        "start": (needs.reference == "start" and config.model.lora is not None, "the algorithm"),
    }
    for name, (is_wanted, setting) in wanted.items():
        if is_wanted and name not in groups:
            raise RunError(
                f"resume: the checkpoint has no weights {name!r}; got {sorted(groups)}; set {setting} "
                "of the saved run, or start anew in another output_dir"
            )


def build_trainer(config: TrainConfig, inputs: Inputs, *, resumed: bool = False) -> Trainer:
    """Load rewards and pipeline, attach what is trained, and hand everything to a `Trainer`.

    ``resumed``: a checkpoint's weights will follow, so that ``lora.start`` is not read.
    """
    inputs.eval_scorer.load()
    records = [*inputs.train_prompts, *inputs.eval_prompts]
    prompts = [record.prompt for record in records]
    engine = build_engine(
        config,
        inputs.device,
        prompts,
        inputs_of(records),
        files=[inputs.train, inputs.held_out],
    )
    config = for_family(config, engine.adapter)
    if makes_video(config.rollout, engine.adapter):
        require_av()
    algorithm = build_algorithm(config.algorithm)
    lora = config.model.lora
    policy = Policy(
        engine,
        replace(lora, start=None) if lora is not None and resumed else lora,
        seed=config.seed,
        gradient_checkpointing=config.model.gradient_checkpointing,
        compile_backend="inductor" if config.model.compile else None,
        beside=_beside(algorithm),
        denoisers=config.model.denoisers,
    )
    return Trainer(
        config,
        engine,
        policy,
        algorithm,
        inputs.scorer,
        inputs.train_prompts,
        inputs.eval_prompts,
        inputs.eval_scorer,
    )


def _beside(algorithm: Algorithm) -> list[Beside]:
    """The weights that an algorithm needs beside the trained ones."""
    needs = algorithm.needs
    kept: list[Beside] = [] if needs.reference is None else [needs.reference]
    return [*kept, "old"] if needs.old_policy is not None else kept


def build_engine(
    config: TrainConfig,
    device: torch.device,
    prompts: Sequence[str],
    inputs: Sequence[Mapping[str, Any]] | None = None,
    files: Sequence[PromptFile] = (),
) -> RolloutEngine:
    """The configured pipeline on its device, checked against the config.

    Of ``files``, where the prompts are from, those are told that the text encoder will not see whole.
    With ``model.drop_text_encoders`` the encoders go there alone, encode all ``prompts``, and are
    dropped before the rest follows: never are both on the device.
    """
    pipe = load_policy_pipeline(config)
    engine = RolloutEngine(pipe)
    config = for_family(config, engine.adapter)
    check_request(config.rollout, config.eval, engine, inputs or [{}])
    for file in files:
        warn_of_cut_prompts(file, pipe, engine.adapter, config.rollout.arguments())
    if config.model.drop_text_encoders:
        names = text_encoders(pipe)
        if not names:
            raise ConfigError(
                "model.drop_text_encoders: this pipeline has none; got "
                f"{config.model.pipeline!r}; set false"
            )
        for name in names:
            getattr(pipe, name).to(device)
        asides = (config.rollout.negative_prompt, engine.adapter.implied_negative)
        given = inputs or [{}] * len(prompts)
        # Guidance shows the model what the prompt comes with beside the other text as well.
        wanted = [*zip(prompts, given, strict=True)]
        wanted += [(text, one) for text in asides if text is not None for one in given]
        engine.encode(
            [text for text, _ in wanted],
            inputs=None if inputs is None else [one for _, one in wanted],
            **config.rollout.arguments(),
        )
        engine.drop_text_encoders()
    pipe.to(device)
    return engine


def load_policy_pipeline(config: TrainConfig) -> Any:
    """The configured pipeline on the CPU, with the configured threads."""
    model = config.model
    if model.num_threads is not None:
        torch.set_num_threads(model.num_threads)
    try:
        return load_pipeline(model.pipeline, getattr(torch, model.dtype), model.workflow)
    except OSError as error:  # what diffusers raises for a name or a file that is not there
        raise RunError(
            f"model.pipeline: cannot be loaded; got {model.pipeline!r} "
            f"({first_line(error)}); set a folder, a hub name that can be reached, or a tiny "
            "pipeline's name"
        ) from error
    except ImportError as error:  # of a component, mostly a tokenizer
        raise RunError(
            f"model.pipeline: needs another package; got {model.pipeline!r} ({first_line(error)}); "
            "install that"
        ) from error


def find_checkpoint(config: TrainConfig) -> Path | None:
    """Where to resume from, or None for a fresh start. Raises ``RunError`` for an occupied folder."""
    output_dir = Path(config.output_dir)
    latest = latest_checkpoint(output_dir / "checkpoints")
    if config.resume is True or config.resume == "latest":
        if latest is None:
            logger.info("resume: no checkpoint in %s yet, from the beginning", output_dir)
        return latest
    folder = Path(config.resume) if config.resume else None
    if folder is not None and not (folder / "state.json").is_file():
        raise RunError(
            f"resume: no checkpoint there; got {str(folder)!r}; set true for the latest one of "
            "output_dir, or a folder like runs/x/checkpoints/iteration_000010"
        )
    if folder is not None and folder.resolve().parent == (output_dir / "checkpoints").resolve():
        return folder
    metrics = output_dir / "metrics.jsonl"
    if latest is not None or (metrics.exists() and metrics.stat().st_size):
        raise RunError(
            f"output_dir: holds another run, which would be lost; got {str(output_dir)!r}; set "
            "resume=true to go on with it, or another output_dir"
        )
    return folder


def make_folder(path: str | Path, name: str) -> Path:
    """Make the folder that ``name`` asks for. Raises ``RunError`` where that cannot be."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{name}: cannot be made; got {str(folder)!r} ({error.strerror}); set another folder"
        ) from error
    return folder


def _set_later_aside(root: Path, iteration: int) -> None:
    """Move checkpoints after ``iteration``, which is trained anew, where no one takes them for ours."""
    numbers = {f: f.name.removeprefix("iteration_") for f in root.glob("iteration_*")}
    later = [f for f, text in numbers.items() if text.isdecimal() and int(text) > iteration]
    if not later:
        return
    number = 1
    while (aside := root / f"abandoned_{number}").exists():
        number += 1
    aside.mkdir()
    for folder in later:
        folder.rename(aside / folder.name)
    logger.warning("resume: %d later checkpoints are now in %s", len(later), aside)
