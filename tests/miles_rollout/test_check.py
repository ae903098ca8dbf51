"""The check covers every family, and sees what it is there to see."""

import pytest
import torch

from miles_rollout import check
from miles_rollout.check import print_table, run_checks
from miles_rollout.loading import load_pipeline
from miles_rollout.pipelines.qwen_image import QwenImageAdapter
from tests.miles_rollout.models import MODELS, load, small_references


@pytest.fixture(autouse=True)
def _small_references(monkeypatch):
    small_references(monkeypatch)


@pytest.mark.parametrize("name", sorted({model.pipeline or n for n, model in MODELS.items()}))
def test_every_family_keeps_the_promises(name, monkeypatch):
    monkeypatch.setattr(check, "PAIRS", 1)
    load(name)  # a skip where diffusers is too old
    rows = list(run_checks(load_pipeline(name)))
    assert [row.passed for row in rows if row.passed is not None] == [True] * 6
    assert len(rows) == 8


def failed(rows):
    return [row.name for row in rows if row.passed is False]


def test_a_denoiser_that_remembers_is_seen():
    pipe = load_pipeline("tiny-sd3")
    calls = []

    def drift(_, __, output):
        calls.append(1)
        return (output[0] + 1e-3 * len(calls),)

    pipe.transformer.register_forward_hook(drift)
    expected = ["rollout without noise", "stock call afterwards", "replay, same batch"]
    assert failed(run_checks(pipe))[:3] == expected


def test_guidance_combined_otherwise_is_seen(monkeypatch, capsys):
    def plain(self, step):
        return {"image": step.outputs[0][0]}

    monkeypatch.setattr(QwenImageAdapter, "combine", plain)
    assert not print_table(run_checks(load_pipeline("tiny-qwen-image")))
    assert "FAIL  replay, same batch" in capsys.readouterr().out


def test_weights_that_do_not_reach_the_replay_are_seen(monkeypatch):
    """Without gradients or change, the replay of stale weights would keep its ratio of 1."""
    pipe = load_pipeline("tiny-sd3")
    held = {}

    def stale(module, args, kwargs, output):
        key = kwargs["hidden_states"].sum().item()
        return held.setdefault(key, output) if torch.is_grad_enabled() else output

    pipe.transformer.register_forward_hook(stale, with_kwargs=True)
    assert "changed weights" in failed(run_checks(pipe))
