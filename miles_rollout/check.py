"""Checks this project's promises on one pipeline: ``python -m miles_rollout.check [PIPELINE]``.

PIPELINE is a tiny pipeline's name, a folder, or a hub name; it runs on the device at hand. The
table says what was measured, against which bound; the exit code is 1 if a bound does not hold.
Overhead and size are reported, never failed on. Run it before you trust a run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import peft
import torch
from torch import Tensor

from miles_rollout import RolloutEngine, RolloutParams, RolloutTrajectory, rollout
from miles_rollout.errors import MilesRolloutError, RolloutParamsError
from miles_rollout.loading import TINY_PIPELINES, load_pipeline
from miles_rollout.noise import keyed_generator, keyed_noise
from miles_rollout.transitions import schedule_step

PROMPTS = ["a red circle on a blue background", "a cat"]
SEEDS = (11, 12)
STEPS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table; ``passed`` is None for what is only reported."""

    name: str
    measured: str
    bound: str = ""
    passed: bool | None = None


def run_checks(pipe: Any) -> Iterator[Row]:
    """Measure, one row after the other. The pipeline gets a LoRA on the way."""
    engine = RolloutEngine(pipe)
    if engine.adapter.packed:
        raise RolloutParamsError(
            "check: a pipeline that packs one sample into a call is not covered yet; got "
            f"{type(pipe).__name__}; set another pipeline, or see its tests"
        )
    arguments = _arguments(engine)
    yield from _parity(pipe, arguments)
    _attach_lora(engine)
    params = RolloutParams(debug=True)
    trajectory = _roll_out(pipe, params, arguments)
    yield _replay_row(engine, trajectory, "replay, same batch", None, 0.0)
    exact = pipe.transformer.dtype == torch.float32
    yield _replay_row(engine, trajectory, "replay, row by row", 1, 1e-5 if exact else None)
    yield _counter_test(engine, trajectory, arguments, params)
    yield from _sizes(pipe, trajectory, arguments)
    yield _overhead(pipe, arguments)


def _arguments(engine: RolloutEngine) -> dict[str, Any]:
    pipe = engine.pipe
    negatives = engine.encode([" "] * len(PROMPTS))
    side = pipe.vae_scale_factor * 2 * 8
    return engine.adapter.collate(engine.encode(PROMPTS), negatives) | {
        engine.adapter.scale_argument: 4.0,
        "num_inference_steps": STEPS,
        "height": side,
        "width": side,
    }


def _generators() -> list[torch.Generator]:
    return [keyed_generator("check", seed) for seed in SEEDS]


def _roll_out(pipe: Any, params: RolloutParams, arguments: dict[str, Any]) -> RolloutTrajectory:
    with rollout(pipe, params, SEEDS) as session:
        pipe(**arguments, generator=_generators(), output_type="latent")
    return session.trajectory


def _parity(pipe: Any, arguments: dict[str, Any]) -> Iterator[Row]:
    """Deterministic rollout against the stock call, and the stock call afterwards."""
    scheduler = pipe.scheduler

    def stock() -> Tensor:
        return pipe(**arguments, generator=_generators(), output_type="pt").images

    before = stock()
    with rollout(pipe, RolloutParams(sde_type="ode"), SEEDS):
        inside = stock()
    _roll_out(pipe, RolloutParams(), arguments)
    after = stock()
    for name, images in (("rollout without noise", inside), ("stock call afterwards", after)):
        gap = (images - before).abs().max().item()
        yield Row(name=name, measured=f"max diff {gap:.3g}", bound="0", passed=gap == 0)
    same = pipe.scheduler is scheduler
    yield Row(
        name="scheduler object", measured="same" if same else "other", bound="same", passed=same
    )


def _attach_lora(engine: RolloutEngine) -> None:
    """A LoRA that does something: B is not zero."""
    for name in engine.adapter.denoisers:
        module = getattr(engine.pipe, name, None)
        if module is None:
            continue
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v"])
        with torch.random.fork_rng(devices=[]):
            module.add_adapter(config)
        _set_lora(module, 0.02)


def _set_lora(module: torch.nn.Module, scale: float) -> None:
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            noise = keyed_noise([0], parameter.shape, "check_lora", name)[0]
            parameter.data = (noise * scale).to(parameter.device, torch.float32)


def _replay_row(
    engine: RolloutEngine,
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
            replay = engine.replay(trajectory, step, part)
            index = slice(None) if part is None else part
            old = trajectory.log_probs[index, step]
            gap = max(gap, (replay.log_prob - old).abs().max().item())
            for stream, now in replay.streams.items():
                held = trajectory.streams[stream].debug["velocity"][index, step]
                velocity_gap = max(velocity_gap, (now.velocity.float() - held).abs().max().item())
    exact_velocity = velocity_gap == 0 or bound != 0
    return Row(
        name=name,
        measured=f"log-prob gap {gap:.3g}, velocity gap {velocity_gap:.3g}",
        bound="reported" if bound is None else f"log-prob {bound:g}",
        passed=None if bound is None else gap <= bound and exact_velocity,
    )


def _counter_test(
    engine: RolloutEngine,
    trajectory: RolloutTrajectory,
    arguments: dict[str, Any],
    params: RolloutParams,
) -> Row:
    """With other weights, the ratio must move as the pipeline's own loop says it should.

    Step 0 starts from the same noise under any weights, so a second rollout with the changed
    weights gives the velocity there by another path than replay; the Gaussians are written out.
    """
    module = getattr(engine.pipe, engine.adapter.denoisers[0])
    _set_lora(module, 0.3)
    changed = _roll_out(engine.pipe, params, arguments)
    measured = (engine.replay(trajectory, 0).log_prob - trajectory.log_probs[:, 0]).detach()
    _set_lora(module, 0.02)
    name = next(iter(trajectory.streams))
    x, x_next = (t.double() for t in trajectory.pair(name, 0))
    exponents = []
    for source in (changed, trajectory):
        stream = source.streams[name]
        step = schedule_step(
            params.sde_type,
            x,
            stream.debug["velocity"][:, 0].double() * stream.velocity_sign,
            sigmas=stream.sigmas,
            step=0,
            noise_level=params.noise_level,
            next_sample=x_next,
        )
        exponents.append((-((x_next - step.mean) ** 2) / (2 * step.std**2)).flatten(1).mean(1))
    predicted = exponents[0] - exponents[1]
    error = (measured - predicted).abs().max().item()
    moved = measured.abs().min().item()
    return Row(
        name="changed weights",
        measured=f"log-ratio {moved:.3g}, off the prediction by {error:.3g}",
        bound="1e-6 + 0.1 %",
        passed=moved > 1e-5 and error <= 1e-6 + 1e-3 * moved,
    )


def _sizes(pipe: Any, full: RolloutTrajectory, arguments: dict[str, Any]) -> Iterator[Row]:
    steps = (1, 2)
    few = _roll_out(
        pipe, RolloutParams(sde_step_indices=steps, return_step_indices=(1, 2, 3)), arguments
    )
    plain = _roll_out(pipe, RolloutParams(), arguments)
    yield Row(
        name="trajectory size",
        measured=f"{plain.nbytes / 1024:.1f} KiB in full, {few.nbytes / 1024:.1f} KiB for steps 1-2",
    )
    del full


def _overhead(pipe: Any, arguments: dict[str, Any]) -> Row:
    """Median of five pairs, latents only: decoding would hide the difference."""

    def seconds(call: Callable[[], Any]) -> float:
        started = time.perf_counter()
        call()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter() - started

    def stock() -> Any:
        return pipe(**arguments, generator=_generators(), output_type="latent")

    ratios = []
    for _ in range(5):
        base = seconds(stock)
        ratios.append(seconds(lambda: _roll_out(pipe, RolloutParams(), arguments)) / base)
    return Row(name="time against stock", measured=f"{sorted(ratios)[2]:.2f} x, all steps kept")


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
