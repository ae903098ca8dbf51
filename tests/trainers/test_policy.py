import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file
from torch import Tensor

from miles_rollout import RolloutEngine
from miles_rollout.testing import tiny_qwen_image
from tests.trainers.test_update import move_adapter
from trainers.evaluation import DETERMINISTIC
from trainers.lora import LoraConfig, LoraError
from trainers.policy import Policy, PolicyError

LORA = LoraConfig(rank=2, alpha=8.0)


def _policy(lora: LoraConfig | None = LORA, **kwargs: Any) -> Policy:
    return Policy(RolloutEngine(tiny_qwen_image()), lora, seed=3, **kwargs)


def _move(policy: Policy) -> None:
    if policy.lora is not None:
        move_adapter(policy)
        return
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.01)


def _latents(policy: Policy) -> Tensor:
    (batch,) = policy.engine.generate(
        ["a cat"],
        1,
        DETERMINISTIC,
        seed=0,
        decode=False,
        num_inference_steps=2,
        height=32,
        width=32,
    )
    return batch.latents["image"]


def test_only_the_lora_is_trained_and_in_float32() -> None:
    policy = Policy(RolloutEngine(tiny_qwen_image(dtype=torch.bfloat16)), LORA, seed=0)
    assert all(".lora_" in name for name in policy.parameters)
    assert {p.dtype for p in policy.parameters.values()} == {torch.float32}
    trained = {id(p) for p in policy.parameters.values()}
    for component in policy.engine.pipe.components.values():
        if isinstance(component, torch.nn.Module):
            assert not component.training
            assert all(id(p) in trained or not p.requires_grad for p in component.parameters())


def test_a_new_lora_changes_no_bit_and_follows_the_seed() -> None:
    policy = _policy()
    same, other = _policy(), Policy(RolloutEngine(tiny_qwen_image()), LORA, seed=4)
    assert torch.equal(_latents(policy), _latents(_policy(None)))
    first = {name: t for name, t in policy.tensors().items() if ".lora_A." in name}
    assert all(torch.equal(t, same.tensors()[name]) for name, t in first.items())
    assert not any(torch.equal(t, other.tensors()[name]) for name, t in first.items())


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_the_reference_is_where_training_started_whatever_was_trained(
    lora: LoraConfig | None,
) -> None:
    policy = _policy(lora, beside=["base"])
    start = _latents(policy)
    _move(policy)
    moved = _latents(policy)
    assert not torch.equal(start, moved)
    names = list(policy.parameters)
    module = policy.engine.pipe.transformer
    with policy.reference():
        assert torch.equal(_latents(policy), start)
    assert policy.engine.pipe.transformer is module
    assert list(policy.parameters) == names
    assert torch.equal(_latents(policy), moved)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_the_policy_is_back_after_an_error_in_the_reference(lora: LoraConfig | None) -> None:
    policy = _policy(lora, beside=["base"])
    _move(policy)
    moved = _latents(policy)
    with pytest.raises(KeyError), policy.reference():
        raise KeyError
    assert torch.equal(_latents(policy), moved)


def test_full_weights_without_a_kept_reference_have_none() -> None:
    policy = _policy(None)
    assert not policy.has_reference
    with pytest.raises(
        PolicyError, match=r"no weights .base. are kept .* such as one with kl_beta > 0"
    ):
        policy.reference().__enter__()


def test_a_kept_reference_is_not_trained() -> None:
    policy = _policy(None, beside=["base"])
    with policy.reference():
        assert not any(p.requires_grad for p in policy.engine.pipe.transformer.parameters())
    assert len(policy.parameters) == len(list(policy.engine.pipe.transformer.parameters()))


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_saved_weights_come_back_and_are_copies(lora: LoraConfig | None) -> None:
    policy = _policy(lora)
    _move(policy)
    saved, moved = policy.tensors(), _latents(policy)
    _move(policy)
    assert not torch.equal(_latents(policy), moved)
    policy.load(saved)
    assert torch.equal(_latents(policy), moved)
    other = _policy(lora)
    other.load(saved)
    assert torch.equal(_latents(other), moved)


def test_weights_that_do_not_fit_are_refused() -> None:
    policy = _policy()
    saved = policy.tensors()
    with pytest.raises(PolicyError, match="weights of another model; got"):
        policy.load({name.replace("transformer.", "unet.", 1): t for name, t in saved.items()})
    with pytest.raises(LoraError, match="missing"):
        policy.load(dict(list(saved.items())[1:]))
    with pytest.raises(LoraError, match=r"set lora\.rank"):
        Policy(RolloutEngine(tiny_qwen_image()), LoraConfig(rank=4), seed=0).load(saved)
    full = _policy(None)
    weights = full.tensors()
    for bad in ({**weights, "transformer.x": weights["transformer.img_in.bias"]}, {}):
        with pytest.raises(PolicyError, match="saved weights do not fit"):
            full.load(bad)


def test_the_export_is_the_policy_in_stock_diffusers(tmp_path: Path) -> None:
    policy = _policy()
    _move(policy)
    policy.export(tmp_path)
    stock = tiny_qwen_image()
    assert type(stock) is QwenImagePipeline
    stock.load_lora_weights(tmp_path)
    arguments = {
        "prompt": ["a cat"],
        "num_inference_steps": 2,
        "height": 32,
        "width": 32,
        "output_type": "latent",
    }
    trained, loaded = (
        pipe(**arguments, generator=torch.Generator().manual_seed(1)).images
        for pipe in (policy.engine.pipe, stock)
    )
    assert torch.equal(trained, loaded)


def test_equal_policies_export_equal_bytes(tmp_path: Path) -> None:
    policy = _policy()
    _move(policy)
    exports = set()
    for number in range(6):  # two keys in random order: 1 in 32 to be equal by chance
        folder = tmp_path / str(number)
        folder.mkdir()
        policy.export(folder)
        (path,) = folder.iterdir()
        exports.add(path.read_bytes())
    (content,) = exports
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert list(header) == sorted(header)
    assert len(header["__metadata__"]) >= 2
    tensors = load_file(tmp_path / "0" / "pytorch_lora_weights.safetensors")
    saved = policy.tensors()
    assert len(tensors) == len(saved)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in saved.items())


def test_gradient_checkpointing_is_switched_on() -> None:
    assert not _policy().engine.pipe.transformer.is_gradient_checkpointing
    assert _policy(gradient_checkpointing=True).engine.pipe.transformer.is_gradient_checkpointing


def test_full_weights_are_exported_by_the_checkpoint_alone(tmp_path: Path) -> None:
    _policy(None).export(tmp_path)
    assert not list(tmp_path.iterdir())
