"""Two iterations of two recipes are, bit for bit, what they were."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_rollout import transitions
from miles_rollout.step_rows import Step
from miles_rollout.transitions import SDE_TYPES
from tests.standards import record
from tests.standards.observed import observe, pinned
from tests.standards.standard import (
    COMMAND,
    RECIPES,
    TOLERANCES,
    difference,
    environment,
    other_environment,
    path_of,
    read,
    write,
)
from tests.standards.steps import NAME, steps


@pytest.fixture(scope="module")
def now(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What a recipe computes here, once."""
    known: dict[str, dict[str, Any]] = {}

    def of(recipe: str) -> dict[str, Any]:
        if recipe not in known:
            known[recipe] = observe(recipe, tmp_path_factory.mktemp(recipe) / "run")
        return known[recipe]

    return of


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipe_computes_what_it_did(recipe: str, now: Any) -> None:
    with pinned():
        elsewhere = other_environment((standard := read(recipe))["env"], environment())
    found = difference(standard["entries"], now(recipe), exact=not elsewhere)
    assert found is None, (
        f"{path_of(recipe).name}: {found}; a change that is meant is recorded by `{COMMAND}`, and "
        f"CHANGELOG.md says what caused it (compared "
        f"{f'with tolerances, since {elsewhere}' if elsewhere else 'bit for bit'})"
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_standard_holds_every_number_of_two_iterations(recipe: str) -> None:
    entries = read(recipe)["entries"]
    streams = {"qwen_image": ("image",), "minimax_h3": ("video", "audio")}[recipe]
    steps = {"qwen_image": range(5), "minimax_h3": (1, 2, 3)}[recipe]
    rows = {"qwen_image": 8, "minimax_h3": 4}[recipe]
    for i in range(2):
        for stream in streams:
            for step in steps:
                log_probs = entries[f"iteration_{i}/{stream}/step_{step}/log_probs"]
                assert len(log_probs) == rows
                assert all(math.isfinite(x) and x != 0 for x in log_probs)
            assert len(entries[f"iteration_{i}/{stream}/final/sha256"]) == 64
        assert len(entries[f"iteration_{i}/rewards/total"]) == rows
        assert any(entries[f"iteration_{i}/advantages"])
        assert set(entries[f"iteration_{i}/update_0/ratios"]) == {1.0}
        assert set(entries[f"iteration_{i}/update_1/ratios"]) != {1.0}
        for u in range(2):
            assert entries[f"iteration_{i}/update_{u}/grad_norm"] > 0
            assert entries[f"iteration_{i}/update_{u}/loss"] != 0
    weights = {v for name, v in entries.items() if name.endswith("weights/sha256")}
    assert len(weights) == 4


# -- what is seen ---------------------------------------------------------------------------------


def one_ulp_of_the_mean(step: Step) -> Step:
    """The first element of every row; the sum is exact, and nextafter itself has no gradient."""

    def mean(x: Tensor, v: Tensor, out: Tensor | None, scratch: Tensor | None) -> Tensor:
        result = step.mean(x, v, out, scratch)
        up = torch.zeros_like(result)
        first = result.detach().flatten(1)[:, 0]
        up.flatten(1)[:, 0] = torch.nextafter(first, torch.full_like(first, math.inf)) - first
        return result + up if out is None else out.add_(up)

    return Step(mean, step.std)


def one_ulp_of_the_std(step: Step) -> Step:
    up = torch.nextafter(torch.tensor(step.std), torch.tensor(math.inf))
    assert up.dtype == torch.float32
    return Step(step.mean, up.item())


def a_thousandth_of_the_std(step: Step) -> Step:
    return Step(step.mean, step.std * 1.001)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """One iteration of a recipe with other transition maths."""

    def run(recipe: str, change: Callable[[Step], Step]) -> dict[str, Any]:
        original = transitions.sde
        with monkeypatch.context() as patch:
            patch.setattr(transitions, "sde", lambda *args: change(original(*args)))
            found = observe(recipe, tmp_path / change.__name__, "iterations=1")
        # Rollout and replay are moved alike, so no run notices by itself.
        assert set(found["iteration_0/update_0/ratios"]) == {1.0}
        return found

    return run


def first_iteration(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if name.startswith("iteration_0/")}


@pytest.mark.parametrize("change", [one_ulp_of_the_mean, one_ulp_of_the_std])
def test_one_ulp_in_a_transition_is_seen(change: Any, changed: Any, now: Any) -> None:
    """Against this process's own numbers, so on every machine; tolerances are too wide for it."""
    moved = changed("qwen_image", change)
    found = difference(first_iteration(now("qwen_image")), moved, exact=True)
    assert found is not None
    assert found.startswith(("iteration_0/image/step_0/", "iteration_0/image/boundary_1/"))
    assert difference(first_iteration(now("qwen_image")), moved, exact=False) is None
    standard = read("qwen_image")
    with pinned():
        if not other_environment(standard["env"], environment()):
            recorded = first_iteration(standard["entries"])
            assert difference(recorded, moved, exact=True) is not None


def test_a_thousandth_in_a_transition_is_seen_everywhere(changed: Any, now: Any) -> None:
    moved = changed("minimax_h3", a_thousandth_of_the_std)
    found = difference(first_iteration(now("minimax_h3")), moved, exact=False)
    assert found is not None
    recorded = first_iteration(read("minimax_h3")["entries"])
    assert difference(recorded, moved, exact=False) is not None


# -- single steps, everywhere ---------------------------------------------------------------------


def test_single_steps_are_what_they_were_on_every_processor() -> None:
    found = difference(read(NAME)["entries"], steps(), exact=True)
    assert found is None, f"{path_of(NAME).name}: {found}; `{COMMAND}` records what is meant"


def the_mean_of(step: Step) -> Step:
    def mean(x: Tensor, v: Tensor, out: Tensor | None, scratch: Tensor | None) -> Tensor:
        result = step.mean(x, v, out, scratch)
        first = result.flatten()[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, math.inf)))
        return result

    return Step(mean, step.std)


@pytest.mark.parametrize("kind", SDE_TYPES)
@pytest.mark.parametrize("change", [the_mean_of, one_ulp_of_the_std])
def test_one_ulp_in_a_single_step_is_seen_on_every_processor(
    kind: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "ode" and change is one_ulp_of_the_std:
        pytest.skip("an ode step has no std")
    original = getattr(transitions, kind)
    monkeypatch.setattr(transitions, kind, lambda *args: change(original(*args)))
    part = "mean" if change is the_mean_of else "std"
    seen = difference(read(NAME)["entries"], steps(), exact=True) or ""
    assert seen.startswith(f"{kind}/1.0/{part}/sha256: recorded"), seen


# -- what does not matter -------------------------------------------------------------------------


@pytest.fixture
def other_settings() -> Iterator[None]:
    """What tests before this one may have left behind."""
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)


@pytest.mark.usefixtures("other_settings")
def test_settings_of_the_process_do_not_matter(now: Any, tmp_path: Path) -> None:
    found = observe("qwen_image", tmp_path / "run", "iterations=1")
    assert torch.get_num_threads() == 2
    assert torch.is_autocast_enabled("cpu")
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "medium"
    assert difference(first_iteration(now("qwen_image")), found, exact=True) is None


# -- the comparison -------------------------------------------------------------------------------

ENTRIES: dict[str, Any] = {
    "a/log_probs": [0.1, math.nan],
    "a/norm": 2.0,
    "a/sha256": "00",
    "update_0/loss": 0.0,
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a/log_probs", [0.1, 0.2], r"a/log_probs\[1\]: recorded nan, now 0.2"),
        ("a/log_probs", [0.1], "a/log_probs: recorded 2 values, now 1"),
        ("a/norm", 2.0000000000000004, "a/norm: recorded 2.0, now 2.0000000000000004"),
        ("a/sha256", "01", "a/sha256: recorded 00, now 01"),
        ("update_0/loss", -0.0, "update_0/loss: recorded 0.0, now -0.0"),
        ("update_0/loss", None, "update_0/loss: recorded 0.0, now None"),
        ("b", 1.0, "b: missing in the standard; the other has 1.0"),
    ],
)
def test_the_first_difference_is_named(name: str, value: Any, message: str) -> None:
    found = difference(ENTRIES, ENTRIES | {name: value, "later": 1.0}, exact=True)
    with pytest.raises(AssertionError, match=message):
        assert found is None, found


def test_nan_is_nan_and_what_is_gone_is_missed() -> None:
    assert difference(ENTRIES, dict(ENTRIES), exact=True) is None
    less = {name: ENTRIES[name] for name in ("a/log_probs", "a/sha256")}
    assert difference(ENTRIES, less, exact=True) == "a/norm: missing in the run; the other has 2.0"


def test_elsewhere_floats_have_tolerances_and_checksums_none() -> None:
    near = ENTRIES | {"a/log_probs": [0.1 + 1e-6, math.nan], "a/sha256": "01"}
    assert difference(ENTRIES, near, exact=False) is None
    far = ENTRIES | {"a/log_probs": [0.1 + 1e-5, math.nan]}
    assert "a/log_probs[0]" in (difference(ENTRIES, far, exact=False) or "")
    assert max(max(pair) for pair in TOLERANCES.values()) <= 2e-4


def test_other_versions_and_processors_are_named() -> None:
    here = environment()
    assert other_environment(here, here) == []
    assert other_environment(here | {"torch": "1.0"}, here) == [f"torch 1.0 (here {here['torch']})"]


def test_recording_is_exact_and_refuses_what_is_not_the_same_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.standards.standard.FOLDER", tmp_path)
    entries = {"x/norm": 0.1 + 0.2, "x/ratios": [torch.tensor(1 / 3).item(), -0.0, math.nan]}
    runs = iter([entries, entries] * 2 + [entries, entries | {"x/norm": 0.3}])
    monkeypatch.setattr(record, "RECIPES", ("tiny",))
    monkeypatch.setattr(record, "observe", lambda recipe, folder: next(runs))
    monkeypatch.setattr(record, "steps", lambda: {"a/mean/sha256": "00"})
    record.main()
    assert difference(read("tiny")["entries"], entries, exact=True) is None
    write("tiny", {"torch": "1.0"}, {"x/norm": 1.0, "x/ratios": entries["x/ratios"]})
    record.main()
    told = capsys.readouterr().out
    assert "environment: torch 1.0 (here" in told
    assert "first change: x/norm: recorded 1.0, now 0.30000000000000004" in told
    with pytest.raises(
        SystemExit, match="tiny: not the same twice, so nothing is recorded: x/norm"
    ):
        record.main()
