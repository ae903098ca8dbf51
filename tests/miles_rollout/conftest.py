"""Tiny pipelines, built once; a test must hand them back as they were."""

import pytest
import torch

from miles_rollout.testing import tiny_qwen_image


@pytest.fixture(scope="session")
def _pipes():
    return {dtype: tiny_qwen_image(dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}


def _state(pipe):
    return (
        type(pipe),
        vars(pipe)["scheduler"],
        dict(pipe.config),
        dict(pipe.scheduler.config),
        [len(pipe.transformer._forward_pre_hooks), len(pipe.transformer._forward_hooks)],
    )


@pytest.fixture(name="pipe")
def _pipe(_pipes):
    """A float32 pipeline; the test fails if a rollout leaves something of itself behind."""
    yield from _unchanged(_pipes[torch.float32])


@pytest.fixture(name="half_pipe")
def _half_pipe(_pipes):
    """The same in bfloat16."""
    yield from _unchanged(_pipes[torch.bfloat16])


@pytest.fixture(name="any_pipe", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def _any_pipe(_pipes, request):
    """Both, one after the other."""
    yield from _unchanged(_pipes[request.param])


def _unchanged(pipe):
    before = _state(pipe)
    yield pipe
    assert _state(pipe) == before
