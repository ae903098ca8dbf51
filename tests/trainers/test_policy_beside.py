"""What stands beside the trained weights: the base, the start and the old policy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from miles_rollout import RolloutEngine
from miles_rollout.testing import tiny_qwen_image
from tests.trainers.test_policy import LORA, _latents, _move
from tests.trainers.test_update import move_adapter
from trainers.lora import LoraConfig, LoraError
from trainers.policy import Policy, PolicyError

KINDS = pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])


def _policy(lora: LoraConfig | None = LORA, **kwargs: Any) -> Policy:
    return Policy(RolloutEngine(tiny_qwen_image()), lora, seed=3, **kwargs)


def _flags(policy: Policy) -> dict[str, bool]:
    module: nn.Module = policy.engine.pipe.transformer
    return {name: p.requires_grad for name, p in module.named_parameters()}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A LoRA on disk, and what it makes."""
    folder = tmp_path_factory.mktemp("start")
    policy = _policy()
    move_adapter(policy, seed=8)
    policy.export(folder)
    return folder, _latents(policy), policy.tensors()


@KINDS
def test_only_the_trained_weights_are_trained(lora: LoraConfig | None) -> None:
    policy, plain = _policy(lora, beside=["old", "base"]), _policy(lora)
    assert list(policy.parameters) == list(plain.parameters)
    flags = _flags(policy)
    assert sum(flags.values()) == len(policy.parameters)
    module = policy.engine.pipe.transformer
    for scope in (policy.old, policy.reference):
        with scope():
            inside = _flags(policy)
            if lora is None:
                assert not any(inside.values()), "a frozen copy"
            else:
                assert inside == flags, "fixed by what is trainable in a first forward"
            _latents(policy)
        assert policy.engine.pipe.transformer is module
        assert _flags(policy) == flags
        with pytest.raises(KeyError), scope():
            raise KeyError
        assert policy.engine.pipe.transformer is module
        assert _flags(policy) == flags


@KINDS
def test_the_old_policy_samples_as_it_is_and_not_as_what_is_trained(
    lora: LoraConfig | None,
) -> None:
    policy = _policy(lora, beside=["old"])
    start = _latents(policy)
    _move(policy)
    moved = _latents(policy)
    with policy.old():
        assert torch.equal(_latents(policy), start)
    assert torch.equal(_latents(policy), moved)
    policy.update_old(0.0)
    with policy.old():
        assert torch.equal(_latents(policy), moved)
    assert torch.equal(_latents(policy), moved)


@KINDS
def test_the_old_policy_follows_by_the_decay_and_the_trained_one_stays(
    lora: LoraConfig | None,
) -> None:
    policy = _policy(lora, beside=["old"])
    before = policy.tensors("old")
    assert _same(before, policy.tensors())
    _move(policy)
    trained = policy.tensors()
    policy.update_old(0.25)
    assert _same(policy.tensors(), trained)
    for name, tensor in policy.tensors("old").items():
        torch.testing.assert_close(tensor, 0.25 * before[name] + 0.75 * trained[name])
    policy.update_old(0.0)
    assert _same(policy.tensors("old"), trained)


def test_weights_that_are_not_kept_are_refused() -> None:
    with pytest.raises(
        PolicyError, match=r"no weights 'old' are kept beside .* got \['base'\]; ch"
    ):
        _policy().old().__enter__()
    with pytest.raises(PolicyError, match=r"no weights 'start' are kept"):
        _policy().reference("start").__enter__()
    with pytest.raises(PolicyError, match=r"no weights 'old' are kept .* got \['base'\]"):
        _policy(None, beside=["base"]).old().__enter__()


@KINDS
def test_state_and_restore_hold_the_old_policy_too(lora: LoraConfig | None) -> None:
    policy = _policy(lora, beside=["old"])
    _move(policy)
    policy.update_old(0.5)
    _move(policy)
    saved = policy.state()
    assert saved.keys() == {"policy", "old"}
    other = _policy(lora, beside=["old"])
    other.restore({**saved, "optimizer": {}})
    assert _same(other.tensors(), policy.tensors())
    assert _same(other.tensors("old"), policy.tensors("old"))
    assert not _same(other.tensors(), other.tensors("old"))
    with pytest.raises(
        PolicyError,
        match=r"the checkpoint has no weights 'old'; got \['policy'\]; set the algorithm",
    ):
        other.restore({"policy": saved["policy"]})
    assert _policy(lora, beside=["base"]).state().keys() == {"policy"}, "the base can be had again"


def test_a_run_starts_from_an_exported_lora(exported: Any) -> None:
    folder, latents, tensors = exported
    lora = LoraConfig(rank=2, alpha=8.0, start=str(folder))
    policy = _policy(lora, beside=["start", "old"])
    assert _same(policy.tensors(), tensors)
    assert torch.equal(_latents(policy), latents)
    base = _latents(_policy(None))
    move_adapter(policy)
    assert not torch.equal(_latents(policy), latents)
    with policy.old():
        assert torch.equal(_latents(policy), latents)
    with policy.reference("start"):
        assert torch.equal(_latents(policy), latents)
    with policy.reference("base"):
        assert torch.equal(_latents(policy), base)
    policy.update_old(0.0)
    with policy.reference("start"):
        assert torch.equal(_latents(policy), latents), "it stays where the run started"
    assert policy.state().keys() == {"policy", "start", "old"}
    assert policy.parameters.keys() == _policy().parameters.keys()


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            LoraConfig(rank=2, alpha=4.0),
            r"was made with another strength; got alpha 8.* for 4\.0; set",
        ),
        (LoraConfig(rank=4, alpha=8.0), r"another strength; got rank 2 for 4; set lora\.rank to 2"),
        (
            LoraConfig(rank=2, alpha=8.0, targets=("to_q",)),
            r"does not fit: .* missing none, unexpected",
        ),
    ],
    ids=["alpha", "rank", "targets"],
)
def test_another_lora_than_the_saved_one_is_refused(
    exported: Any, lora: LoraConfig, message: str
) -> None:
    folder, *_ = exported
    with pytest.raises(LoraError, match=rf"^lora\.start: .*{message}") as caught:
        _policy(
            LoraConfig(rank=lora.rank, alpha=lora.alpha, targets=lora.targets, start=str(folder))
        )
    assert "\n" not in str(caught.value)


def test_a_start_that_is_not_there_is_refused(tmp_path: Path) -> None:
    lora = LoraConfig(rank=2, alpha=8.0, start=str(tmp_path))
    with pytest.raises(
        LoraError,
        match=r"lora\.start: .*cannot be read; .*set a folder with pytorch_lora_weights\.s",
    ):
        _policy(lora)
