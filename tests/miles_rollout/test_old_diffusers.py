"""A diffusers without the newer families: they are told by version, and the others still work."""

import subprocess
import sys

import diffusers
import pytest

from miles_rollout import RolloutParamsError, testing
from miles_rollout.loading import TINY_PIPELINES, load_pipeline

LAZY = sorted({function for function, _ in TINY_PIPELINES.values()} - {"tiny_qwen_image"})


@pytest.mark.parametrize("function", LAZY)
def test_a_family_says_which_diffusers_it_needs(function, monkeypatch):
    monkeypatch.setattr(diffusers, "__version__", "0.28.0")
    message = (
        rf"{function}: this diffusers is too old .* got 0\.28\.0; install diffusers>=0\.\d+\.\d"
    )
    with pytest.raises(RolloutParamsError, match=message):
        getattr(testing, function)


def test_a_pipeline_by_name_says_so_too(monkeypatch):
    monkeypatch.setattr(diffusers, "__version__", "0.39.0")
    with pytest.raises(RolloutParamsError, match=r"tiny_minimax_h3: .* install diffusers>=0.40.0"):
        load_pipeline("tiny-minimax-h3")


HIDE = """
import diffusers

newer = ("MiniMaxH3", "LTX2", "Cosmos3", "QwenImage21", "Flux2", "ZImage", "HunyuanVideo15", "Sana")
for name in [n for n in diffusers._class_to_module if n.startswith(newer)]:
    del diffusers._class_to_module[name]
diffusers.__version__ = "0.35.2"
assert not hasattr(diffusers, "MiniMaxH3Scheduler")

import trainers.build
from miles_rollout import RolloutEngine, RolloutParams
from miles_rollout.loading import load_pipeline

engine = RolloutEngine(load_pipeline("tiny-qwen-image"))
(batch,) = engine.generate(
    ["a"], 1, RolloutParams(), seed=0, height=32, width=32, num_inference_steps=3
)
replay = engine.replay(batch.trajectory, 1)
print((replay.log_prob - batch.trajectory.log_probs[:, 1]).abs().max().item())
"""


def test_qwen_image_works_without_the_classes_of_newer_families():
    done = subprocess.run([sys.executable, "-c", HIDE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0.0"]
