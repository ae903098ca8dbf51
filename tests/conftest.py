"""Every test runs offline, on one thread (the thread count changes fp32 results)."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

from typing import Any

import pytest
import torch

torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Elsewhere the standards see less, and a passing run has to say so."""
    from tests.standards.standard import RECIPES, environment, other_environment, read

    here = environment()
    for recipe in RECIPES:
        elsewhere = other_environment(read(recipe)["env"], here)
        if elsewhere:
            terminalreporter.write_line(
                f"standards of {recipe}: compared with tolerances only, since {', '.join(elsewhere)}"
            )


@pytest.fixture(autouse=True)
def _global_rng_is_left_alone():
    """No code of ours draws from or seeds torch's global generator."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state()), "the test moved the global RNG"
