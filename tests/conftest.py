"""Every test runs offline, on one thread (the thread count changes fp32 results)."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _global_rng_is_left_alone():
    """No code of ours draws from or seeds torch's global generator."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state()), "the test moved the global RNG"
