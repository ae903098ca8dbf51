import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainers.checkpoint import (
    CheckpointError,
    load_checkpoint,
    pack_optimizer,
    save_checkpoint,
    unpack_optimizer,
)

Run = tuple[nn.Module, AdamW, LambdaLR]


def _start(seed: int = 0) -> Run:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).bfloat16())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    groups: list[dict[str, Any]] = [
        {"params": list(model[0].parameters())},
        {"params": list(model[1].parameters()), "lr": 1e-2, "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=1e-3, weight_decay=1e-4)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


@pytest.fixture(autouse=True)
def _linear_draws_its_weights_from_the_global_rng() -> Any:
    with torch.random.fork_rng():
        yield


def _train(run: Run, steps: range) -> None:
    model, optimizer, scheduler = run
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        x = torch.randn(5, 3, generator=generator)
        optimizer.zero_grad()
        model[1](model[0](x).bfloat16()).float().square().mean().backward()  # type: ignore[operator,index]
        optimizer.step()
        scheduler.step()


def _everything(run: Run) -> dict[str, Tensor]:
    model, optimizer, _ = run
    tensors, _ = pack_optimizer(optimizer, _names(model))
    return {**{n: p.detach() for n, p in model.named_parameters()}, **tensors}


def _save(run: Run, folder: Path) -> None:
    model, optimizer, scheduler = run
    tensors, rest = pack_optimizer(optimizer, _names(model))
    weights = dict(model.named_parameters())
    state = {"optimizer": rest, "scheduler": scheduler.state_dict()}
    save_checkpoint(folder, {"model": weights, "optimizer": tensors}, state)


def _resume(run: Run, folder: Path) -> None:
    model, optimizer, scheduler = run
    tensors, state = load_checkpoint(folder)
    model.load_state_dict(tensors["model"])
    unpack_optimizer(optimizer, _names(model), tensors["optimizer"], state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])


def test_two_steps_save_load_two_steps_are_four_steps_bitwise(tmp_path: Path) -> None:
    whole, first, second = _start(), _start(), _start(seed=1)
    _train(whole, range(4))
    _train(first, range(2))
    _save(first, tmp_path / "iteration_000002")
    _resume(second, tmp_path / "iteration_000002")
    assert second[2].get_last_lr() == first[2].get_last_lr()
    _train(second, range(2, 4))
    expected, got = _everything(whole), _everything(second)
    assert expected.keys() == got.keys()
    assert len(got) == 4 + 4 * 3
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        assert torch.equal(got[name], value)
    assert second[2].get_last_lr() == whole[2].get_last_lr()


def test_without_the_moments_the_steps_would_differ(tmp_path: Path) -> None:
    whole, other = _start(), _start()
    _train(whole, range(4))
    _train(other, range(2))
    other[1].state.clear()
    _train(other, range(2, 4))
    assert not torch.equal(_everything(whole)["0.weight"], _everything(other)["0.weight"])


def test_the_rest_is_json_and_holds_the_settings() -> None:
    run = _start()
    _train(run, range(1))
    _, rest = pack_optimizer(run[1], _names(run[0]))
    assert json.loads(json.dumps(rest)) == rest
    assert [group["settings"]["lr"] for group in rest["groups"]] == [5e-4, 5e-3]
    assert rest["groups"][0]["settings"]["betas"] == [0.9, 0.999]


def test_settings_come_back_in_their_types() -> None:
    source, target = _start(), _start()
    source[1].param_groups[0]["betas"] = (0.5, 0.6)
    unpack_optimizer(target[1], _names(target[0]), *pack_optimizer(source[1], _names(source[0])))
    assert target[1].param_groups[0]["betas"] == (0.5, 0.6)


def test_an_optimizer_that_never_stepped_comes_back_so() -> None:
    source, target = _start(), _start()
    tensors, rest = pack_optimizer(source[1], _names(source[0]))
    _train(target, range(1))
    unpack_optimizer(target[1], _names(target[0]), tensors, rest)
    assert not tensors
    assert all(not state for state in target[1].state.values())


def test_names_count_and_not_positions() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    source = AdamW([a, b])
    a.grad, b.grad = torch.ones(2), torch.full((2,), 2.0)
    source.step()
    target = AdamW([b, a])
    unpack_optimizer(target, ["b", "a"], *pack_optimizer(source, ["a", "b"]))
    assert torch.equal(target.state[a]["exp_avg"], source.state[a]["exp_avg"])
    assert torch.equal(target.state[b]["exp_avg"], source.state[b]["exp_avg"])
    assert target.state[a]["exp_avg"] is not source.state[a]["exp_avg"]


def _packed() -> tuple[dict[str, Tensor], dict[str, Any]]:
    run = _start()
    _train(run, range(1))
    return pack_optimizer(run[1], _names(run[0]))


def test_other_names_are_listed() -> None:
    _, optimizer, _ = _start()
    names = ["0.weight", "0.bias", "1.weight", "other"]
    with pytest.raises(CheckpointError, match=r"missing \['other'\], unexpected \['1\.bias'\]"):
        unpack_optimizer(optimizer, names, *_packed())


def test_a_lost_moment_is_listed() -> None:
    model, optimizer, _ = _start()
    tensors, rest = _packed()
    del tensors["0.bias:exp_avg"]
    with pytest.raises(CheckpointError, match=r"missing \['0\.bias:exp_avg'\], unexpected \[\]"):
        unpack_optimizer(optimizer, _names(model), tensors, rest)
    assert not optimizer.state


def test_other_shapes_groups_and_optimizers_are_refused() -> None:
    model, optimizer, _ = _start()
    tensors, rest = _packed()
    names = _names(model)
    wrong = {**tensors, "0.bias:exp_avg": torch.ones(5)}
    with pytest.raises(CheckpointError, match=r"exp_avg of 0\.bias has another shape; got \(5,\)"):
        unpack_optimizer(optimizer, names, wrong, rest)
    flat = AdamW(list(model.parameters()))
    with pytest.raises(CheckpointError, match="got 2 groups saved, 1 here"):
        unpack_optimizer(flat, names, tensors, rest)
    sgd: Optimizer = SGD(list(model.parameters()), lr=0.1)
    with pytest.raises(CheckpointError, match="got AdamW for SGD"):
        unpack_optimizer(sgd, names, tensors, rest)


def test_one_name_a_parameter() -> None:
    model, optimizer, _ = _start()
    with pytest.raises(CheckpointError, match="got 3 different names for 4 parameters"):
        pack_optimizer(optimizer, _names(model)[:3])
