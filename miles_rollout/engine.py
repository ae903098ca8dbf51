"""Prompts in, trajectories out, velocities again: encode, generate, replay, decode.

The engine runs the pipeline that it is given, in this process. It expands prompts itself, encodes
each distinct prompt once, and knows nothing of rewards or losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from miles_rollout.call_signature import call_defaults
from miles_rollout.conditions import DenoiserCall, check_reachable, check_repeatable
from miles_rollout.encodings import Encodings
from miles_rollout.errors import RolloutParamsError
from miles_rollout.loading import load_pretrained
from miles_rollout.media import Media
from miles_rollout.params import RolloutParams
from miles_rollout.pipelines import PipelineAdapter, adapter_for
from miles_rollout.pipelines.base import DenoisingStep, Encoding
from miles_rollout.sample_request import (
    SampleRequest,
    check_inputs,
    check_sampling,
    negative_prompts,
)
from miles_rollout.scoring import Replay
from miles_rollout.session import rollout
from miles_rollout.shapes import Int
from miles_rollout.trajectory import RolloutTrajectory


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


@final
class RolloutEngine:
    """Rolls out and replays one diffusers pipeline through its adapter."""

    def __init__(self, pipe: Any, adapter: PipelineAdapter | None = None) -> None:
        self.pipe = pipe
        self.adapter = adapter or adapter_for(pipe)
        self._encodings = Encodings(pipe, self.adapter)

    @classmethod
    def from_pretrained(cls, name: str, **kwargs: Any) -> RolloutEngine:
        """Load a pipeline, modular or not, by folder or hub name; ``kwargs`` go to diffusers.

        Raises ``RolloutParamsError`` for a folder that holds none, or not all of one.
        """
        return cls(load_pretrained(name, **kwargs))

    # -- encode -----------------------------------------------------------------------------------

    def encode(
        self,
        prompts: Sequence[str],
        *,
        max_sequence_length: int | None = None,
        inputs: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> list[Encoding]:
        """Encode each distinct prompt once, alone and as given; later calls answer from memory.

        ``inputs`` holds what each prompt comes with, such as ``{"image": ...}``; they are told apart
        as objects and kept, so hand the same ones again and change none in place. What they become
        may depend on ``sampling``, such as ``height``: it is that of `generate`. Raises
        ``RolloutParamsError`` before a model runs.
        After all prompts of a run are encoded, `drop_text_encoders` frees the encoders' memory.
        """
        check_inputs(inputs, len(prompts), self.adapter.inputs)
        self._encodings.check(prompts, inputs, sampling)
        return self._encodings.encode(prompts, max_sequence_length, inputs, sampling)

    def drop_text_encoders(self) -> list[str]:
        """Take the components ``text_encoder*`` out of the pipeline; returns their names.

        What was encoded stays known, and `encode` raises ``RolloutStateError`` for anything else.
        Memory is free if the pipeline held the last reference. Raises ``RolloutParamsError`` for a
        pipeline without such a component.
        """
        return self._encodings.drop_text_encoders()

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
        inputs: Sequence[Mapping[str, Any]] | None = None,
        max_sequence_length: int | None = None,
        chunk_size: int | None = None,
        same_noise: bool = False,
        share_prefix: bool = False,
        decode: bool = True,
        **sampling: Any,
    ) -> Iterator[RolloutBatch]:
        """Yield ``group_size`` samples of every prompt in chunks of ``chunk_size`` rows.

        Rows run sample by sample: first sample 0 of every prompt, then sample 1 (default chunk: one
        sample of every prompt). A row's noise depends on (seed, iteration, prompt id, sample) alone;
        ``prompt_ids`` default to positions. ``same_noise`` starts a group from one initial noise;
        with it, ``share_prefix`` computes the steps before the first stochastic one once a prompt.
        Guidance is on where ``negative_prompt`` or a high enough scale asks for it, never by a
        pipeline's default alone. ``inputs`` holds what each prompt comes with, such as
        ``{"image": ...}``. ``sampling`` goes to the pipeline; an argument that it does not know is
        an error.
        """
        default_chunk = 1 if self.adapter.one_sample else len(prompts)
        request = SampleRequest(
            prompts=prompts if isinstance(prompts, str) else tuple(prompts),
            prompt_ids=tuple(range(len(prompts)) if prompt_ids is None else prompt_ids),
            metadata=tuple({} for _ in prompts) if metadata is None else tuple(metadata),
            group_size=group_size,
            chunk_size=default_chunk if chunk_size is None else chunk_size,
            seed=seed,
            iteration=iteration,
            same_noise=same_noise,
            share_prefix=share_prefix,
        )
        if self.adapter.one_sample and request.chunk_size != 1:
            raise RolloutParamsError(
                "RolloutEngine.generate: this pipeline takes one sample a call; got "
                f"chunk_size {chunk_size}; set 1"
            )
        check_sampling(sampling, self.adapter.sampling)
        check_inputs(inputs, len(prompts), self.adapter.inputs)
        self._encodings.check(prompts, inputs, sampling)
        negatives = negative_prompts(
            negative_prompt,
            len(prompts),
            argument=self.adapter.scale_argument or "guidance",
            implied=self.adapter.implied_negative,
            off=self.adapter.scale_off,
            **self._scales(sampling),
        )
        self._encodings.check(negatives or [], [], sampling)
        if max_sequence_length is not None:  # the pipeline cuts embeddings, too
            sampling["max_sequence_length"] = max_sequence_length
        return self._chunks(request, negatives, params, decode, sampling, inputs)

    def _scales(self, sampling: Mapping[str, Any]) -> dict[str, float | int | None]:
        """The largest guidance scale that was given, and the largest default of the others."""
        names = (self.adapter.scale_argument or "", *self.adapter.more_scale_arguments)
        declared = call_defaults(type(self.pipe))
        given = [sampling[name] for name in names if sampling.get(name) is not None]
        defaults = [
            declared[name] for name in names if sampling.get(name) is None and name in declared
        ]
        return {"scale": max(given, default=None), "default": max(defaults, default=None)}

    def _chunks(
        self,
        request: SampleRequest,
        negatives: list[str] | None,
        params: RolloutParams,
        decode: bool,
        sampling: dict[str, Any],
        inputs: Sequence[Mapping[str, Any]] | None,
    ) -> Iterator[RolloutBatch]:
        longest = sampling.get("max_sequence_length")
        encoded = self._encodings.encode(request.prompts, longest, inputs, sampling)
        negative = None
        if negatives is not None:
            negative = self._encodings.encode(negatives, longest, inputs, sampling)
        part = self.adapter.denoising_part(self.pipe)
        prefixes = request.prefixes()
        for rows, prefix in zip(request.chunks(), prefixes, strict=True):
            arguments = self.adapter.collate(
                [encoded[row.prompt] for row in rows],
                None if negative is None else [negative[row.prompt] for row in rows],
            )
            with rollout(
                part, params, request.seeds(rows), adapter=self.adapter, prefix=prefix
            ) as session:
                output = self.adapter.denoise(part, arguments | sampling, request.generators(rows))
            latents = self.adapter.latents(output)
            yield RolloutBatch(
                trajectory=session.trajectory,
                latents=latents,
                prompts=[request.prompts[row.prompt] for row in rows],
                group_ids=torch.tensor([request.prompt_ids[row.prompt] for row in rows]),
                sample_ids=torch.tensor([row.sample for row in rows]),
                metadata=[request.metadata[row.prompt] for row in rows],
                media=self.decode(latents, **session.trajectory.request) if decode else None,
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
        if not all(c.steps[step][0].module for c in trajectory.conditions):
            raise RolloutParamsError(
                "RolloutEngine.replay: the conditions of a loop of one's own name no denoiser; got "
                "those of init_rollout_env_if_enabled; call the denoiser, then "
                "RolloutTrajectory.score"
            )
        if samples is not None:
            trajectory = trajectory.select(samples)
        kept = {name: s.latent(step) for name, s in trajectory.streams.items()}
        return trajectory.score(step, self._velocities(trajectory, step, kept))

    def velocities(
        self, trajectory: RolloutTrajectory, step: int, states: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Call the denoiser as it was called in ``step``, but on ``states`` {stream: [B, ...]}.

        Returns the velocity noise - x0 of each stream, with gradients if they are on. Raises
        ``RolloutParamsError`` for a step whose calls were not kept (``call_step_indices``), for
        states that do not fit, and for a pipeline that computes an argument from the state, which
        would stay that of the rollout.
        """
        if step not in trajectory.call_steps:
            raise RolloutParamsError(
                f"RolloutEngine.velocities: the calls of step {step} were not kept; got those of "
                f"{list(trajectory.call_steps)}; add {step} to call_step_indices"
            )
        rows = trajectory.num_samples
        if states.keys() != trajectory.streams.keys() or any(
            len(state) != rows for state in states.values()
        ):
            raise RolloutParamsError(
                "RolloutEngine.velocities: needs a state of every row for each stream; got "
                f"{ {name: tuple(state.shape) for name, state in states.items()} }; pass "
                f"{sorted(trajectory.streams)}, each with {rows} rows"
            )
        for conditions in trajectory.conditions:
            missing = sorted(states.keys() - conditions.streams_of(step))
            if missing:
                raise RolloutParamsError(
                    f"RolloutEngine.velocities: the denoiser is not called with the state itself of "
                    f"{', '.join(missing)}, but with something made of it; got calls of "
                    f"{type(self.pipe).__name__}; train its log-probs instead"
                )
        parts = self._velocities(trajectory, step, states)
        return {n: parts[n] * s.velocity_sign for n, s in trajectory.streams.items()}

    def _velocities(
        self, trajectory: RolloutTrajectory, step: int, all_states: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The velocities of all rows as predicted, one rollout's rows at a time."""
        velocities: dict[str, list[Tensor]] = {}
        start = 0
        for conditions in trajectory.conditions:
            rows = slice(start, start + conditions.num_samples)
            states = conditions.states(step, {n: s[rows] for n, s in all_states.items()})
            calls = conditions.calls(step, states)
            with calls[0].autocast_scope():
                outputs = [self._call(call) for call in calls]
                parts = self.adapter.combine(
                    DenoisingStep(
                        index=step,
                        calls=calls,
                        outputs=outputs,
                        states=states,
                        sigmas={name: s.sigmas for name, s in trajectory.streams.items()},
                        timesteps={name: s.timesteps for name, s in trajectory.streams.items()},
                        guidance=trajectory.guidance,
                    )
                )
            for name in trajectory.streams:
                velocities.setdefault(name, []).append(parts[name])
            start = rows.stop
        return {name: torch.cat(pieces) for name, pieces in velocities.items()}

    def _call(self, call: DenoiserCall) -> Any:
        module = getattr(self.pipe, call.module)
        check_repeatable(call.module, module)
        if torch.is_grad_enabled():
            check_reachable(call.module, module)
        return module(*call.args, **call.kwargs)

    # -- decode -----------------------------------------------------------------------------------

    @torch.no_grad()
    def decode(self, latents: Mapping[str, Tensor], **request: Any) -> list[Media]:
        """Decode final latents as the pipeline does; ``request`` holds the call's sizes."""
        return self.adapter.decode(self.pipe, latents, request)
