"""One denoising step of a flow-matching model: its mean, its noise, its log-prob.

Convention: x_s = (1 - s) x0 + s noise and velocity v = noise - x0; s falls from 1 to 0 and
n < s is the next sigma. A step is ``next = mean(x, v) + std noise``; the functions named after the
papers give mean and std, and `flow_step` does the rest. Rollout and replay call the same function,
since another way to write the same sum rounds differently; ``step_rows`` runs it over a batch.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from miles_rollout.errors import RolloutParamsError
from miles_rollout.shapes import Bool, Float
from miles_rollout.step_rows import FlowStep, Step, step_rows

SdeType = Literal["ode", "sde", "cps", "dance_sde"]
SDE_TYPES: tuple[str, ...] = get_args(SdeType)
NEAR_ONE = 0.99
"""A first sigma from here up counts as 1."""


def ode(s: float, n: float) -> Step:
    """The Euler step of the probability-flow ODE: x + v dt."""
    dt = n - s
    return Step(lambda x, v, out, _: torch.mul(v, dt, out=out).add_(x), 0.0)


def sde(s: float, n: float, eta: float, sigma_denominator: float) -> Step:
    """Flow-GRPO, arXiv 2505.05470, eq. 9, with g = eta sqrt(s / (1 - s)).

    ``sigma_denominator`` stands for s in that 1 - s: s itself, or the schedule's second sigma where
    s is 1 and g would be infinite.
    """
    dt = n - s
    g = eta * math.sqrt(s / (1 - sigma_denominator))
    x_factor = 1 + g**2 * dt / (2 * s)
    v_factor = (1 + g**2 * (1 - s) / (2 * s)) * dt

    def mean(x: Tensor, v: Tensor, out: Tensor | None, scratch: Tensor | None) -> Tensor:
        return torch.mul(x, x_factor, out=out).add_(torch.mul(v, v_factor, out=scratch))

    return Step(mean, g * math.sqrt(-dt))


def dance_sde(s: float, n: float, eta: float) -> Step:
    """DanceGRPO, arXiv 2505.07818: constant g = eta, drift along the score of the marginal."""
    dt = n - s

    def mean(x: Tensor, v: Tensor, out: Tensor | None, _: Tensor | None) -> Tensor:
        x0 = x - s * v
        score = -(x - (1 - s) * x0) / s**2
        return torch.sub(x + dt * v, 0.5 * eta**2 * dt * score, out=out)

    return Step(mean, eta * math.sqrt(-dt))


def cps(s: float, n: float, eta: float) -> Step:
    """Flow-CPS, arXiv 2509.05952: noise that keeps the coefficients of data and noise."""
    std = n * math.sin(eta * math.pi / 2)
    keep = math.sqrt(max(n**2 - std**2, 0.0))

    def mean(x: Tensor, v: Tensor, out: Tensor | None, _: Tensor | None) -> Tensor:
        x0, x1 = x - s * v, x + (1 - s) * v
        return torch.add(x0 * (1 - n), x1 * keep, out=out)

    return Step(mean, std)


def make_step(sde_type: str, s: float, n: float, eta: float, sigma_denominator: float) -> Step:
    """The step of a kind from sigma s to n. Noise level 0 is the ODE, whatever the kind."""
    if sde_type == "ode" or eta == 0:
        return ode(s, n)
    if sde_type == "sde":
        return sde(s, n, eta, sigma_denominator)
    return dance_sde(s, n, eta) if sde_type == "dance_sde" else cps(s, n, eta)


def flow_step(
    sde_type: SdeType,
    sample: Float[Tensor, "batch ..."],
    velocity: Float[Tensor, "batch ..."],
    *,
    sigma: float | int | Tensor,
    sigma_next: float | int | Tensor,
    noise_level: float | int,
    sigma_max: float | int | Tensor | None = None,
    noise: Float[Tensor, "batch ..."] | None = None,
    next_sample: Float[Tensor, "batch ..."] | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    out_dtype: torch.dtype | None = None,
) -> FlowStep:
    """Take a step with ``noise``, or score the step that led to ``next_sample``.

    Sigmas are scalars or [B], with sigma >= sigma_next. ``sigma_max`` is the second sigma of the
    full schedule, used by "sde" where sigma is 1. ``mask`` (True: live) broadcasts against the
    sample; masked-out elements follow the ODE and are neither noised, scored nor counted.
    float32 arithmetic whatever autocast says; float64 stays. Raises ``RolloutParamsError``.
    """
    _check(sde_type, sample, velocity, noise_level, noise, next_sample)
    rows = sample.shape[0]
    sigmas = _per_row("sigma", sigma, rows)
    sigmas_next = _per_row("sigma_next", sigma_next, rows)
    for s, n in zip(sigmas, sigmas_next, strict=True):
        if not 1 >= s >= n >= 0 or s == 0:
            raise RolloutParamsError(
                f"flow_step: a step goes from sigma in (0, 1] down to sigma_next >= 0; got {s} to "
                f"{n}; pass two neighbours of the scheduler's sigmas"
            )
    denominators = sigmas
    if sde_type == "sde" and noise_level > 0:
        denominators = _denominators(sigmas, sigma_max)
    keys = list(zip(sigmas, sigmas_next, denominators, strict=True))
    made = {
        (s, n, d): (make_step(sde_type, s, n, float(noise_level), d), ode(s, n)) for s, n, d in keys
    }
    return step_rows(
        [made[key] for key in keys],
        sample,
        velocity,
        noise=noise,
        next_sample=next_sample,
        mask=mask,
        out_dtype=out_dtype,
        normalised=sde_type != "cps",
    )


def schedule_step(
    sde_type: SdeType,
    sample: Float[Tensor, "batch ..."],
    velocity: Float[Tensor, "batch ..."],
    *,
    sigmas: Float[Tensor, " boundaries"],
    step: int,
    noise_level: float | int,
    noise: Float[Tensor, "batch ..."] | None = None,
    next_sample: Float[Tensor, "batch ..."] | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    out_dtype: torch.dtype | None = None,
) -> FlowStep:
    """`flow_step` at one step of a full schedule: what rollout and replay both call.

    A schedule that starts a hair below 1 (UniPC: 1 - 1e-6, Sana: 0.9997) would have a std 5 to 1000
    times too large at its first step, so the second sigma stands in the denominator there too.
    """
    _check(sde_type, sample, velocity, noise_level, noise, next_sample)
    s, n, second = sigmas[step].item(), sigmas[step + 1].item(), sigmas[1].item()
    denominator = second if step == 0 and s >= NEAR_ONE else s
    made = (make_step(sde_type, s, n, float(noise_level), denominator), ode(s, n))
    return step_rows(
        [made] * sample.shape[0],
        sample,
        velocity,
        noise=noise,
        next_sample=next_sample,
        mask=mask,
        out_dtype=out_dtype,
        normalised=sde_type != "cps",
    )


def _check(
    sde_type: str,
    sample: Tensor,
    velocity: Tensor,
    noise_level: float | int,
    noise: Tensor | None,
    next_sample: Tensor | None,
) -> None:
    if sde_type not in SDE_TYPES:
        raise RolloutParamsError(
            f"flow_step: unknown sde_type; got {sde_type!r}; choose one of {', '.join(SDE_TYPES)}"
        )
    if not (math.isfinite(noise_level) and noise_level >= 0):
        raise RolloutParamsError(
            f"flow_step: noise_level must be finite and >= 0; got {noise_level}; set noise_level"
        )
    if sde_type == "cps" and noise_level > 1:
        raise RolloutParamsError(
            f"flow_step: cps keeps its coefficients only up to noise_level 1; got {noise_level}; "
            "set 0 <= noise_level <= 1"
        )
    given = [name for name, t in (("noise", noise), ("next_sample", next_sample)) if t is not None]
    if sde_type == "ode" and given:
        raise RolloutParamsError(
            f"flow_step: an ode step has no noise and no density; got {' and '.join(given)}; "
            "pass neither"
        )
    if sde_type != "ode" and len(given) != 1:
        raise RolloutParamsError(
            f"flow_step: a {sde_type} step is drawn from noise or scored for next_sample; got "
            f"{' and '.join(given) or 'neither'}; pass exactly one"
        )
    named = {"velocity": velocity, "noise": noise, "next_sample": next_sample}
    for name, tensor in named.items():
        if tensor is not None and tensor.shape != sample.shape:
            raise RolloutParamsError(
                f"flow_step: {name} must have the sample's shape {tuple(sample.shape)}; got "
                f"{tuple(tensor.shape)}; pass it unbroadcast"
            )


def _per_row(name: str, sigma: float | int | Tensor, rows: int) -> list[float]:
    values = sigma.double().flatten().tolist() if isinstance(sigma, Tensor) else [float(sigma)]
    if len(values) not in (1, rows):
        raise RolloutParamsError(
            f"flow_step: {name} must be a scalar or one value a row; got {len(values)} values for "
            f"{rows} rows; pass [{rows}]"
        )
    return values * rows if len(values) == 1 else values


def _denominators(sigmas: list[float], sigma_max: float | int | Tensor | None) -> list[float]:
    if 1.0 not in sigmas:
        return sigmas
    if sigma_max is None or not 0 <= float(sigma_max) < 1:
        raise RolloutParamsError(
            f"flow_step: the sde std is infinite at sigma 1; got sigma_max {sigma_max}; pass the "
            "second sigma of the full schedule as sigma_max"
        )
    return [float(sigma_max) if s == 1.0 else s for s in sigmas]
