"""The configuration of a run: one frozen tree, whose defaults are the vetted setting.

Each part is declared beside the code that it configures, and checked when it is made; what two
parts must agree on is checked here, before a model is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_rollout.loading import check_pipeline_name
from miles_rollout.params import LatentDtype, RolloutParams
from miles_rollout.transitions import SdeType
from trainers.algorithms import AlgorithmConfig
from trainers.config_loader import STRICT
from trainers.lora import LoraConfig
from trainers.rewards.scoring import RewardConfig
from trainers.tracking import TrackingConfig
from trainers.windows import AllSteps, RandomWindow, Window


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What is trained, and where."""

    __pydantic_config__ = STRICT

    pipeline: str = "tiny-qwen-image-pretrained"
    """A tiny pipeline's name, a folder, or a hub name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of all weights but the LoRA's, which stay float32."""
    device: str = "auto"
    """"auto": the first accelerator, else the CPU."""
    num_threads: int | None = None
    """CPU threads (None: torch's choice). Results depend on it in the last bits."""
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    """None: all weights of the denoiser are trained."""
    gradient_checkpointing: bool = False
    """Less memory, more time; the numbers are the same."""
    compile: bool = False
    """Compile the denoiser's repeated blocks, for rollout and replay alike; then the first ratio is
    near 1 and not exactly 1, since kernels with and without gradients are fused otherwise."""

    def __post_init__(self) -> None:
        check_pipeline_name(self.pipeline)
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"must be at least 1 or null; got num_threads {self.num_threads}")
        if self.lora is None and self.dtype != "float32":
            raise ValueError(
                f"weights in {self.dtype} lose small updates, 0.02 - 1e-5 is 0.02; got lora null; "
                "set dtype float32, or a lora, whose weights are float32"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where prompts come from: ``.txt``, one a line, or ``.jsonl`` with a key ``prompt``."""

    __pydantic_config__ = STRICT

    train: str = "configs/prompts/shapes_train.txt"
    """Relative to the working directory."""
    eval: str = "configs/prompts/shapes_eval.txt"
    """Held out: never trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """How the samples of an iteration are drawn: ``num_prompts`` groups of ``group_size``."""

    __pydantic_config__ = STRICT

    num_prompts: int = 6
    """Prompts an iteration."""
    group_size: int = 16
    """Samples of each prompt, at least 2."""
    chunk_size: int | None = None
    """Rows that are denoised, and by default trained, together (null: one sample a prompt)."""
    num_inference_steps: int = 10
    """Denoising steps of a sample."""
    height: int = 32
    """Pixels."""
    width: int = 32
    """Pixels."""
    true_cfg_scale: float = 1.0
    """Above 1: guidance, at twice the denoiser calls; needs ``negative_prompt``."""
    negative_prompt: str | None = None
    """One for all prompts; null: no guidance."""
    sde_type: SdeType = "sde"
    """The kind of the stochastic steps (docs/numerics.md); ode is refused."""
    noise_level: float = 0.7
    """eta of the papers."""
    window: Window = field(default_factory=AllSteps)
    """Which steps are stochastic, and so trained."""
    latent_dtype: LatentDtype = "pipeline"
    """The state is the pipeline's rounded sample, or kept in float32."""
    same_noise: bool = False
    """The samples of a group start from one initial noise."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "num_inference_steps", "height", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, or no sample has another to be compared with; "
                f"got {self.group_size}"
            )
        if self.chunk_size is not None and not 1 <= self.chunk_size <= self.num_samples:
            raise ValueError(
                f"chunk_size must be in 1..num_prompts * group_size = {self.num_samples}; got "
                f"{self.chunk_size}"
            )
        if self.sde_type == "ode":
            raise ValueError("an ode rollout has no log-prob to train on; set sde_type sde or cps")
        if self.true_cfg_scale < 1:
            raise ValueError(
                f"true_cfg_scale must be at least 1, which is no guidance; got "
                f"{self.true_cfg_scale}"
            )
        if self.true_cfg_scale > 1 and self.negative_prompt is None:
            raise ValueError(
                f"true_cfg_scale {self.true_cfg_scale} has no effect without a negative prompt; "
                'set negative_prompt " " or true_cfg_scale 1'
            )
        if self.true_cfg_scale == 1 and self.negative_prompt is not None:
            raise ValueError(
                f"negative_prompt has no effect at true_cfg_scale {self.true_cfg_scale}; set "
                "true_cfg_scale above 1 or negative_prompt null"
            )
        steps = self.window.choose(0, self.num_inference_steps, 0)
        self.params(steps)
        last = self.num_inference_steps - 1
        if isinstance(self.window, RandomWindow):
            start = self.window.start_max
            reach = last if start is None else start + self.window.size - 1
        else:
            reach = max(steps)
        if self.sde_type == "cps" and reach == last:
            raise ValueError(
                f"cps has no density in the last step {last}, which ends at sigma 0; leave it out "
                "of the window, for example by window.exclude_last true"
            )

    @property
    def num_samples(self) -> int:
        """Samples an iteration."""
        return self.num_prompts * self.group_size

    @property
    def rows(self) -> int:
        """Rows of a whole chunk."""
        return self.chunk_size or self.num_prompts

    @property
    def num_chunks(self) -> int:
        """Chunks an iteration; the last may be smaller."""
        return math.ceil(self.num_samples / self.rows)

    def params(self, steps: tuple[int, ...]) -> RolloutParams:
        """Stochastic in ``steps``; kept are the states before and after them, and no others."""
        return RolloutParams(
            sde_type=self.sde_type,
            noise_level=self.noise_level,
            sde_step_indices=steps,
            return_step_indices=sorted({*steps, *(s + 1 for s in steps)}),
            latent_dtype=self.latent_dtype,
        )

    def sampling(self) -> dict[str, Any]:
        """Arguments of the pipeline call."""
        guided = {"true_cfg_scale": self.true_cfg_scale} if self.negative_prompt is not None else {}
        return guided | {
            "num_inference_steps": self.num_inference_steps,
            "height": self.height,
            "width": self.width,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringConfig:
    """What is done about rewards that fail."""

    __pydantic_config__ = STRICT

    timeout_s: float = 60.0
    """Seconds that a reward may take for a batch, and again for each sample of a failed one."""
    max_masked_fraction: float = 0.25
    """Failed samples are left out; the run stops when more of an iteration than this failed."""


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
class EvalConfig:
    """Deterministic samples of held-out prompts, with the same seeds each time."""

    __pydantic_config__ = STRICT

    every: int = 20
    """Iterations between evaluations; 0: only before and after training."""
    num_prompts: int | None = None
    """The first so many of the file (null: all)."""
    samples_per_prompt: int = 4
    """Pictures of each prompt."""
    num_inference_steps: int = 10
    """Denoising steps of a sample, all deterministic."""
    seed: int = 1234
    """Apart from the run's, so that runs of different seeds are compared on the same samples."""
    chunk_size: int = 32
    """Rows that are denoised together."""

    def __post_init__(self) -> None:
        for name in ("samples_per_prompt", "num_inference_steps", "chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.every < 0 or (self.num_prompts is not None and self.num_prompts < 1):
            raise ValueError(
                f"every must be >= 0 and num_prompts >= 1 or null; got {self.every}, "
                f"{self.num_prompts}"
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
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1; got {self.iterations}")
        updates = self.optim.updates_per_iteration
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
        if self.debug.save_rollouts and self.debug.load_rollouts:
            raise ValueError(
                "debug.save_rollouts has no effect with debug.load_rollouts: nothing is sampled; "
                "set one of them"
            )
