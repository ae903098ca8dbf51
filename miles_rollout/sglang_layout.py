"""Trajectories in the layout of SGLang's rollout responses, and back.

A response is one sample of one latent stream: ``rollout_log_probs`` [T], ``dit_trajectory``
(``latents`` [K, ...], ``timesteps`` [T + 1], ``sigmas`` [T + 1], ``latent_step_indices`` [K]),
``rollout_debug_tensors`` and ``denoising_env``. What that layout has no field for (the parameters of
the rollout, stream names, the velocity's sign, a clock of 1 - sigma, per-step arguments of the
denoiser) is passed, and what cannot be said at all is refused. ``docs/embedding.md`` has the table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from miles_rollout.conditions import AxisOrders
from miles_rollout.errors import RolloutParamsError
from miles_rollout.params import RolloutParams, StepPlan
from miles_rollout.sglang_env import Branch, BuildCalls, env_rows, read_conditions
from miles_rollout.sglang_response import ResponseReader, as_wire
from miles_rollout.stream_trajectory import StreamTrajectory
from miles_rollout.trajectory import RolloutTrajectory

DEBUG_NAMES = {
    "velocity": "rollout_model_outputs",
    "mean": "rollout_prev_sample_means",
    "std": "rollout_noise_std_devs",
    "noise": "rollout_variance_noises",
}
"""The names of `StreamTrajectory.debug` -> those of ``rollout_debug_tensors``."""


def to_sglang(
    trajectory: RolloutTrajectory,
    *,
    stream: str | None = None,
    branches: Sequence[Branch] | None = None,
    per_step: Collection[str] = ("hidden_states", "timestep"),
    wire: bool = False,
) -> list[dict[str, Any]]:
    """One response a sample, with tensors on the CPU.

    ``stream`` is the one to write (None: the only one). ``branches`` tells which guidance branch
    each denoiser call of a step is, or each block of rows in it, in order: "pos" or "neg" (None:
    one call, positive). ``per_step`` names denoiser arguments that are no conditioning; what differs
    between recorded steps is left out as well. ``wire``: tensors as in the server's message.

    Raises ``RolloutParamsError`` for what the layout cannot say: several streams, a mask, no kept
    latent, more branches than a positive and a negative one, means, calls of steps without a log-prob.
    """
    if stream is None and len(trajectory.streams) > 1:
        _refuse(
            "a response holds one stream", f"streams {sorted(trajectory.streams)}", "pass stream="
        )
    name = next(iter(trajectory.streams)) if stream is None else stream
    if name not in trajectory.streams:
        _refuse("no such stream", repr(name), f"choose among {sorted(trajectory.streams)}")
    _check_kept(trajectory.params)
    held = trajectory.streams[name]
    if held.mask is not None:
        _refuse(
            "the layout has no mask, so a reader would score masked elements too",
            f"a mask on stream {name!r}",
            "keep such trajectories with RolloutTrajectory.save",
        )
    if not len(held.latent_step_indices):
        _refuse(
            "without a kept latent the layout drops the schedule as well",
            "return_step_indices ()",
            "keep a boundary, for example the final one",
        )
    held = held.map(lambda t: t.detach().cpu(), lambda t: t.detach().cpu())
    envs = [env for c in trajectory.conditions for env in env_rows(c, branches, per_step)]
    shared = {
        "timesteps": held.sigmas * 1000 if _counts_up(held) else held.timesteps.clone(),
        "sigmas": held.sigmas.clone(),
        "latent_step_indices": held.latent_step_indices.clone(),
    }
    responses = [
        {
            "rollout_log_probs": held.log_probs[row].clone(),
            "rollout_debug_tensors": _debug_row(held, row),
            "denoising_env": envs[row] if envs else None,
            "dit_trajectory": {"latents": held.latents[row].clone(), **shared},
        }
        for row in range(trajectory.num_samples)
    ]
    return [as_wire(response) for response in responses] if wire else responses


def from_sglang(
    responses: Mapping[str, Sequence[Any]],
    *,
    params: RolloutParams,
    velocity_sign: Mapping[str, float | int] | None = None,
    one_minus_sigma: Collection[str] = (),
    log_prob_no_const: bool | None = None,
    calls: BuildCalls | None = None,
    batch_axes: Mapping[str, int | None] | None = None,
    blocks: Mapping[str, int] | None = None,
    axis_orders: AxisOrders | None = None,
    guidance: Mapping[str, float | bool] | None = None,
    request: Mapping[str, Any] | None = None,
) -> RolloutTrajectory:
    """The trajectory of samples that were denoised together, from a list of responses a stream.

    ``responses`` maps stream names to responses, one a sample: mappings or objects with SGLang's
    field names, tensors as they are or as in the server's message. ``params`` says what the server
    was asked for. ``velocity_sign`` is -1 for a stream whose denoiser predicts x0 - noise, and
    ``one_minus_sigma`` names the streams whose clock is 1 - sigma. ``log_prob_no_const`` is the
    request's: log-probs must be densities, but for "cps". ``calls`` makes the denoiser calls of a
    step out of ``denoising_env``, for `RolloutEngine.replay`; ``batch_axes`` and ``blocks`` are then
    those of the denoiser's arguments, as in an adapter, and ``axis_orders`` is the memory layout of
    the states where it was not contiguous. ``guidance`` and ``request`` are kept.

    Raises ``RolloutParamsError`` naming the sample and the field that is missing, not finite, or
    contradicts another one or ``params``.
    """
    if not responses:
        _refuse("no streams", "{}", "pass {stream: [one response a sample]}")
    params.check_streams(list(responses))
    _check_kept(params)
    signs = dict(velocity_sign or {})
    _check_known("velocity_sign", signs, responses)
    _check_known("one_minus_sigma", one_minus_sigma, responses)
    _check_convention(params, log_prob_no_const)
    readers = {
        name: [ResponseReader(name, i, response) for i, response in enumerate(_listed(name, held))]
        for name, held in responses.items()
    }
    counts = {name: len(held) for name, held in readers.items()}
    if len(set(counts.values())) > 1:
        _refuse("streams share their samples", counts, "pass as many responses for each")
    streams = {
        name: _read_stream(
            held, params, float(signs.get(name, 1.0)), counts_up=name in one_minus_sigma
        )
        for name, held in readers.items()
    }
    if len({stream.num_steps for stream in streams.values()}) > 1:
        steps = {name: stream.num_steps for name, stream in streams.items()}
        _refuse("streams share their steps", steps, "pass streams of one request")
    trajectory = RolloutTrajectory(
        streams=streams, params=params, guidance=guidance or {}, request=request or {}
    )
    if calls is None:
        return trajectory
    first = next(iter(readers.values()))
    conditions = read_conditions(first, trajectory, calls, batch_axes or {}, blocks or {})
    conditions = replace(conditions, axis_orders=axis_orders or {})
    return replace(trajectory, conditions=(conditions,))


def _read_stream(
    readers: Sequence[ResponseReader], params: RolloutParams, sign: float, *, counts_up: bool
) -> StreamTrajectory:
    first = readers[0]
    sigmas = first.tensor("dit_trajectory.sigmas", ndim=1)
    num_steps = len(sigmas) - 1
    timesteps = _clock(first, sigmas, counts_up)
    plan = params.plan(sigmas, first.stream)
    boundaries = first.boundaries(num_steps)
    if boundaries != list(plan.boundaries):
        first.refuse(
            "other boundaries were kept than params ask for",
            f"latent_step_indices {boundaries} for {list(plan.boundaries)}",
            "set RolloutParams.return_step_indices to what the server was asked for",
        )
    for reader in readers[1:]:
        reader.same_as(first, "dit_trajectory.sigmas", sigmas)
        reader.same_as(first, "dit_trajectory.timesteps", first.tensor("dit_trajectory.timesteps"))
        if reader.boundaries(num_steps) != boundaries:
            reader.refuse(
                "other boundaries were kept than for the first sample",
                f"{reader.boundaries(num_steps)} for {boundaries}",
                "pass samples of one request",
            )
    rows = [reader.tensor("dit_trajectory.latents") for reader in readers]
    for reader, row in zip(readers, rows, strict=True):
        if len(row) != len(boundaries) or row.shape != rows[0].shape or row.dtype != rows[0].dtype:
            reader.refuse(
                "latents are [K, ...], one for each of latent_step_indices, alike in all samples",
                f"{tuple(row.shape)} {row.dtype} for K = {len(boundaries)} and "
                f"{tuple(rows[0].shape)} {rows[0].dtype} of the first sample",
                "pass samples of one request",
            )
    latents = torch.stack(rows)
    log_probs = torch.stack([r.tensor("rollout_log_probs", shape=(num_steps,)) for r in readers])
    _check_log_probs(readers, log_probs, latents, plan)
    return StreamTrajectory(
        latents=latents,
        latent_step_indices=torch.tensor(boundaries, dtype=torch.int64),
        timesteps=timesteps,
        sigmas=sigmas,
        log_probs=log_probs,
        sde_step_indices=plan.sde_steps,
        num_elements=torch.full((len(readers),), rows[0][0].numel()),
        velocity_sign=sign,
        debug=_read_debug(readers, rows[0][0].shape, num_steps, sign),
    )


def _clock(reader: ResponseReader, sigmas: Tensor, counts_up: bool) -> Tensor:
    """The timesteps [T + 1] in the scheduler's own convention."""
    field = "dit_trajectory.timesteps"
    timesteps = reader.tensor(field, shape=sigmas.shape)
    if not ((sigmas >= 0) & (sigmas <= 1)).all():
        reader.refuse(
            "dit_trajectory.sigmas lie in 0..1", sigmas.tolist(), "pass sigmas, not times"
        )
    if not counts_up:
        if timesteps[0] < timesteps[-1]:
            reader.refuse(
                f"{field} rise, so the stream's clock is 1 - sigma",
                timesteps.tolist(),
                "name the stream in one_minus_sigma",
            )
        return timesteps if timesteps.is_floating_point() else timesteps.float()
    known = (sigmas * 1000, 1 - sigmas)
    if not any(torch.allclose(timesteps.to(t), t, rtol=0, atol=1e-3) for t in known):
        reader.refuse(
            f"{field} are neither sigma * 1000 nor 1 - sigma",
            timesteps.tolist(),
            "leave the stream out of one_minus_sigma",
        )
    return 1 - sigmas


def _check_log_probs(
    readers: Sequence[ResponseReader], log_probs: Tensor, latents: Tensor, plan: StepPlan
) -> None:
    """Columns must say what ``plan`` says, and samples must differ: each is a kind of silent loss."""
    stochastic = set(plan.sde_steps)
    for step in range(plan.num_steps):
        is_zero = bool((log_probs[:, step] == 0).all())
        if step in stochastic and is_zero:
            readers[0].refuse(
                f"step {step} is stochastic by params, but all of its log-probs are 0",
                f"sde_step_indices {sorted(stochastic)}",
                "set RolloutParams.sde_step_indices to what the server was asked for",
            )
        if step not in stochastic and log_probs[:, step].any():
            readers[0].refuse(
                f"step {step} is deterministic by params, but has a log-prob",
                log_probs[:, step].tolist(),
                "set RolloutParams.sde_step_indices to what the server was asked for",
            )
    for i in range(len(readers)) if stochastic else ():
        for j in range(i):
            if torch.equal(log_probs[i], log_probs[j]) and torch.equal(latents[i], latents[j]):
                readers[i].refuse(
                    f"holds the very trajectory of sample {j}, so a group would learn nothing",
                    "equal latents and log-probs",
                    "ask for one output a request, each with a seed of its own",
                )


def _debug_row(held: StreamTrajectory, row: int) -> dict[str, Tensor] | None:
    if not held.debug:
        return None
    tensors = {DEBUG_NAMES[name]: tensor[row].clone() for name, tensor in held.debug.items()}
    std = DEBUG_NAMES["std"]
    tensors[std] = tensors[std].reshape(-1, 1)
    outputs = DEBUG_NAMES["velocity"]
    if held.velocity_sign != 1:
        tensors[outputs] = tensors[outputs] * held.velocity_sign
    return tensors


def _read_debug(
    readers: Sequence[ResponseReader], shape: torch.Size, num_steps: int, sign: float
) -> dict[str, Tensor]:
    if not all(reader.has("rollout_debug_tensors") for reader in readers):
        return {}
    debug = {}
    for name, theirs in DEBUG_NAMES.items():
        field = f"rollout_debug_tensors.{theirs}"
        if name == "std":
            rows = [reader.tensor(field) for reader in readers]
            if any(row.numel() != num_steps for row in rows):
                readers[0].refuse(f"{field} is [T, 1]", rows[0].shape, "pass it whole")
            debug[name] = torch.stack([row.reshape(num_steps, *[1] * len(shape)) for row in rows])
        else:
            debug[name] = torch.stack([r.tensor(field, shape=(num_steps, *shape)) for r in readers])
    if sign != 1:
        debug["velocity"] = debug["velocity"] * sign
    return debug


def _counts_up(held: StreamTrajectory) -> bool:
    """The clock is 1 - sigma, where SGLang exports sigma * 1000."""
    return torch.equal(held.timesteps, 1 - held.sigmas)


def _check_convention(params: RolloutParams, no_const: bool | None) -> None:
    expected = params.sde_type == "cps"
    if no_const is not None and no_const != expected and not params.is_deterministic:
        _refuse(
            f"the log-prob of {params.sde_type!r} is "
            f"{'the bare -(residual)^2' if expected else 'a density with its constants'} here",
            f"log_prob_no_const {no_const}",
            f"ask the server with rollout_log_prob_no_const={expected}",
        )


def _check_kept(params: RolloutParams) -> None:
    if params.return_means or params.call_step_indices:
        _refuse(
            "the layout has no field for means, nor for the calls of steps that are not replayed",
            f"return_means {params.return_means}, call_step_indices {params.call_step_indices}",
            "leave them out, or keep such trajectories with RolloutTrajectory.save",
        )


def _check_known(argument: str, names: Collection[str], streams: Collection[str]) -> None:
    for name in names:
        if name not in streams:
            _refuse(f"{argument} names no stream", repr(name), f"choose among {', '.join(streams)}")


def _listed(name: str, held: Any) -> Sequence[Any]:
    if isinstance(held, (str, bytes, Mapping)) or not isinstance(held, Sequence) or not held:
        _refuse(
            f"stream {name!r} is a list of responses, one a sample",
            type(held).__name__,
            "unpack the message and pass the list",
        )
    return held


def _refuse(problem: str, value: object, advice: str) -> None:
    raise RolloutParamsError(f"sglang layout: {problem}; got {value}; {advice}")
