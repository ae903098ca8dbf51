"""A compiled denoiser: as many graphs after the first epoch as after the last, and ratios near 1."""

import pytest
import torch
import torch._dynamo

from miles_rollout import RolloutEngine, RolloutParams
from miles_rollout.testing import tiny_qwen_image
from trainers.lora import LoraConfig
from trainers.policy import Policy, PolicyError

PROMPTS = (["a cat"] * 2, ["a robot in the rain"] * 2, ["a", "one two three four five six"])
STEPS = (1, 2)


def _epoch(engine, policy, epoch):
    """Rollout, reference pass and replay with gradients, over prompts of three lengths."""
    gap = 0.0
    for prompts in PROMPTS:
        (batch,) = engine.generate(
            prompts,
            2,
            RolloutParams(sde_step_indices=STEPS),
            seed=epoch,
            chunk_size=4,
            num_inference_steps=4,
            height=32,
            width=32,
            decode=False,
        )
        for step in STEPS:
            with torch.no_grad(), policy.reference():
                engine.replay(batch.trajectory, step)
            replay = engine.replay(batch.trajectory, step)
            replay.log_prob.sum().backward()
            old = batch.trajectory.log_probs[:, step]
            gap = max(gap, (replay.log_prob - old).abs().max().item())
    return gap


@pytest.fixture
def clean_dynamo():
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.reset()


# Dynamo looks at .grad of non-leaf tensors and hides the warning by its text.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_no_recompilation_after_the_first_epoch(clean_dynamo):
    """The eager backend compiles nothing but has the guards, whose failures are recompilations."""
    engine = RolloutEngine(tiny_qwen_image())
    policy = Policy(engine, LoraConfig(rank=2, alpha=4.0), seed=0, compile_backend="eager")
    graphs = []
    for epoch in range(3):
        assert _epoch(engine, policy, epoch) <= 1e-6
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 2
    assert graphs[1:] == graphs[:1] * 2


def test_a_class_without_repeated_blocks_is_refused(monkeypatch):
    pipe = tiny_qwen_image()
    monkeypatch.setattr(type(pipe.transformer), "_repeated_blocks", None)
    with pytest.raises(PolicyError, match=r"model\.compile: the class names no repeated blocks"):
        Policy(RolloutEngine(pipe), LoraConfig(rank=2), seed=0, compile_backend="eager")
