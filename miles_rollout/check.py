"""Checks this project's promises on one pipeline: ``python -m miles_rollout.check [PIPELINE]``.

PIPELINE is a tiny pipeline's name, a folder, or a hub name; it runs on the device at hand. The
table says what was measured, against which bound; the exit code is 1 if a bound does not hold.
Overhead and size are reported, never failed on. Run it before you trust a run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import peft
import torch
from diffusers import SchedulerMixin
from torch import Tensor, nn

from miles_rollout import RolloutEngine, RolloutParams, RolloutTrajectory, rollout
from miles_rollout.errors import MilesRolloutError
from miles_rollout.loading import TINY_PIPELINES, load_pipeline
from miles_rollout.media import Media
from miles_rollout.noise import keyed_generator, keyed_noise
from miles_rollout.transitions import schedule_step

PROMPTS = ["a red circle on a blue background", "a cat"]
SEEDS = (11, 12)
STEPS = 6
PAIRS = 5
"""Timed calls, with and without a rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table; ``passed`` is None for what is only reported."""

    name: str
    measured: str
    bound: str = ""
    passed: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call of the pipeline's denoising part: what it takes, and a seed a row."""

    arguments: dict[str, Any]
    seeds: tuple[int, ...]

    def generators(self) -> list[torch.Generator]:
        """Of the initial noise."""
        return [keyed_generator("check", seed) for seed in self.seeds]


class Subject:
    """The pipeline under test, with two prompts: in one call, or in two where it takes one each."""

    def __init__(self, pipe: Any) -> None:
        self.engine = RolloutEngine(pipe)
        self.adapter = self.engine.adapter
        self.part = self.adapter.denoising_part(pipe)
        self.denoisers: list[Any] = [
            module
            for name in self.adapter.denoisers
            if isinstance(module := getattr(pipe, name, None), nn.Module)
        ]
        sampling = self.adapter.small_request(pipe) | {"num_inference_steps": STEPS}
        if self.adapter.scale_argument is not None:
            sampling[self.adapter.scale_argument] = 4.0
        inputs = [dict(self.adapter.sample_inputs(pipe)) for _ in PROMPTS]
        encoded = self.engine.encode(PROMPTS, inputs=inputs, **sampling)
        negatives = None
        if self.adapter.scale_argument is not None:
            negatives = self.engine.encode([" "] * len(PROMPTS), inputs=inputs, **sampling)
        rows = [[0], [1]] if self.adapter.one_sample else [[0, 1]]
        self.requests = [
            Request(
                arguments=self.adapter.collate(
                    [encoded[i] for i in group],
                    None if negatives is None else [negatives[i] for i in group],
                )
                | sampling,
                seeds=tuple(SEEDS[i] for i in group),
            )
            for group in rows
        ]

    def stock(self, request: Request) -> dict[str, Tensor]:
        """The final latents of a call as it is."""
        output = self.adapter.denoise(self.part, request.arguments, request.generators())
        return self.adapter.latents(output)

    def rolled(
        self, request: Request, params: RolloutParams
    ) -> tuple[RolloutTrajectory, dict[str, Tensor]]:
        """A rollout of that call, and its final latents."""
        with rollout(self.part, params, request.seeds, adapter=self.adapter) as session:
            latents = self.stock(request)
        return session.trajectory, latents

    def trajectory(self, params: RolloutParams) -> RolloutTrajectory:
        """The rollouts of all requests, joined."""
        return RolloutTrajectory.cat([self.rolled(r, params)[0] for r in self.requests])


def run_checks(pipe: Any) -> Iterator[Row]:
    """Measure, one row after the other. The pipeline gets a LoRA on the way."""
    subject = Subject(pipe)
    yield from _parity(subject)
    _attach_lora(subject)
    trajectory = subject.trajectory(RolloutParams(debug=True))
    yield _replay_row(subject, trajectory, "replay, same batch", None, 0.0)
    exact = next(subject.denoisers[0].parameters()).dtype == torch.float32
    yield _replay_row(subject, trajectory, "replay, row by row", 1, 1e-5 if exact else None)
    yield _counter_test(subject, trajectory)
    yield _sizes(subject)
    yield _overhead(subject)


def _parity(subject: Subject) -> Iterator[Row]:
    """Deterministic rollout against the stock call, and the stock call afterwards: decoded."""
    pipe, ode = subject.engine.pipe, RolloutParams(sde_type="ode")
    schedulers = [c for c in pipe.components.values() if isinstance(c, SchedulerMixin)]
    inside_gap = after_gap = 0.0
    for request in subject.requests:
        before = subject.stock(request)
        trajectory, inside = subject.rolled(request, ode)
        subject.rolled(request, RolloutParams())
        after = subject.stock(request)
        media = [
            _tensors(subject.engine.decode(latents, **trajectory.request))
            for latents in (before, inside, after)
        ]
        inside_gap = max(inside_gap, *map(_gap, media[0], media[1]))
        after_gap = max(after_gap, *map(_gap, media[0], media[2]))
    for name, gap in (("rollout without noise", inside_gap), ("stock call afterwards", after_gap)):
        yield Row(name=name, measured=f"max diff {gap:.3g}", bound="0", passed=gap == 0)
    now = [c for c in pipe.components.values() if isinstance(c, SchedulerMixin)]
    same = all(a is b for a, b in zip(schedulers, now, strict=True))
    yield Row(
        name="scheduler object", measured="same" if same else "other", bound="same", passed=same
    )


def _tensors(media: Sequence[Media]) -> list[Tensor]:
    parts = [part for m in media for part in (m.image, m.video, m.audio)]
    return [part for part in parts if part is not None]


def _gap(one: Tensor, other: Tensor) -> float:
    return (one.float() - other.float()).abs().max().item()


def _attach_lora(subject: Subject) -> None:
    """A LoRA on the attention that does something: B is not zero."""
    for module in subject.denoisers:
        linear = [n for n, part in module.named_modules() if isinstance(part, nn.Linear)]
        attention = [n for n in linear if "attn" in n.lower() or "attention" in n.lower()]
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=attention or linear)
        with torch.random.fork_rng(devices=[]):
            module.add_adapter(config)
    _set_lora(subject, 0.02)


def _set_lora(subject: Subject, scale: float) -> None:
    for module in subject.denoisers:
        for name, parameter in module.named_parameters():
            if ".lora_" in name:
                noise = keyed_noise([0], parameter.shape, "check_lora", name)[0]
                parameter.data = (noise * scale).to(parameter.device, torch.float32)


def _replay_row(
    subject: Subject,
    trajectory: RolloutTrajectory,
    name: str,
    rows: int | None,
    bound: float | None,
) -> Row:
    """The largest log-prob and velocity gap over all steps, with gradients on."""
    gap = velocity_gap = 0.0
    parts = [None] if rows is None else [[i] for i in range(trajectory.num_samples)]
    for step in trajectory.replayable_steps:
        for part in parts:
            replay = subject.engine.replay(trajectory, step, part)
            index = slice(None) if part is None else part
            old = trajectory.log_probs[index, step]
            gap = max(gap, _gap(replay.log_prob, old))
            for stream, now in replay.streams.items():
                held = trajectory.streams[stream].debug["velocity"][index, step]
                velocity_gap = max(velocity_gap, _gap(now.velocity, held))
    exact_velocity = velocity_gap == 0 or bound != 0
    return Row(
        name=name,
        measured=f"log-prob gap {gap:.3g}, velocity gap {velocity_gap:.3g}",
        bound="reported" if bound is None else f"log-prob {bound:g}",
        passed=None if bound is None else gap <= bound and exact_velocity,
    )


def _counter_test(subject: Subject, trajectory: RolloutTrajectory) -> Row:
    """With other weights, the ratio must move as the pipeline's own loop says it should.

    The first step starts from the same noise under any weights, so a second rollout with the
    changed weights gives the velocity there by another path than replay; the Gaussians are written
    out.
    """
    _set_lora(subject, 0.3)
    changed = subject.trajectory(trajectory.params)
    measured = (subject.engine.replay(trajectory, 0).log_prob - trajectory.log_probs[:, 0]).detach()
    _set_lora(subject, 0.02)
    predicted = trajectory.joint(
        {
            name: _exponent(trajectory, changed, name) - _exponent(trajectory, trajectory, name)
            for name, stream in trajectory.streams.items()
            if 0 in stream.sde_step_indices
        },
        0,
    )
    error = (measured - predicted).abs().max().item()
    moved = measured.abs().min().item()
    return Row(
        name="changed weights",
        measured=f"log-ratio {moved:.3g}, off the prediction by {error:.3g}",
        bound="1e-6 + 0.1 %",
        passed=moved > 1e-5 and error <= 1e-6 + 1e-3 * moved,
    )


def _exponent(trajectory: RolloutTrajectory, source: RolloutTrajectory, name: str) -> Tensor:
    """Of the Gaussian of the first step under the velocity of ``source``: [B], mean over elements."""
    stream = source.streams[name]
    x, x_next = (t.double() for t in trajectory.pair(name, 0))
    step = schedule_step(
        source.params.sde_type,
        x,
        stream.debug["velocity"][:, 0].double() * stream.velocity_sign,
        sigmas=stream.sigmas,
        step=0,
        noise_level=source.params.noise_level,
        next_sample=x_next,
    )
    exponents = -((x_next - step.mean) ** 2) / (2 * step.std**2)
    live = torch.ones_like(exponents) if stream.mask is None else stream.mask.double()
    return ((exponents * live).flatten(1).sum(1) / live.flatten(1).sum(1)).float()


def _sizes(subject: Subject) -> Row:
    few = RolloutParams(sde_step_indices=(1, 2), return_step_indices=(1, 2, 3))
    sizes = [subject.trajectory(p).nbytes / 1024 for p in (RolloutParams(), few)]
    return Row(
        name="trajectory size",
        measured=f"{sizes[0]:.1f} KiB in full, {sizes[1]:.1f} KiB for steps 1-2",
    )


def _overhead(subject: Subject) -> Row:
    """Median of pairs, latents only: decoding would hide the difference."""

    def seconds(call: Callable[[], Any]) -> float:
        started = time.perf_counter()
        call()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter() - started

    request = subject.requests[0]
    ratios = []
    for _ in range(PAIRS):
        base = seconds(lambda: subject.stock(request))
        ratios.append(seconds(lambda: subject.rolled(request, RolloutParams())) / base)
    return Row(
        name="time against stock", measured=f"{statistics.median(ratios):.2f} x, all steps kept"
    )


def print_table(rows: Iterator[Row]) -> bool:
    """Print each row as soon as it is measured; whether all passed."""
    good = True
    for row in rows:
        verdict = {True: "ok", False: "FAIL", None: "-"}[row.passed]
        print(f"{verdict:5} {row.name:24} {row.measured:48} {row.bound}", flush=True)
        good = good and row.passed is not False
    return good


def main() -> None:
    """Parse ``sys.argv``, print the table, exit with 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pipeline", nargs="?", default="tiny-qwen-image", help=f"{', '.join(TINY_PIPELINES)}, ..."
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    try:
        pipe = load_pipeline(arguments.pipeline, getattr(torch, arguments.dtype)).to(device)
        print(f"{arguments.pipeline} on {device}, {arguments.dtype}")
        good = print_table(run_checks(pipe))
    except MilesRolloutError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
