"""The configuration of a run: one frozen tree, whose defaults are the vetted setting.

Each part is declared beside the code that it configures, and checked when it is made; what two
parts must agree on is checked here, before a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from miles_rollout.families import class_name_of, find_adapter
from miles_rollout.loading import TINY_PIPELINES, check_pipeline_name
from miles_rollout.pipelines import PipelineAdapter
from trainers.algorithm_checks import check_algorithm, check_forward_process
from trainers.algorithms import AlgorithmConfig, GRPOConfig, build_algorithm
from trainers.config_loader import STRICT
from trainers.ema import EMAConfig
from trainers.family_checks import check_family, resolve_chunks
from trainers.lora import LoraConfig
from trainers.monitors import MonitorsConfig
from trainers.rewards.scoring import RewardConfig
from trainers.rollout_config import EvalConfig, RolloutConfig
from trainers.tracking import TrackingConfig

__all__ = ["EvalConfig", "ModelConfig", "RolloutConfig", "TrainConfig", "for_family"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What is trained, and where."""

    __pydantic_config__ = STRICT

    pipeline: str = "tiny-qwen-image-pretrained"
    """A tiny pipeline's name, a folder, or a hub name."""
    workflow: str | None = None
    """Of a modular pipeline with several, such as t2va of MiniMax H3: only its components are loaded
    (null: all)."""
    drop_text_encoders: bool = False
    """All prompts are encoded first, and the text encoders leave memory before the rest of the model
    comes to the device."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of all weights but the LoRA's, which stay float32."""
    device: str = "auto"
    """"auto": the first accelerator, else the CPU."""
    num_threads: int | None = None
    """CPU threads (None: torch's choice). Results depend on it in the last bits."""
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    """None: all weights of the denoiser are trained."""
    denoisers: tuple[str, ...] | None = None
    """Which are trained, of a pipeline with several, such as [transformer_2] (null: all)."""
    gradient_checkpointing: bool = False
    """Less memory, more time; the numbers are the same."""
    compile: bool = False
    """Compile the denoiser's repeated blocks, for rollout and replay alike; then the first ratio is
    near 1 and not exactly 1, since kernels with and without gradients are fused otherwise."""

    def __post_init__(self) -> None:
        check_pipeline_name(self.pipeline)
        class_name = class_name_of(self.pipeline)
        is_loaded = class_name is None or class_name.endswith("ModularPipeline")
        if self.workflow is not None and (self.pipeline in TINY_PIPELINES or not is_loaded):
            raise ValueError(
                f"workflow has no effect on {self.pipeline!r}, which is not a modular pipeline that "
                f"is loaded; got {self.workflow!r}; set null"
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"must be at least 1 or null; got num_threads {self.num_threads}")
        names = self.denoisers
        if names is not None and (not names or len(set(names)) < len(names)):
            raise ValueError(
                f"denoisers must name one or more, each once; got {list(names)}; set null for all"
            )
        if self.lora is None and self.dtype != "float32":
            raise ValueError(
                f"weights in {self.dtype} lose small updates, 0.02 - 1e-5 is 0.02; got lora null; "
                "set dtype float32, or a lora, whose weights are float32"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where prompts come from: ``.txt``, one a line; ``.jsonl``, an object a line, or ``.parquet``, a
    row each, with ``prompt`` or ``input`` and, for pipelines that take pictures too, ``inputs``: their
    paths by the pipeline's argument, relative to the file; or ``hf://NAME?subset=..&split=..`` for a
    data set of the Hugging Face hub or a local folder, of which ``column`` may name the prompts
    (``revision``: of the hub). The last two need ``pip install 'miles-rollout[datasets]'``."""

    __pydantic_config__ = STRICT

    train: str = "configs/prompts/shapes_train.txt"
    """Relative to the working directory."""
    eval: str = "configs/prompts/shapes_eval.txt"
    """Held out: never trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringConfig:
    """What is done about rewards that fail."""

    __pydantic_config__ = STRICT

    timeout_s: float = 60.0
    """Seconds that a reward may take for a batch (a chunk with ``overlap``), and again for each sample of a failed one.
    Rewards that try again by themselves (``remote``) have as long as all of their tries take."""
    max_masked_fraction: float = 0.25
    """Failed samples are left out; the run stops when more of an iteration than this failed."""
    overlap: bool = True
    """A chunk is scored while the next is sampled, so a reward is called once a chunk; false: once
    for all samples of an iteration, when they are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW and how often it steps."""

    __pydantic_config__ = STRICT

    lr: float = 3e-4
    """Learning rate, after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    eps: float = 1e-8
    """Of AdamW."""
    weight_decay: float = 1e-4
    """Of AdamW."""
    warmup_updates: int = 0
    """The learning rate rises linearly over so many updates."""
    max_grad_norm: float = 1.0
    """The gradient of an update is clipped to this norm."""
    updates_per_iteration: int = 1
    """The samples of an iteration are split into so many parts, one optimizer step each."""
    micro_batch_size: int | None = None
    """Rows a backward (null: the rollout's chunk, which makes replay bitwise); they accumulate."""

    def __post_init__(self) -> None:
        if self.updates_per_iteration < 1:
            raise ValueError(
                f"updates_per_iteration must be at least 1; got {self.updates_per_iteration}"
            )
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1; got {self.micro_batch_size}")
        if not self.lr >= 0 or not self.max_grad_norm > 0 or self.warmup_updates < 0:
            raise ValueError(
                f"lr and warmup_updates must be >= 0 and max_grad_norm > 0; got {self.lr}, "
                f"{self.warmup_updates}, {self.max_grad_norm}"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be within 0..1, 1 excluded; got {self.betas}")
        if self.eps < 0 or self.weight_decay < 0:
            raise ValueError(
                f"eps and weight_decay must be >= 0; got {self.eps}, {self.weight_decay}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When the run's whole state is written."""

    __pydantic_config__ = STRICT

    every: int = 10
    """Iterations between checkpoints; one more is written at the end."""
    keep: int = 2
    """The newest so many, besides the best by evaluation."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise ValueError(f"every and keep must be at least 1; got {self.every}, {self.keep}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChecksConfig:
    """Bounds above which a run stops, because its numbers are not what they are taken for."""

    __pydantic_config__ = STRICT

    max_ratio_abs_minus_1: float = 1e-3
    """Of the first update, where the policy is the one that sampled: rollout against replay."""

    def __post_init__(self) -> None:
        if self.max_ratio_abs_minus_1 < 0:
            raise ValueError(
                f"max_ratio_abs_minus_1 must be >= 0; got {self.max_ratio_abs_minus_1}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugConfig:
    """Recorded rollouts: train again on what an earlier run sampled."""

    __pydantic_config__ = STRICT

    save_rollouts: bool = False
    """Write trajectories and scores to ``output_dir/rollouts``."""
    load_rollouts: str | None = None
    """A folder of that kind, with all iterations of this run: only evaluation samples and scores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A whole run."""

    __pydantic_config__ = STRICT

    output_dir: str = "runs/default"
    """Gets ``config.yaml``, ``metrics.jsonl``, ``samples/`` and ``checkpoints/``."""
    seed: int = 0
    """Every random draw of the run follows from it."""
    iterations: int = 60
    """How many in all; a resumed run counts on."""
    resume: bool | str = False
    """true or "latest": go on from the last checkpoint in ``output_dir``, if there is one; else the
    folder of a checkpoint."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: tuple[RewardConfig, ...] = (RewardConfig(name="shape_match"),)
    """Added up by weight."""
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    algorithm: AlgorithmConfig = field(default_factory=GRPOConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EMAConfig | None = None
    """An average of the trained weights, for evaluation and export (null: none)."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    monitors: MonitorsConfig = field(default_factory=MonitorsConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1; got {self.iterations}")
        adapter = find_adapter(self.model.pipeline)
        if adapter is not None:
            rollout, evaluation = _for_family(self, adapter)
            object.__setattr__(self, "rollout", rollout)
            object.__setattr__(self, "eval", evaluation)
        else:
            _check_algorithm(self, self.rollout, self.rollout.num_inference_steps)
        self._check_batch()
        self._check_average()
        if self.debug.save_rollouts and self.debug.load_rollouts:
            raise ValueError(
                "debug.save_rollouts has no effect with debug.load_rollouts: nothing is sampled; "
                "set one of them"
            )

    def _check_average(self) -> None:
        updates = self.iterations * self.optim.updates_per_iteration
        if self.ema is not None and self.ema.every > updates:
            raise ValueError(
                f"ema.every: the run's {updates} updates end before the average moves, so it would "
                f"stay the initial weights; got {self.ema.every}; set it lower, or ema null"
            )

    def _check_batch(self) -> None:
        updates = self.optim.updates_per_iteration
        of_group = build_algorithm(self.algorithm).needs.samples_of_group
        trained = self.rollout.num_prompts * (of_group or self.rollout.group_size)
        if updates > trained:
            raise ValueError(
                f"optim.updates_per_iteration: more than the {trained} samples that an iteration "
                f"trains; got {updates}; set it lower"
            )
        if self.rollout.num_chunks % updates:
            raise ValueError(
                f"optim.updates_per_iteration must divide the iteration's {self.rollout.num_chunks} "
                f"chunks of {self.rollout.rows} rows; got {updates}; set rollout.chunk_size"
            )
        micro = self.optim.micro_batch_size
        if micro is not None and micro > self.rollout.rows:
            raise ValueError(
                f"optim.micro_batch_size splits chunks and joins none; got {micro} above the "
                f"{self.rollout.rows} rows of a chunk; set it to null, or rollout.chunk_size higher"
            )


def for_family(config: TrainConfig, adapter: PipelineAdapter) -> TrainConfig:
    """The config of a pipeline whose name did not tell its family: checked now, chunks resolved."""
    rollout, evaluation = _for_family(config, adapter)
    return replace(config, rollout=rollout, eval=evaluation)


def _for_family(config: TrainConfig, adapter: PipelineAdapter) -> tuple[RolloutConfig, EvalConfig]:
    model = config.model
    rollout, evaluation = resolve_chunks(config.rollout, config.eval, adapter)
    check_family(model.pipeline, model.denoisers or (), rollout, evaluation, adapter)
    check_forward_process(config.algorithm, model.pipeline, rollout, adapter)
    _check_algorithm(config, rollout, adapter.num_steps(rollout.num_inference_steps))
    return rollout, evaluation


def _check_algorithm(config: TrainConfig, rollout: RolloutConfig, num_steps: int) -> None:
    check_algorithm(config.algorithm, rollout, config.model.lora, num_steps=num_steps)
