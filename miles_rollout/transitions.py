"""One denoising step of a flow-matching model: its mean, its noise, its log-prob.

Convention: x_s = (1 - s) x0 + s noise and velocity v = noise - x0; s falls from 1 to 0 and
n < s is the next sigma. A step is ``next = mean(x, v) + std noise``; the functions named after the
papers give mean and std, and `flow_step` does the rest. Rollout and replay call the same function,
since another way to write the same sum rounds differently. A sample's numbers do not depend on the
batch it stands in: sums run over one row, and no multiplication is fused with an addition (a fused
kernel rounds the last elements of a tensor otherwise).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from miles_rollout.errors import RolloutParamsError
from miles_rollout.shapes import Bool, Float

SdeType = Literal["ode", "sde", "cps", "dance_sde"]
SDE_TYPES: tuple[str, ...] = get_args(SdeType)
NEAR_ONE = 0.99
"""A first sigma from here up counts as 1."""
_PART_ELEMENTS = 1 << 18


class Step(NamedTuple):
    """``next = mean(x, v) + std noise`` for one row."""

    mean: Callable[[Tensor, Tensor], Tensor]
    std: float


class FlowStep(NamedTuple):
    """What one step did to a batch."""

    next_sample: Float[Tensor, "batch ..."]
    """The emitted sample, in ``out_dtype``."""
    mean: Float[Tensor, "batch ..."]
    """float32 (float64 for float64 input)."""
    std: Float[Tensor, "batch ..."]
    """The full standard deviation, [B, 1, ..., 1]."""
    log_prob: Float[Tensor, " batch"]
    """Mean over the unmasked non-batch elements; 0 for a step without noise."""


def ode(s: float, n: float) -> Step:
    """The Euler step of the probability-flow ODE."""
    dt = n - s
    return Step(lambda x, v: x + v * dt, 0.0)


def sde(s: float, n: float, eta: float, sigma_denominator: float) -> Step:
    """Flow-GRPO, arXiv 2505.05470, eq. 9, with g = eta sqrt(s / (1 - s)).

    ``sigma_denominator`` stands for s in that 1 - s: s itself, or the schedule's second sigma where
    s is 1 and g would be infinite.
    """
    dt = n - s
    g = eta * math.sqrt(s / (1 - sigma_denominator))
    x_factor = 1 + g**2 * dt / (2 * s)
    v_factor = (1 + g**2 * (1 - s) / (2 * s)) * dt
    return Step(lambda x, v: (x * x_factor).add_(v * v_factor), g * math.sqrt(-dt))


def dance_sde(s: float, n: float, eta: float) -> Step:
    """DanceGRPO, arXiv 2505.07818: constant g = eta, drift along the score of the marginal."""
    dt = n - s

    def mean(x: Tensor, v: Tensor) -> Tensor:
        x0 = x - s * v
        score = -(x - (1 - s) * x0) / s**2
        return x + dt * v - 0.5 * eta**2 * dt * score

    return Step(mean, eta * math.sqrt(-dt))


def cps(s: float, n: float, eta: float) -> Step:
    """Flow-CPS, arXiv 2509.05952: noise that keeps the coefficients of data and noise."""
    std = n * math.sin(eta * math.pi / 2)
    keep = math.sqrt(max(n**2 - std**2, 0.0))

    def mean(x: Tensor, v: Tensor) -> Tensor:
        x0, x1 = x - s * v, x + (1 - s) * v
        return x0 * (1 - n) + x1 * keep

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
    return _step_rows(
        sde_type,
        list(zip(sigmas, sigmas_next, denominators, strict=True)),
        float(noise_level),
        sample,
        velocity,
        noise,
        next_sample,
        mask,
        out_dtype,
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
    return _step_rows(
        sde_type,
        [(s, n, denominator)] * sample.shape[0],
        float(noise_level),
        sample,
        velocity,
        noise,
        next_sample,
        mask,
        out_dtype,
    )


def _step_rows(
    sde_type: str,
    sigmas: Sequence[tuple[float, float, float]],
    noise_level: float,
    sample: Tensor,
    velocity: Tensor,
    noise: Tensor | None,
    next_sample: Tensor | None,
    mask: Tensor | None,
    out_dtype: torch.dtype | None,
) -> FlowStep:
    dtype = torch.promote_types(torch.promote_types(sample.dtype, velocity.dtype), torch.float32)
    out_dtype = out_dtype or (dtype if next_sample is None else next_sample.dtype)
    mask = None if mask is None else torch.broadcast_to(mask, sample.shape)
    inputs = [t for t in (sample, velocity, noise) if t is not None]
    keep_graph = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    means = _Parts(sample.shape, dtype, sample.device, keep_graph)
    nexts = _Parts(sample.shape, out_dtype, sample.device, keep_graph)
    log_probs, stds = [], []
    with torch.autocast(sample.device.type, enabled=False):
        for rows in _cut(sigmas, sample[0].numel()):
            s, n, denominator = sigmas[rows.start]
            step = make_step(sde_type, s, n, noise_level, denominator)
            stds += [step.std] * (rows.stop - rows.start)
            x, v = sample[rows].to(dtype).contiguous(), velocity[rows].to(dtype).contiguous()
            live = None if mask is None else mask[rows]
            mean = step.mean(x, v)
            if live is not None:
                mean = torch.where(live, mean, ode(s, n).mean(x, v))
            if next_sample is not None:
                emitted = next_sample[rows]
            elif noise is None or step.std == 0:
                emitted = nexts.put(rows, mean)
            else:
                eps = noise[rows] if live is None else noise[rows].masked_fill(~live, 0)
                emitted = nexts.put_sum(rows, mean, eps.to(mean) * step.std)
            means.put(rows, mean)
            log_probs.append(_log_probs(emitted, mean, step.std, live, sde_type != "cps"))
    std = torch.tensor(stds, dtype=dtype, device=sample.device)
    return FlowStep(
        next_sample=nexts.batch() if next_sample is None else next_sample,
        mean=means.batch(),
        std=std.view(-1, *[1] * (sample.ndim - 1)),
        log_prob=torch.cat(log_probs),
    )


def _cut(sigmas: Sequence[tuple[float, float, float]], row_elements: int) -> Iterator[slice]:
    """Runs of rows that take the same step and stay in the cache together.

    How rows are cut is a matter of speed alone: no operation on a part looks across its rows, or
    rounds an element by where it stands.
    """
    most = max(1, _PART_ELEMENTS // max(row_elements, 1))
    start = 0
    for i in range(1, len(sigmas) + 1):
        if i == len(sigmas) or sigmas[i] != sigmas[start] or i - start == most:
            yield slice(start, i)
            start = i


class _Parts:
    """Collects the parts of a batch; in place where no graph is kept, which saves a copy."""

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, keep_graph: bool
    ) -> None:
        self._num_rows = shape[0]
        self._dtype = dtype
        self._parts: list[Tensor] = []
        self._batch = None if keep_graph else torch.empty(shape, dtype=dtype, device=device)

    def put(self, rows: slice, part: Tensor) -> Tensor:
        if self._batch is None or rows == slice(0, self._num_rows):
            self._batch = None
            self._parts.append(part.to(self._dtype))
            return self._parts[-1]
        return self._batch[rows].copy_(part)

    def put_sum(self, rows: slice, a: Tensor, b: Tensor) -> Tensor:
        if self._batch is not None and self._dtype == a.dtype:
            return torch.add(a, b, out=self._batch[rows])
        return self.put(rows, a + b)

    def batch(self) -> Tensor:
        if self._batch is not None:
            return self._batch
        return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)


def _log_probs(
    emitted: Tensor, mean: Tensor, std: float, mask: Tensor | None, normalised: bool
) -> Tensor:
    """Of each row: the mean of the Gaussian log density, or of the bare -(residual)^2 (Flow-CPS)."""
    if std == 0 and normalised:
        return mean.new_zeros(len(mean))
    residual = emitted.to(mean.dtype).contiguous() - mean
    square = residual * residual
    count: float | Tensor = max(square[0].numel(), 1)
    if mask is not None:
        square = square.masked_fill(~mask, 0)
        count = torch.stack([row.sum() for row in mask]).clamp(min=1)
    # Row by row: how a sum over one axis of a batch is split may depend on the batch.
    mean_square = torch.stack([row.sum() for row in square.unbind(0)]) / count
    if not normalised:
        return -mean_square
    return mean_square * (-0.5 / std**2) - (math.log(std) + 0.5 * math.log(2 * math.pi))


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
