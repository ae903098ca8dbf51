"""How fast the policy that samples follows the one that is trained (arXiv 2509.16117, sec. 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.config_loader import STRICT, ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class OldPolicyDecay:
    """``old <- d old + (1 - d) trained`` after iteration i, ``d = min((i - flat) rate, hold)``.

    Counted from 0, and never below 0: d = 0 copies. The published schedules are flat 0, rate 0.001,
    hold 0.5 (type 1) and flat 75, rate 0.0075, hold 0.999 (type 2).
    """

    __pydantic_config__ = STRICT

    flat: int = 0
    """Iterations in which the trained weights are copied as they are."""
    rate: float = 0.001
    """What d grows by an iteration after that."""
    hold: float = 0.5
    """The largest d."""

    def __post_init__(self) -> None:
        if self.flat < 0 or not self.rate >= 0 or not 0 <= self.hold < 1:
            raise ConfigError(
                f"old_policy: needs flat >= 0, rate >= 0 and hold within 0..1, 1 excluded; got "
                f"{self.flat}, {self.rate}, {self.hold}; set for example 0, 0.001, 0.5"
            )

    def of(self, iteration: int) -> float:
        """d after ``iteration``."""
        return min(max(iteration - self.flat, 0) * self.rate, self.hold)
