import pytest

from trainers.config_loader import ConfigError
from trainers.old_policy import OldPolicyDecay


@pytest.mark.parametrize(
    ("decay", "figures"),
    [
        # Type 1 of the paper's code: a thousandth more an iteration, up to a half.
        (OldPolicyDecay(), {0: 0.0, 1: 0.001, 75: 0.075, 100: 0.1, 500: 0.5, 1000: 0.5}),
        # Type 2: copied for 75 iterations, then slower and slower: 25 * 0.0075 = 0.1875.
        (
            OldPolicyDecay(flat=75, rate=0.0075, hold=0.999),
            {0: 0.0, 75: 0.0, 76: 0.0075, 100: 0.1875, 208: 0.9975, 209: 0.999, 1000: 0.999},
        ),
        (OldPolicyDecay(rate=0.0), {0: 0.0, 1000: 0.0}),
        (OldPolicyDecay(hold=0.0), {0: 0.0, 1000: 0.0}),
    ],
)
def test_the_published_schedules_by_hand(decay: OldPolicyDecay, figures: dict[int, float]) -> None:
    assert {i: decay.of(i) for i in figures} == pytest.approx(figures)


@pytest.mark.parametrize(
    "wrong", [{"flat": -1}, {"rate": -0.1}, {"rate": float("nan")}, {"hold": 1.0}, {"hold": -0.1}]
)
def test_a_schedule_that_never_follows_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"old_policy: needs flat >= 0, .* set for example 0, "):
        OldPolicyDecay(**wrong)  # type: ignore[arg-type]
