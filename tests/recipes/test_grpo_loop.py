import ast
import sys
from pathlib import Path

import pytest
import torch

from recipes import grpo_loop

SOURCE = Path(grpo_loop.__file__)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "NUM_PROMPTS": 2,
        "GROUP_SIZE": 4,
        "NUM_STEPS": 5,
        "WINDOW": (1, 2),
    }.items():
        monkeypatch.setattr(grpo_loop, name, value)


@pytest.mark.usefixtures("_small")
def test_two_iterations_run_with_ratio_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo_loop", "--iterations", "2"])
    grpo_loop.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.endswith("|ratio - 1| 0") for line in lines)


@pytest.mark.usefixtures("_small")
def test_one_update_moves_the_lora_alone() -> None:
    engine, parameters = grpo_loop.build_policy()
    transformer = engine.pipe.transformer
    before = {name: p.detach().clone() for name, p in transformer.named_parameters()}
    batches = grpo_loop.sample(engine, 0, 0)
    advantages = torch.linspace(-1, 1, 8)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    assert grpo_loop.update(engine, optimizer, parameters, batches, advantages) == 0
    moved = {n for n, p in transformer.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert all(".lora_" in name for name in moved)
    assert grpo_loop.update(engine, optimizer, parameters, batches, advantages) > 0


def test_advantages_compare_within_the_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5, 3.0, 0.0])
    advantages = grpo_loop.advantages_of(rewards, torch.tensor([0, 1, 1, 1, 0, 1]))
    assert advantages[0] == -advantages[4] < 0
    assert abs(advantages[[1, 2, 3, 5]].sum()) < 1e-6


def test_it_is_the_text_to_read_first() -> None:
    tree = ast.parse(SOURCE.read_text())
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not any(module.startswith("trainers") for module in modules)
    assert len(SOURCE.read_text().splitlines()) <= 200
