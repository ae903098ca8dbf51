"""What is sampled: the rollouts that are trained on, and the evaluations beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_rollout.params import LatentDtype, RolloutParams
from miles_rollout.transitions import SdeType
from trainers.config_loader import STRICT
from trainers.rewards.scoring import RewardConfig
from trainers.windows import AllSteps, Window

OWN_KEYS = (
    "num_inference_steps",
    "height",
    "width",
    "num_frames",
    "guidance_scale",
    "true_cfg_scale",
    "negative_prompt",
)
"""Arguments of a pipeline's call that have a key of their own."""

_SIZES = ("num_prompts", "num_inference_steps", "height", "width", "num_frames")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """How the samples of an iteration are drawn: ``num_prompts`` groups of ``group_size``."""

    __pydantic_config__ = STRICT

    num_prompts: int = 6
    """Prompts an iteration."""
    group_size: int = 16
    """Samples of each prompt, at least 2."""
    chunk_size: int | None = None
    """Rows that are denoised, and by default trained, together (null: one sample a prompt, or one
    in all where a pipeline takes one sample a call)."""
    num_inference_steps: int = 10
    """Denoising steps of a sample, as the pipeline counts: MiniMax H3 takes one less."""
    height: int = 32
    """Pixels."""
    width: int = 32
    """Pixels."""
    num_frames: int | None = None
    """Of a video (null: the pipeline's default)."""
    guidance_scale: float | None = None
    """The pipeline's argument of that name (null: not given). Where its guidance goes by it, above 1
    (Z-Image: 0) means guidance, with an empty negative prompt if there is none and the family knows
    one."""
    true_cfg_scale: float = 1.0
    """Above 1: guidance, at twice the denoiser calls; needs ``negative_prompt``."""
    negative_prompt: str | None = None
    """One for all prompts; null: no guidance by one."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's call, by its own names; one that it lacks is an error."""
    sde_type: SdeType = "sde"
    """The kind of the stochastic steps (docs/numerics.md); ode: there are none, for algorithms
    without log-probs."""
    noise_level: float = 0.7
    """eta of the papers."""
    window: Window = field(default_factory=AllSteps)
    """Which steps are trained; they are the stochastic ones, unless sde_type is ode."""
    sde_streams: tuple[str, ...] | None = None
    """The latent streams that are stochastic, and so trained, such as [video] (null: all)."""
    stream_weights: Literal["element"] | Mapping[str, float] = "element"
    """The joint log-prob: a mean over all elements, or a weighted sum of the streams' means, such as
    {video: 0.5, audio: 0.5}."""
    steps_after_window: int | None = None
    """At most so many steps follow the window, fewer and larger ones, where the family allows it
    (docs/models.md); evaluations keep all (null: all)."""
    latent_dtype: LatentDtype = "pipeline"
    """The state is the pipeline's rounded sample, or kept in float32."""
    same_noise: bool = False
    """The samples of a group start from one initial noise."""
    share_prefix: bool = False
    """Steps before the window are computed once a prompt; needs ``same_noise``."""

    def __post_init__(self) -> None:
        for name in (*_SIZES, "steps_after_window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, or no sample has another to be compared with; "
                f"got {self.group_size}"
            )
        if self.chunk_size is not None and not 1 <= self.chunk_size <= self.num_samples:
            raise ValueError(
                f"chunk_size must be in 1..num_prompts * group_size = {self.num_samples}; got "
                f"{self.chunk_size}; set rollout.chunk_size null, or at most {self.num_samples}"
            )
        if self.share_prefix and not self.same_noise:
            raise ValueError(
                "share_prefix needs samples that start from one noise; got same_noise false; set "
                "same_noise true or share_prefix false"
            )
        if self.share_prefix and self.chunk_size and self.num_prompts % self.chunk_size:
            raise ValueError(
                f"share_prefix needs chunks of the same prompts; got chunk_size {self.chunk_size} "
                f"for {self.num_prompts} prompts; set a chunk_size that divides num_prompts"
            )
        self._check_guidance()
        self._check_streams()
        for name in self.sampling:
            if name in OWN_KEYS:
                raise ValueError(
                    f"sampling.{name} has a key of its own; got {self.sampling[name]!r}; set "
                    f"rollout.{name}"
                )
        self._check_schedule()
        # No family makes more evaluations than it is asked for.
        self.check_window(self.num_inference_steps)

    def _check_guidance(self) -> None:
        if self.true_cfg_scale < 1:
            raise ValueError(
                f"true_cfg_scale must be at least 1, which is no guidance; got "
                f"{self.true_cfg_scale}"
            )
        if self.guidance_scale is not None and self.guidance_scale < 0:
            raise ValueError(f"guidance_scale must be >= 0 or null; got {self.guidance_scale}")
        if self.true_cfg_scale > 1 and self.negative_prompt is None:
            raise ValueError(
                f"true_cfg_scale {self.true_cfg_scale} has no effect without a negative prompt; "
                'set negative_prompt " " or true_cfg_scale 1'
            )
        elsewhere = self.guidance_scale is not None or any("scale" in n for n in self.sampling)
        if self.true_cfg_scale == 1 and not elsewhere and self.negative_prompt is not None:
            raise ValueError(
                f"negative_prompt has no effect at true_cfg_scale {self.true_cfg_scale}; set "
                "true_cfg_scale (or guidance_scale, where guidance goes by that) above 1 or "
                "negative_prompt null"
            )

    def _check_streams(self) -> None:
        streams, weights = self.sde_streams, self.stream_weights
        if streams is not None and self.sde_type == "ode":
            raise ValueError(
                f"sde_streams has no effect with sde_type ode, where no stream is stochastic; got "
                f"{list(streams)}; set null, and weights in stream_weights"
            )
        if streams is not None and (not streams or len(set(streams)) < len(streams)):
            raise ValueError(
                f"sde_streams must name one or more streams, each once; got {list(streams)}; set "
                "null for all"
            )
        if isinstance(weights, str):
            return
        if not weights or any(weight < 0 for weight in weights.values()):
            raise ValueError(
                f"stream_weights must be >= 0, one a stream; got {dict(weights)}; set for example "
                "{video: 0.5, audio: 0.5}, or element"
            )
        if not any(weights.values()):
            raise ValueError(
                f"stream_weights: all are 0, so nothing is trained; got {dict(weights)}; set one"
            )

    def _check_schedule(self) -> None:
        if self.steps_after_window is None:
            return
        if self.sde_type == "ode":
            raise ValueError(
                "steps_after_window: with sde_type ode no step is stochastic, and none comes after; "
                f"got {self.steps_after_window}; set null, and a smaller num_inference_steps"
            )
        for name in ("sigmas", "timesteps"):
            if name in self.sampling:
                raise ValueError(
                    f"steps_after_window cuts the pipeline's own schedule; got sampling.{name} "
                    f"{self.sampling[name]!r} beside it; leave one of them out"
                )

    def check_window(self, num_steps: int) -> None:
        """Raise ``ValueError`` where the window, or a step of it, has no place in so many steps, or
        no iteration would have fewer steps after it."""
        steps = self.window.choose(0, num_steps, 0)
        self.params(steps)
        last = num_steps - 1
        if self.sde_type == "cps" and self.window.reach(num_steps) == last:
            raise ValueError(
                f"cps has no density in the last step {last}, which ends at sigma 0; leave it out "
                "of the window, for example by window.exclude_last true"
            )
        follow = last - self.window.earliest_end(num_steps)
        if self.steps_after_window is not None and self.steps_after_window >= follow:
            raise ValueError(
                f"steps_after_window has no effect where at most {follow} steps follow the window; "
                f"got {self.steps_after_window}; set "
                f"{f'{follow - 1} or less' if follow > 1 else 'null'}"
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
        if self.sde_type == "ode":
            return RolloutParams(
                sde_type="ode",
                return_step_indices=(),
                stream_weights=self.stream_weights,
                latent_dtype=self.latent_dtype,
            )
        return RolloutParams(
            sde_type=self.sde_type,
            noise_level=self.noise_level,
            sde_step_indices=steps,
            sde_streams=self.sde_streams,
            return_step_indices=sorted({*steps, *(s + 1 for s in steps)}),
            stream_weights=self.stream_weights,
            latent_dtype=self.latent_dtype,
        )

    def arguments(self, num_inference_steps: int | None = None) -> dict[str, Any]:
        """Arguments of the pipeline call, with another number of steps if it is given."""
        given: dict[str, Any] = {
            "num_inference_steps": num_inference_steps or self.num_inference_steps,
            "height": self.height,
            "width": self.width,
        }
        if self.num_frames is not None:
            given["num_frames"] = self.num_frames
        if self.guidance_scale is not None:
            given["guidance_scale"] = self.guidance_scale
        if self.true_cfg_scale > 1:
            given["true_cfg_scale"] = self.true_cfg_scale
        return given | dict(self.sampling)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Deterministic samples of held-out prompts, with the same seeds each time."""

    __pydantic_config__ = STRICT

    every: int = 20
    """Iterations between evaluations; 0: only before and after training."""
    num_prompts: int | None = None
    """The first so many of the file (null: all)."""
    samples_per_prompt: int = 4
    """Samples of each prompt."""
    num_inference_steps: int = 10
    """Denoising steps of a sample, all deterministic."""
    seed: int = 1234
    """Apart from the run's, so that runs of different seeds are compared on the same samples."""
    chunk_size: int | None = None
    """Rows that are denoised together (null: 32, or 1 where a pipeline takes one sample a call)."""
    rewards: tuple[RewardConfig, ...] = ()
    """Further rewards of the evaluation samples, only logged, as ``eval/reward/<name>``: they show
    whether what is trained is what was meant."""

    def __post_init__(self) -> None:
        for name in ("samples_per_prompt", "num_inference_steps", "chunk_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        for reward in self.rewards:
            if reward.weight != 1:
                raise ValueError(
                    f"rewards are only logged, so a weight has no effect; got weight {reward.weight} "
                    f"for {reward.name!r}; leave it out"
                )
        if self.every < 0 or (self.num_prompts is not None and self.num_prompts < 1):
            raise ValueError(
                f"every must be >= 0 and num_prompts >= 1 or null; got {self.every}, "
                f"{self.num_prompts}"
            )

    @property
    def rows(self) -> int:
        """Rows of a whole chunk."""
        return self.chunk_size or 32
