"""Prompts in, trajectories out, velocities again: encode, generate, replay, decode.

The engine runs the pipeline that it is given, in this process. It expands prompts itself, encodes
each distinct prompt once, and knows nothing of rewards or losses.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from miles_rollout.conditions import DenoiserCall
from miles_rollout.errors import RolloutParamsError, RolloutStateError
from miles_rollout.media import Media
from miles_rollout.noise import derive_seed, keyed_generator
from miles_rollout.params import RolloutParams
from miles_rollout.pipelines import PipelineAdapter, adapter_for
from miles_rollout.pipelines.base import Encoding
from miles_rollout.session import rollout
from miles_rollout.shapes import Float, Int
from miles_rollout.trajectory import RolloutTrajectory
from miles_rollout.transitions import schedule_step


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """One chunk of an iteration's samples: B rows that were denoised together."""

    trajectory: RolloutTrajectory
    latents: Mapping[str, Tensor]
    """The final latents of each stream, to decode."""
    prompts: list[str]
    group_ids: Int[Tensor, " batch"]
    """Which prompt of the request each row belongs to, by id and never by text."""
    sample_ids: Int[Tensor, " batch"]
    """Which sample of its group each row is."""
    metadata: list[Mapping[str, Any]]
    media: list[Media] | None = None
    """None until decoded."""


@dataclass(frozen=True, kw_only=True)
class StreamReplay:
    """One step of one stream, computed again with the weights of now."""

    velocity: Float[Tensor, "rows ..."]
    mean: Float[Tensor, "rows ..."]
    std: Float[Tensor, "rows ..."]
    log_prob: Float[Tensor, " rows"]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One step of all streams; ``log_prob`` is joint over the stochastic ones."""

    streams: dict[str, StreamReplay] = field(default_factory=dict)
    log_prob: Float[Tensor, " rows"]


@final
class RolloutEngine:
    """Rolls out and replays one diffusers pipeline through its adapter."""

    def __init__(self, pipe: Any, adapter: PipelineAdapter | None = None) -> None:
        self.pipe = pipe
        self.adapter = adapter or adapter_for(pipe)
        self._encodings: dict[tuple[str, int | None, torch.dtype], Encoding] = {}

    @classmethod
    def from_pretrained(cls, name: str, **kwargs: Any) -> RolloutEngine:
        """Load a pipeline by folder or hub name; ``kwargs`` go to diffusers."""
        return cls(DiffusionPipeline.from_pretrained(name, **kwargs))

    # -- encode -----------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], *, max_sequence_length: int | None = None
    ) -> list[Encoding]:
        """Encode each distinct prompt once, alone and as given; later calls answer from memory.

        After all prompts of a run are encoded, the text encoder can leave the device:
        ``engine.pipe.text_encoder.to("cpu")``.
        """
        dtype = self.pipe.dtype  # of the whole pipeline: what was encoded before a cast is stale
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise RolloutParamsError(
                    f"RolloutEngine.encode: prompts are strings; got {prompt!r}; pass a list of str"
                )
            key = (prompt, max_sequence_length, dtype)
            if key not in self._encodings:
                self._encodings[key] = self.adapter.encode(self.pipe, prompt, max_sequence_length)
        return [self._encodings[prompt, max_sequence_length, dtype] for prompt in prompts]

    # -- generate ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str],
        group_size: int,
        params: RolloutParams,
        *,
        seed: int,
        iteration: int = 0,
        prompt_ids: Sequence[int] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        max_sequence_length: int | None = None,
        chunk_size: int | None = None,
        same_noise: bool = False,
        decode: bool = True,
        **sampling: Any,
    ) -> Iterator[RolloutBatch]:
        """Yield ``group_size`` samples of every prompt in chunks of ``chunk_size`` rows.

        Rows run sample by sample: first sample 0 of every prompt, then sample 1 (default chunk: one
        sample of every prompt). A row's noise depends on (seed, iteration, prompt id, sample) alone;
        ``prompt_ids`` default to positions. ``same_noise`` starts a group from one initial noise.
        ``sampling`` goes to the pipeline; an argument that it does not know is an error.
        """
        ids = list(range(len(prompts)) if prompt_ids is None else prompt_ids)
        self._check_generate(prompts, group_size, chunk_size, metadata, ids, sampling)
        for name, value in (
            ("seed", seed),
            ("iteration", iteration),
            *(("prompt_ids", i) for i in ids),
        ):
            if isinstance(value, bool) or not isinstance(value, int):
                raise RolloutParamsError(
                    f"RolloutEngine.generate: {name} must be int; got {value!r}; pass an int"
                )
        if max_sequence_length is not None:
            sampling["max_sequence_length"] = max_sequence_length
        return self._chunks(
            list(prompts),
            self._negatives(negative_prompt, len(prompts), sampling),
            ids,
            [{} for _ in prompts] if metadata is None else list(metadata),
            params,
            key=(seed, iteration),
            group_size=group_size,
            chunk_size=chunk_size or len(prompts),
            same_noise=same_noise,
            decode=decode,
            sampling=sampling,
        )

    def _chunks(
        self,
        prompts: list[str],
        negatives: list[str] | None,
        ids: list[int],
        metadata: list[Mapping[str, Any]],
        params: RolloutParams,
        *,
        key: tuple[int, int],
        group_size: int,
        chunk_size: int,
        same_noise: bool,
        decode: bool,
        sampling: dict[str, Any],
    ) -> Iterator[RolloutBatch]:
        longest = sampling.get("max_sequence_length")
        encoded = self.encode(prompts, max_sequence_length=longest)
        negative = None
        if negatives is not None:
            negative = self.encode(negatives, max_sequence_length=longest)
        rows = [(g, p) for g in range(group_size) for p in range(len(prompts))]
        for start in range(0, len(rows), chunk_size):
            chunk = rows[start : start + chunk_size]
            arguments = self.adapter.collate(
                [encoded[p] for _, p in chunk],
                None if negative is None else [negative[p] for _, p in chunk],
            )
            trajectory, latents = self._roll_out(
                params,
                seeds=[derive_seed("sample", *key, ids[p], g) for g, p in chunk],
                initial=[(*key, ids[p], 0 if same_noise else g) for g, p in chunk],
                arguments=arguments | sampling,
            )
            yield RolloutBatch(
                trajectory=trajectory,
                latents=latents,
                prompts=[prompts[p] for _, p in chunk],
                group_ids=torch.tensor([ids[p] for _, p in chunk]),
                sample_ids=torch.tensor([g for g, _ in chunk]),
                metadata=[metadata[p] for _, p in chunk],
                media=self.decode(latents, **trajectory.request) if decode else None,
            )

    def _roll_out(
        self,
        params: RolloutParams,
        seeds: list[int],
        initial: list[tuple[int, int, int, int]],
        arguments: dict[str, Any],
    ) -> tuple[RolloutTrajectory, dict[str, Tensor]]:
        generators = [keyed_generator("initial_noise", *key) for key in initial]
        with rollout(self.pipe, params, seeds, adapter=self.adapter) as session:
            output = self.pipe(**arguments, generator=generators, output_type="latent")
        return session.trajectory, self.adapter.latents(output)

    def _negatives(
        self, negative: str | Sequence[str] | None, count: int, sampling: Mapping[str, Any]
    ) -> list[str] | None:
        scale = sampling.get("true_cfg_scale", 1.0)
        if negative is None:
            if scale > 1:
                warnings.warn(
                    f"RolloutEngine.generate: true_cfg_scale has no effect without a negative "
                    f"prompt; got {scale}; set negative_prompt=' ' to turn guidance on",
                    stacklevel=3,
                )
            return None
        if "true_cfg_scale" in sampling and scale <= 1:
            warnings.warn(
                f"RolloutEngine.generate: negative_prompt has no effect at true_cfg_scale {scale}; "
                f"got {negative!r}; set true_cfg_scale > 1",
                stacklevel=3,
            )
        values = [negative] * count if isinstance(negative, str) else list(negative)
        if len(values) != count:
            raise RolloutParamsError(
                f"RolloutEngine.generate: one negative prompt, or one a prompt; got {len(values)} "
                f"for {count} prompts; pass a string"
            )
        return values

    def _check_generate(
        self,
        prompts: Sequence[str],
        group_size: int,
        chunk_size: int | None,
        metadata: Sequence[Any] | None,
        prompt_ids: Sequence[int] | None,
        sampling: Mapping[str, Any],
    ) -> None:
        where = "RolloutEngine.generate"
        if isinstance(prompts, str) or not prompts:
            raise RolloutParamsError(
                f"{where}: needs a list of prompts; got {prompts!r}; pass [..]"
            )
        for name, value in (("group_size", group_size), ("chunk_size", chunk_size)):
            if value is not None and (isinstance(value, bool) or value < 1):
                raise RolloutParamsError(f"{where}: {name} must be >= 1; got {value}; set {name}")
        for name, values in (("metadata", metadata), ("prompt_ids", prompt_ids)):
            if values is not None and len(values) != len(prompts):
                raise RolloutParamsError(
                    f"{where}: one {name} entry a prompt; got {len(values)} for {len(prompts)} "
                    "prompts; pass as many"
                )
        if prompt_ids is not None and len(set(prompt_ids)) != len(prompt_ids):
            raise RolloutParamsError(
                f"{where}: prompt_ids tell groups apart; got repeats in {list(prompt_ids)}; pass "
                "distinct ids"
            )
        unknown = sorted(set(sampling) - self.adapter.sampling)
        if unknown:
            raise RolloutParamsError(
                f"{where}: no such sampling argument; got {', '.join(unknown)}; choose among "
                f"{', '.join(sorted(self.adapter.sampling))}"
            )

    # -- replay -----------------------------------------------------------------------------------

    def replay(
        self,
        trajectory: RolloutTrajectory,
        step: int,
        samples: Sequence[int] | Tensor | None = None,
    ) -> Replay:
        """Call the denoiser again as it was called in ``step``, with gradients if they are on.

        ``samples`` are rows of the trajectory (None: all). With the batch of the rollout and the
        same weights, velocity and log-prob are bitwise those of the rollout. Raises
        ``RolloutParamsError`` for a step or a row that was not recorded, and ``RolloutStateError``
        for a log-prob that is not finite.
        """
        if step not in trajectory.replayable_steps:
            raise RolloutParamsError(
                f"RolloutEngine.replay: step {step} was not recorded; got replayable steps "
                f"{list(trajectory.replayable_steps)}; make it stochastic and keep boundaries "
                f"{step} and {step + 1}"
            )
        if samples is not None:
            trajectory = trajectory.select(samples)
        velocities: dict[str, list[Tensor]] = {}
        start = 0
        for conditions in trajectory.conditions:
            rows = slice(start, start + conditions.num_samples)
            states = {
                name: stream.latent(step)[rows].contiguous()
                for name, stream in trajectory.streams.items()
            }
            calls = conditions.calls(step, states)
            with calls[0].autocast_scope():
                outputs = [self._call(call) for call in calls]
                parts = self.adapter.combine(outputs, trajectory.guidance)
            for name, velocity in parts.items():
                velocities.setdefault(name, []).append(velocity)
            start = rows.stop
        streams = {
            name: self._score(trajectory, name, step, torch.cat(pieces))
            for name, pieces in velocities.items()
            if step in trajectory.streams[name].sde_step_indices
        }
        joint = trajectory.joint({name: s.log_prob for name, s in streams.items()}, step)
        if not torch.isfinite(joint).all():
            raise RolloutStateError(
                f"RolloutEngine.replay: the log-prob of step {step} is not finite; got "
                f"{joint.tolist()}; check the denoiser's weights, dtype and guidance scale"
            )
        return Replay(streams=streams, log_prob=joint)

    def _call(self, call: DenoiserCall) -> Any:
        return getattr(self.pipe, call.module)(*call.args, **call.kwargs)

    def _score(
        self, trajectory: RolloutTrajectory, name: str, step: int, velocity: Tensor
    ) -> StreamReplay:
        stream = trajectory.streams[name]
        x, x_next = trajectory.pair(name, step)
        scored = schedule_step(
            trajectory.params.sde_type,
            x,
            velocity * stream.velocity_sign if stream.velocity_sign != 1 else velocity,
            sigmas=stream.sigmas,
            step=step,
            noise_level=trajectory.params.noise_level,
            next_sample=x_next,
            mask=stream.mask,
        )
        return StreamReplay(
            velocity=velocity, mean=scored.mean, std=scored.std, log_prob=scored.log_prob
        )

    # -- decode -----------------------------------------------------------------------------------

    @torch.no_grad()
    def decode(self, latents: Mapping[str, Tensor], **request: Any) -> list[Media]:
        """Decode final latents as the pipeline does; ``request`` holds the call's sizes."""
        return self.adapter.decode(self.pipe, latents, request)
