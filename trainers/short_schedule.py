"""Fewer, larger deterministic steps after the window (MixGRPO-Flash, arXiv 2507.21802).

The schedule up to the window's end stays bit for bit. A call gives a part of the sigmas that the
pipeline would give its scheduler, before any shift: shifts act on each sigma by itself, and the stretch
to a terminal one by the last sigma, which stays. The steps are the scheduler's own, of first order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler

from trainers.config_loader import ConfigError

_RESPACED = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "use_flow_sigmas",
)
"""Of a scheduler's config: the schedule is made anew from its ends and its length."""


def steps_in_all(window: Sequence[int], num_steps: int, after: int | None) -> int:
    """How many of ``num_steps`` are taken: the window, those before it, ``after`` more at most."""
    end = max(window) + 1
    return num_steps if after is None else min(end + after, num_steps)


def shortened(base: Sequence[float], window: Sequence[int], after: int) -> list[float]:
    """The sigmas of ``base``, one a step, of which ``after`` at most are left behind the window.

    Those are evenly spaced over the ones that followed, rounded to them: the first, at which the
    window ends, and for two or more the last as well, from which the schedule falls to 0.
    """
    end = max(window) + 1
    rest = len(base) - end
    if after >= rest:
        return list(base)
    chosen = [round(i * (rest - 1) / max(after - 1, 1)) for i in range(after)]
    return [*base[:end], *(base[end + i] for i in chosen)]


def check_schedule(pipe: Any, after: int) -> None:
    """Raise ``ConfigError`` for a loaded pipeline whose window would have other sigmas then."""
    key, scheduler = "rollout.steps_after_window", pipe.scheduler
    if type(scheduler) is not FlowMatchEulerDiscreteScheduler:
        raise ConfigError(
            f"{key}: needs FlowMatchEulerDiscreteScheduler; got {type(scheduler).__name__}; set null, "
            "or load that scheduler"
        )
    for name in _RESPACED:
        if scheduler.config.get(name):
            raise ConfigError(
                f"{key}: the scheduler would space all steps anew; got {name} true; set null"
            )
    if scheduler.config.get("shift_terminal") and after == 1:
        raise ConfigError(
            f"{key}: the scheduler stretches its schedule by the last sigma, which a single step "
            f"leaves out; got 1 with shift_terminal {scheduler.config.shift_terminal}; set 2 or more"
        )
    if pipe.config.get("sample_sigmas") is not None:
        raise ConfigError(
            f"{key}: the pipeline has a schedule of its own; got sample_sigmas "
            f"{list(pipe.config.sample_sigmas)}; set null"
        )
