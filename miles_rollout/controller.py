"""One latent stream of one request: samples it, scores it, records it, and knows of no other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from miles_rollout.conditions import version_of, without_graph
from miles_rollout.errors import RolloutParamsError, RolloutStateError
from miles_rollout.noise import check_seeds, keyed_noise
from miles_rollout.params import RolloutParams
from miles_rollout.schedulers import check_stochastic, convention_of
from miles_rollout.shapes import Bool, Float
from miles_rollout.stream_trajectory import StreamTrajectory
from miles_rollout.transitions import schedule_step

OdeTransition = Callable[[Tensor, Tensor], Tensor]
"""(velocity as predicted, sample) -> next sample: the loop's own deterministic update."""


@final
class FlowRolloutController:
    """Takes the steps of one stream and keeps what its `RolloutParams` name.

    ``sigmas`` and ``timesteps`` [T + 1] are the stream's full schedule, terminal values included;
    ``seeds`` has one entry a row. ``velocity_sign`` is -1 where the denoiser predicts x0 - noise.
    ``mask`` (True: live, broadcast against the sample) marks what may be noised and scored.
    ``euler_ode``: take deterministic steps as Euler steps, for a loop whose own update has memory.

    Raises ``RolloutParamsError`` for a schedule that is none, seeds that are no ints, and indices
    that do not fit the schedule.
    """

    def __init__(
        self,
        params: RolloutParams,
        seeds: Sequence[int],
        *,
        stream: str,
        sigmas: Float[Tensor, " boundaries"],
        timesteps: Float[Tensor, " boundaries"],
        velocity_sign: float | int = 1.0,
        mask: Bool[Tensor, "..."] | None = None,
        euler_ode: bool = False,
    ) -> None:
        _check_schedule(stream, sigmas, timesteps, velocity_sign)
        self.params = params
        self.stream = stream
        self.plan = params.plan(sigmas, stream)
        for step in self.plan.sde_steps:
            s, n = sigmas[step].item(), sigmas[step + 1].item()
            if not 1 >= s >= n >= 0:
                _refuse(
                    stream,
                    f"sigmas of the stochastic step {step} are not within 1..0",
                    f"{s:g} to {n:g}",
                    "the sigmas of flow matching",
                )
        self.next_step = 0
        self.seeds = check_seeds(seeds)
        self._sigmas = sigmas.detach().cpu().clone()
        self._timesteps = timesteps.detach().cpu().clone()
        self._velocity_sign = float(velocity_sign)
        self._mask = mask
        self._euler_ode = euler_ode
        self.recorded = frozenset(self.plan.recorded)
        """The steps whose denoiser calls are kept."""
        self._mean_steps = frozenset(self.plan.replayable if params.return_means else ())
        self._means: dict[int, Tensor] = {}
        self._sde_steps = frozenset(self.plan.sde_steps)
        self._place = {boundary: k for k, boundary in enumerate(self.plan.boundaries)}
        self._latents: Tensor | None = None
        self._log_probs: list[Tensor | None] = []
        self._debug: dict[str, list[Tensor]] = {}
        self._state: Tensor | None = None
        self._emitted: tuple[Tensor, int] | None = None
        self._live: Tensor | None = None

    @property
    def done(self) -> bool:
        """Every step was taken."""
        return self.next_step == self.plan.num_steps

    def declare_mask(self, mask: Bool[Tensor, "..."]) -> None:
        """Mark what is live (True), broadcast against the sample, before the first step."""
        if self.next_step:
            raise RolloutStateError(
                f"rollout: the mask of stream {self.stream!r} came after step {self.next_step - 1}; "
                "got a late mask; declare it before the first step"
            )
        self._mask = mask

    @without_graph
    def transition(
        self,
        velocity: Float[Tensor, "batch ..."],
        sample: Float[Tensor, "batch ..."],
        *,
        step: int,
        ode: OdeTransition,
        out_dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "batch ..."]:
        """Step ``step`` from ``sample``: stochastic where the plan says so, else by ``ode``.

        Returns the next sample in ``out_dtype`` (default: the velocity's). Steps are taken in
        order, each once; ``sample`` must be what the last one returned, unless both steps are
        deterministic. Raises ``RolloutStateError`` otherwise.
        """
        self._check(step, velocity, sample)
        if self._mask is not None and self._mask.shape != sample.shape:
            self._mask = torch.broadcast_to(self._mask, sample.shape).contiguous()
        out_dtype = out_dtype or velocity.dtype
        keeps_float32 = self.params.latent_dtype == "float32"
        x = sample
        if keeps_float32:
            x = sample.to(torch.float32) if self._state is None else self._state
            if self._state is not None and self._mask is not None:
                x = torch.where(self._mask, x, sample)
        self._capture(step, x)
        if step in self._sde_steps:
            next_x = self._stochastic(
                velocity, x, step, torch.float32 if keeps_float32 else out_dtype
            )
        else:
            next_x = self._deterministic(velocity, x, step, ode, keeps_float32, out_dtype)
        self.next_step = step + 1
        if keeps_float32:
            self._state = next_x
        emitted = next_x.to(out_dtype)
        if self.done:
            self._capture(step + 1, next_x)
        self._emitted = (emitted, version_of(emitted))
        if self._mask is not None:
            self._live = emitted[self._mask]
        return emitted

    @without_graph
    def trajectory(self) -> StreamTrajectory:
        """What was recorded. Raises ``RolloutStateError`` before the last step, or after a NaN."""
        if not self.done:
            raise RolloutStateError(
                f"rollout: stream {self.stream!r} was interrupted after {self.next_step} of "
                f"{self.plan.num_steps} steps; got no complete trajectory; run the whole loop"
            )
        assert self._emitted is not None
        rows, device = len(self.seeds), self._emitted[0].device
        zero = torch.zeros(rows, dtype=torch.float32, device=device)
        log_probs = torch.stack([zero if p is None else p for p in self._log_probs], dim=1)
        self._check_finite(log_probs)
        if (
            self._mask is not None
            and self._latents is not None
            and self.plan.num_steps in self._place
        ):
            final = self._latents[:, self._place[self.plan.num_steps]]
            final.copy_(torch.where(self._mask, final, self._emitted[0]))
        num_elements = torch.full((rows,), self._numel, device=device)
        if self._mask is not None:
            num_elements = self._mask.flatten(1).sum(1)
        return StreamTrajectory(
            latents=torch.empty(rows, 0) if self._latents is None else self._latents,
            latent_step_indices=torch.tensor(self.plan.boundaries, dtype=torch.int64),
            timesteps=self._timesteps.clone(),
            sigmas=self._sigmas.clone(),
            log_probs=log_probs,
            sde_step_indices=self.plan.sde_steps,
            num_elements=num_elements,
            mask=self._mask,
            velocity_sign=self._velocity_sign,
            means=self._means,
            debug={name: torch.stack(items, dim=1) for name, items in self._debug.items()},
        )

    def _stochastic(self, velocity: Tensor, x: Tensor, step: int, out_dtype: torch.dtype) -> Tensor:
        noise = keyed_noise(self.seeds, x.shape[1:], "transition", self.stream, step).to(x.device)
        taken = schedule_step(
            self.params.sde_type,
            x,
            velocity * self._velocity_sign if self._velocity_sign != 1 else velocity,
            sigmas=self._sigmas,
            step=step,
            noise_level=self.params.noise_level,
            noise=noise,
            mask=self._mask,
            out_dtype=out_dtype,
        )
        self._log_probs.append(taken.log_prob)
        if step in self._mean_steps:
            self._means[step] = taken.mean.detach().clone()
        self._keep_debug(velocity=velocity, mean=taken.mean, std=taken.std, noise=noise)
        return taken.next_sample

    def _deterministic(
        self,
        velocity: Tensor,
        x: Tensor,
        step: int,
        ode: OdeTransition,
        keeps_float32: bool,
        out_dtype: torch.dtype,
    ) -> Tensor:
        if self._euler_ode:
            next_x = schedule_step(
                "ode",
                x,
                velocity * self._velocity_sign if self._velocity_sign != 1 else velocity,
                sigmas=self._sigmas,
                step=step,
                noise_level=0.0,
                out_dtype=torch.float32 if keeps_float32 else out_dtype,
            ).next_sample
        else:
            next_x = ode(velocity.to(torch.float32) if keeps_float32 else velocity, x)
        self._log_probs.append(None)
        if self.params.debug:
            std = torch.zeros(len(x), *[1] * (x.ndim - 1), device=x.device)
            self._keep_debug(velocity=velocity, mean=next_x, std=std, noise=torch.zeros_like(x))
        return next_x

    def _keep_debug(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items() if self.params.debug else ():
            self._debug.setdefault(name, []).append(tensor.detach().to(torch.float32, copy=True))

    def _capture(self, boundary: int, state: Tensor) -> None:
        """Copy a kept state to its place in [B, K, ...]; the widest dtype that occurs wins."""
        self._numel = state.numel() // len(state)
        if boundary not in self._place:
            return
        if self._latents is None:
            shape = (len(state), len(self._place), *state.shape[1:])
            self._latents = torch.empty(shape, dtype=state.dtype, device=state.device)
        elif self._latents.dtype != state.dtype:
            widest = torch.promote_types(self._latents.dtype, state.dtype)
            self._latents = self._latents.to(widest)
        self._latents[:, self._place[boundary]] = state

    def _check_finite(self, log_probs: Tensor) -> None:
        """One look at the end, since a NaN stays: a look a step would stall the accelerator."""
        assert self._emitted is not None
        finite = torch.isfinite(log_probs)
        rows = finite.all(1) & torch.isfinite(self._emitted[0]).flatten(1).all(1)
        if not rows.all():
            row = int(rows.logical_not().nonzero()[0])
            bad = finite[row].logical_not().nonzero().flatten().tolist()
            where = f"log-prob of step {bad[0]}" if bad else "final latent"
            raise RolloutStateError(
                f"rollout: sample {row} of stream {self.stream!r} is not finite; got a NaN or "
                f"infinite {where}; check the denoiser's weights, dtype and guidance scale"
            )

    def _check(self, step: int, velocity: Tensor, sample: Tensor) -> None:
        if self.done:
            raise RolloutStateError(
                f"rollout: all {self.plan.num_steps} steps of stream {self.stream!r} were taken; got "
                f"step {step}; take every step once and in order"
            )
        if step != self.next_step:
            raise RolloutStateError(
                f"rollout: stream {self.stream!r} expected step {self.next_step}; got step {step}; "
                "take every step once and in order"
            )
        if len(sample) != len(self.seeds):
            raise RolloutParamsError(
                f"rollout: one seed a row is needed; got {len(self.seeds)} seeds for "
                f"{len(sample)} rows of stream {self.stream!r}; pass {len(sample)} seeds"
            )
        if velocity.shape != sample.shape:
            raise RolloutParamsError(
                f"rollout: a velocity has the shape of its sample; got {tuple(velocity.shape)} for "
                f"{tuple(sample.shape)} of stream {self.stream!r}; pass it unbroadcast"
            )
        near_noise = step in self._sde_steps or step - 1 in self._sde_steps
        if self._emitted is None or not (near_noise or self.params.latent_dtype == "float32"):
            return
        emitted, version = self._emitted
        in_place = version_of(emitted) != version
        if sample is emitted and not in_place:
            return
        if self._mask is not None and self._live is not None:
            same = torch.equal(sample.to(emitted.dtype)[self._mask], self._live)
        else:
            same = not in_place and torch.equal(sample.to(emitted.dtype), emitted)
        if not same:
            raise RolloutStateError(
                f"rollout: stream {self.stream!r} was changed between steps {step - 1} and {step}, "
                "next to a stochastic step, so its log-prob would describe another sample; got a "
                "changed latent; remove the callback that changes it, or declare it in an adapter"
            )


def _check_schedule(
    stream: str, sigmas: Tensor, timesteps: Tensor, velocity_sign: float | int
) -> None:
    """What a schedule must be for any step; what a stochastic one needs is `RolloutParams.plan`'s."""
    if sigmas.ndim != 1 or len(sigmas) < 2:
        _refuse(
            stream, "sigmas are [T + 1] with T >= 1 steps", tuple(sigmas.shape), "terminal included"
        )
    if timesteps.shape != sigmas.shape:
        _refuse(
            stream,
            "timesteps have the sigmas' length, terminal value included",
            f"{tuple(timesteps.shape)} for {tuple(sigmas.shape)}",
            "[T + 1] of both",
        )
    if not all(map(math.isfinite, [*sigmas.tolist(), *timesteps.tolist()])):
        _refuse(stream, "a schedule is finite", sigmas.tolist(), "the scheduler's own sigmas")
    if velocity_sign not in (1, -1):
        _refuse(
            stream,
            "velocity_sign is 1 where the denoiser predicts noise - x0, -1 for x0 - noise",
            velocity_sign,
            "1 or -1",
        )


def _refuse(stream: str, problem: str, value: object, advice: str) -> NoReturn:
    raise RolloutParamsError(f"rollout: stream {stream!r}: {problem}; got {value}; pass {advice}")


def check_one_length(controllers: Mapping[str, FlowRolloutController]) -> None:
    """Refuse streams whose schedules have different numbers of steps."""
    (first, held), *others = controllers.items()
    for name, other in others:
        if other.plan.num_steps != held.plan.num_steps:
            raise RolloutParamsError(
                f"rollout: streams share their steps; got {held.plan.num_steps} steps for "
                f"{first!r} and {other.plan.num_steps} for {name!r}; give both schedules one length"
            )


def controller_for(
    scheduler: Any, params: RolloutParams, seeds: Sequence[int], stream: str
) -> FlowRolloutController:
    """The controller of a stream that a diffusers scheduler drives, its timesteps being set.

    Raises ``RolloutParamsError`` for a scheduler whose steps have no density, if one is needed.
    """
    if not params.is_deterministic and params.plan(scheduler.sigmas, stream).sde_steps:
        check_stochastic(scheduler)
    convention = convention_of(scheduler)
    timesteps = scheduler.timesteps.detach().cpu().float()
    terminal = timesteps.new_tensor([convention.terminal_timestep])
    return FlowRolloutController(
        params,
        seeds,
        stream=stream,
        sigmas=scheduler.sigmas,
        timesteps=torch.cat([timesteps, terminal]),
        velocity_sign=convention.velocity_sign,
        euler_ode=convention.has_memory and not params.is_deterministic,
    )
