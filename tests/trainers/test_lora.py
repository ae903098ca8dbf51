import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pydantic
import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from miles_rollout.testing import tiny_qwen_image
from trainers.lora import (
    QWEN_IMAGE_TARGETS,
    WEIGHTS_NAME,
    LoraConfig,
    LoraError,
    adapter_tensors,
    attach_lora,
    base_model,
    check_start,
    export_lora,
    load_adapter_tensors,
    load_exported,
    trainable_parameters,
    use_adapter,
)

SMALL = LoraConfig(rank=4, alpha=16.0)
PLAIN = LoraConfig(rank=4, alpha=4.0)
"""The strength of a file that does not tell it."""


def _transformer(dtype: torch.dtype = torch.float32) -> nn.Module:
    return tiny_qwen_image(dtype=dtype).transformer


def _adapted(dtype: torch.dtype = torch.float32, **attach: Any) -> nn.Module:
    module = _transformer(dtype)
    attach_lora(module, SMALL, seed=3, **attach)
    _move_b(module)
    return module


def _move_b(module: nn.Module, adapter_name: str = "default", seed: int = 5) -> None:
    """B is zero at first, and then no adapter does anything."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if f".lora_B.{adapter_name}." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def _velocity(module: nn.Module, *, grad: bool = False) -> Tensor:
    dtype = next(module.parameters()).dtype
    generator = torch.Generator().manual_seed(0)
    with torch.set_grad_enabled(grad):
        return module(
            hidden_states=torch.randn(2, 16, 16, generator=generator).to(dtype),
            encoder_hidden_states=torch.randn(2, 5, 32, generator=generator).to(dtype),
            timestep=torch.tensor([0.7, 0.7]).to(dtype),
            img_shapes=[[(1, 4, 4)]] * 2,
            return_dict=False,
        )[0]


def _flags(module: nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in module.named_parameters()}


def _picture(pipe: QwenImagePipeline) -> Tensor:
    return pipe(
        prompt=["a red circle"],
        negative_prompt=[" "],
        num_inference_steps=3,
        height=32,
        width=32,
        generator=torch.Generator().manual_seed(1),
        output_type="pt",
    ).images


def test_attach_trains_the_adapter_alone_and_names_it_sorted() -> None:
    module = _transformer()
    names = attach_lora(module, SMALL, seed=3)
    assert names == sorted(n for n, trained in _flags(module).items() if trained)
    assert len(names) == 2 * 2 * len(QWEN_IMAGE_TARGETS)  # A and B, 2 blocks
    assert all(".lora_" in name for name in names)


def test_fresh_adapter_changes_no_bit_of_the_output() -> None:
    module = _transformer()
    bare = _velocity(module)
    attach_lora(module, SMALL, seed=3)
    assert torch.equal(_velocity(module), bare)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_master_weights_are_float32_on_any_base(dtype: torch.dtype) -> None:
    module = _adapted(dtype)
    assert {p.dtype for p in trainable_parameters(module).values()} == {torch.float32}
    assert {p.dtype for p in module.parameters() if not p.requires_grad} == {dtype}
    assert _velocity(module).dtype == dtype


@pytest.mark.parametrize("init", ["gaussian", "default"])
def test_initial_values_follow_the_seed_and_not_the_dtype_or_the_global_rng(init: Any) -> None:
    config = LoraConfig(rank=4, alpha=16.0, init=init)

    def draw(seed: int, dtype: torch.dtype, global_seed: int) -> dict[str, Tensor]:
        module = _transformer(dtype)
        with torch.random.fork_rng():
            torch.manual_seed(global_seed)
            attach_lora(module, config, seed=seed)
        return adapter_tensors(module)

    first = draw(3, torch.float32, 0)
    again = draw(3, torch.bfloat16, 1)
    other = draw(4, torch.float32, 0)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, other[name]) == ("lora_B" in name)
        assert bool(value.any()) == ("lora_A" in name)


def test_gaussian_a_has_std_one_over_rank() -> None:
    module = _transformer()
    attach_lora(module, SMALL, seed=3)
    drawn = torch.cat([v.flatten() for n, v in adapter_tensors(module).items() if "lora_A" in n])
    # 7168 values: the estimate is off by more than 5 % once in 10^9 seeds.
    assert drawn.std().item() == pytest.approx(0.25, rel=0.05)


def test_a_target_that_matches_nothing_is_an_error_with_near_names() -> None:
    config = LoraConfig(targets=("attn.to_q", "img_mlp.net.2.proj"))
    with pytest.raises(LoraError, match=r"img_mlp\.net\.2\.proj.*try.*img_mlp\.net\.0\.proj") as e:
        attach_lora(_transformer(), config, seed=0)
    assert "img_mlp.net.2" in str(e.value).partition("try")[2].replace("img_mlp.net.2.proj", "")
    assert "attn.to_q" not in str(e.value)


def test_a_target_matches_whole_words_only() -> None:
    with pytest.raises(LoraError, match="o_q"):
        attach_lora(_transformer(), LoraConfig(targets=("o_q",)), seed=0)


def test_every_default_target_adapts_one_layer_a_block() -> None:
    module = _adapted()
    adapted = {n.partition(".lora_")[0].split(".", 2)[2] for n in trainable_parameters(module)}
    assert adapted == set(QWEN_IMAGE_TARGETS)


def test_attaching_a_name_twice_is_an_error() -> None:
    module = _adapted()
    with pytest.raises(LoraError, match="already has this adapter; got 'default'"):
        attach_lora(module, SMALL, seed=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dropout": 0.1}, r"lora\.dropout: .*different masks.*got 0\.1; set 0"),
        ({"rank": 0}, r"lora\.rank: .*got 0"),
        ({"alpha": 0.0}, r"lora\.alpha: .*got 0\.0"),
        ({"alpha": float("nan")}, r"lora\.alpha: .*got nan"),
        ({"targets": ()}, r"lora\.targets: .*got \[\]"),
        ({"targets": ("attn.to_q", "attn.to_q")}, r"lora\.targets: .*each once"),
    ],
)
def test_wrong_config_says_what_to_set(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(LoraError, match=message):
        LoraConfig(**wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_base_model_is_bitwise_the_base(dtype: torch.dtype) -> None:
    bare = _velocity(_transformer(dtype))
    module = _adapted(dtype)
    tuned = _velocity(module)
    with base_model(module):
        inside = _velocity(module)
    assert torch.equal(inside, bare)
    assert not torch.equal(tuned, bare)
    assert torch.equal(_velocity(module), tuned)


def _two_adapters() -> nn.Module:
    module = _adapted(adapter_name="old")
    _move_b(module, "old", seed=6)
    attach_lora(module, SMALL, seed=8)
    _move_b(module, "default", seed=9)
    return module


@pytest.mark.parametrize("switch", [base_model, lambda module: use_adapter(module, "old")])
@pytest.mark.parametrize("frozen", [False, True])
def test_switching_leaves_flags_and_active_adapters_as_they_were(
    switch: Callable[[nn.Module], Any], frozen: bool
) -> None:
    module: Any = _two_adapters()
    if frozen:
        module.requires_grad_(False)
    flags, active, tuned = _flags(module), module.active_adapters(), _velocity(module)
    with switch(module):
        # FSDP2 decides by the flags of its first forward, which may be this one.
        assert _flags(module) == flags
    with pytest.raises(KeyError, match="reference"), switch(module):
        raise KeyError("reference")
    assert _flags(module) == flags
    assert any(flags.values()) != frozen
    assert module.active_adapters() == active == ["default"]
    assert torch.equal(_velocity(module), tuned)


def test_base_model_nests() -> None:
    module = _adapted()
    bare = _velocity(_transformer())
    with base_model(module):
        with base_model(module):
            pass
        assert torch.equal(_velocity(module), bare)


def test_base_model_needs_an_adapter() -> None:
    message = r"no adapter to switch off.*call attach_lora first"
    with pytest.raises(LoraError, match=message), base_model(_transformer()):
        pass


def test_use_adapter_runs_the_other_adapter() -> None:
    module = _two_adapters()
    with use_adapter(module, "old"):
        inside = _velocity(module)
    load_adapter_tensors(module, adapter_tensors(module, "old"))
    assert torch.equal(_velocity(module), inside)
    message = r"no such adapter; got \['default', 'old'\]"
    with pytest.raises(LoraError, match=message), use_adapter(module, "start"):
        pass


def test_the_last_attached_adapter_is_the_trained_one() -> None:
    names = list(trainable_parameters(_two_adapters()))
    assert names
    assert all(".default." in name for name in names)


def test_adapter_tensors_are_pefts_and_complete_for_a_frozen_adapter() -> None:
    module = _two_adapters()
    mine = adapter_tensors(module, "old")
    theirs = peft.get_peft_model_state_dict(module, adapter_name="old")
    assert list(mine) == sorted(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_adapter_tensors_are_copies() -> None:
    module = _adapted()
    before = adapter_tensors(module)
    kept = copy.deepcopy(before)
    _move_b(module, seed=77)
    assert all(torch.equal(before[name], kept[name]) for name in kept)


def test_loading_reproduces_the_output_bitwise_and_counts() -> None:
    source, target = _adapted(), _transformer()
    attach_lora(target, SMALL, seed=99)
    tensors = adapter_tensors(source)
    assert load_adapter_tensors(target, tensors) == len(tensors) == 48
    assert torch.equal(_velocity(target), _velocity(source))


def _renamed(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}


def test_a_foreign_prefix_is_an_error_that_says_which() -> None:
    module = _adapted()
    with pytest.raises(LoraError, match=r"unexpected 48 \(transformer\.t.*remove the prefix 'tr"):
        load_adapter_tensors(module, _renamed(adapter_tensors(module), "transformer."))


def test_missing_and_unexpected_names_are_listed_and_nothing_is_loaded() -> None:
    module = _adapted()
    before = adapter_tensors(module)
    wrong = {name: value + 1 for name, value in before.items()}
    lost, value = wrong.popitem()
    with pytest.raises(LoraError, match=rf"got 47 tensors, missing 1 \({lost}\), unexpected none"):
        load_adapter_tensors(module, wrong)
    with pytest.raises(LoraError, match=r"unexpected 1 \(more\.lora_A\.weight\)"):
        load_adapter_tensors(module, {**wrong, lost: value, "more.lora_A.weight": value})
    after = adapter_tensors(module)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_another_rank_is_an_error() -> None:
    module = _transformer()
    attach_lora(module, LoraConfig(rank=8), seed=0)
    with pytest.raises(LoraError, match=r"shapes do not fit.*set lora\.rank"):
        load_adapter_tensors(module, adapter_tensors(_adapted()))


def test_stock_diffusers_reproduces_the_trained_picture_from_the_export(tmp_path: Any) -> None:
    pipe = tiny_qwen_image()
    bare = _picture(pipe)
    attach_lora(pipe.transformer, SMALL, seed=3)
    _move_b(pipe.transformer)
    trained = _picture(pipe)
    path = export_lora(pipe.transformer, tmp_path / WEIGHTS_NAME, SMALL)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]

    stock = tiny_qwen_image()
    stock.load_lora_weights(tmp_path)
    assert torch.equal(_picture(stock), trained)
    assert not torch.equal(trained, bare)
    with safe_open(path, "pt") as file:
        assert len(file.keys()) == len(adapter_tensors(pipe.transformer))


def test_without_metadata_the_export_would_have_another_strength(tmp_path: Any) -> None:
    pipe = tiny_qwen_image()
    attach_lora(pipe.transformer, SMALL, seed=3)
    _move_b(pipe.transformer)
    QwenImagePipeline.save_lora_weights(tmp_path, adapter_tensors(pipe.transformer))
    stock = tiny_qwen_image()
    stock.load_lora_weights(tmp_path)
    assert not torch.equal(_picture(stock), _picture(pipe))


def test_export_holds_the_float32_tensors_and_how_to_apply_them(tmp_path: Any) -> None:
    module = _adapted(torch.bfloat16)
    with safe_open(export_lora(module, tmp_path / WEIGHTS_NAME, SMALL), "pt") as file:
        how = json.loads(file.metadata()["lora_adapter_metadata"])
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert (how["transformer.r"], how["transformer.lora_alpha"]) == (4, 16.0)
    tensors = _renamed(adapter_tensors(module), "transformer.")
    assert held.keys() == tensors.keys()
    assert all(torch.equal(held[name], tensors[name]) for name in held)
    assert {value.dtype for value in held.values()} == {torch.float32}


def test_export_refuses_a_config_that_is_not_the_adapters(tmp_path: Any) -> None:
    with pytest.raises(LoraError, match=r"got \(4, 8\.0\) for \(4, 16\.0\)"):
        export_lora(_adapted(), tmp_path / "x", LoraConfig(rank=4, alpha=8.0))


@pytest.mark.parametrize("train_mode", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients_to_every_kind(train_mode: bool) -> None:
    def gradients(checkpointing: bool) -> dict[str, Tensor]:
        module: Any = _adapted()
        module.train(train_mode)
        if checkpointing:
            module.enable_gradient_checkpointing()
        _velocity(module, grad=True).square().mean().backward()
        parameters = trainable_parameters(module)
        return {n: p.grad for n, p in parameters.items() if p.grad is not None}

    plain, checkpointed = gradients(False), gradients(True)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    kinds = {
        name.partition(".lora_")[0].split(".", 2)[2]
        for name, gradient in checkpointed.items()
        if gradient.any()
    }
    assert kinds == set(QWEN_IMAGE_TARGETS)


def test_config_comes_from_yaml_trees_and_refuses_unknown_keys() -> None:
    adapter = pydantic.TypeAdapter(LoraConfig)
    read = adapter.validate_python({"rank": 4, "alpha": 16, "targets": ["attn.to_q"]})
    assert read == LoraConfig(rank=4, alpha=16.0, targets=("attn.to_q",))
    with pytest.raises(pydantic.ValidationError, match="rnak"):
        adapter.validate_python({"rnak": 4})


def _start(module: nn.Module, path: Path, config: LoraConfig = SMALL) -> nn.Module:
    attach_lora(module, config, seed=9)
    load_exported(module, path, config)
    return module


def test_an_exported_adapter_is_the_start_of_another(tmp_path: Path) -> None:
    module = _adapted()
    path = export_lora(module, tmp_path / WEIGHTS_NAME, SMALL)
    other = _start(_transformer(), path)
    assert torch.equal(_velocity(other), _velocity(module))
    ours, theirs = adapter_tensors(other), adapter_tensors(module)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_start_without_a_word_on_its_strength_has_alpha_of_its_rank(tmp_path: Path) -> None:
    """As diffusers applies it, with alpha = rank."""
    module = _adapted()
    path = export_lora(module, tmp_path / WEIGHTS_NAME, SMALL)
    save_file(load_file(path), path)
    with pytest.raises(
        LoraError, match=r"another strength; got alpha 4 for 16\.0; set lora\.alpha"
    ):
        _start(_transformer(), path)
    assert not torch.equal(_velocity(_start(_transformer(), path, PLAIN)), _velocity(module))


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern", "use_rslora"])
def test_a_start_whose_layers_differ_in_strength_is_refused(tmp_path: Path, pattern: str) -> None:
    path = export_lora(_adapted(), tmp_path / WEIGHTS_NAME, SMALL)
    told = {"transformer.r": 4, "transformer.lora_alpha": 16.0, f"transformer.{pattern}": {"a": 2}}
    save_file(load_file(path), path, {"lora_adapter_metadata": json.dumps(told)})
    with pytest.raises(LoraError, match=f"layers of different strength; got {pattern}"):
        _start(_transformer(), path)


def test_a_start_is_looked_at_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(
        LoraError, match=r"lora\.start: no exported LoRA there; got .*; set a folder"
    ):
        check_start(replace(SMALL, start=str(tmp_path)))
    export_lora(_adapted(), tmp_path / WEIGHTS_NAME, SMALL)
    check_start(replace(SMALL, start=str(tmp_path)))
    with pytest.raises(LoraError, match=r"another strength; got rank 4 for 8; set lora\.rank to 4"):
        check_start(replace(SMALL, start=str(tmp_path), rank=8))


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        # The layout of other trainers: a foreign prefix, and other names for A and B.
        (
            lambda name: f"diffusion_model.{name.removeprefix('transformer.')}",
            r"does not fit: .*remove the prefix 'diffusion_model\.'",
        ),
        (lambda name: name.replace("lora_A", "lora_down"), r"does not fit: .*missing .*lora_A"),
        (
            lambda name: name.replace("to_q", "to_z"),
            r"does not fit: .*set lora\.targets to the modul",
        ),
    ],
    ids=["prefix", "format", "targets"],
)
def test_a_start_of_other_names_loads_nothing_and_says_so(
    tmp_path: Path, rename: Callable[[str], str], message: str
) -> None:
    path = export_lora(_adapted(), tmp_path / WEIGHTS_NAME, SMALL)
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path)
    module = _transformer()
    attach_lora(module, PLAIN, seed=9)
    before = adapter_tensors(module)
    with pytest.raises(LoraError, match=rf"^lora\.start: .*{message}") as caught:
        load_exported(module, path, PLAIN)
    assert "\n" not in str(caught.value)
    after = adapter_tensors(module)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_start_of_another_rank_is_refused_by_shape_where_nothing_tells_it(tmp_path: Path) -> None:
    path = export_lora(_adapted(), tmp_path / WEIGHTS_NAME, SMALL)
    save_file(load_file(path), path)
    with pytest.raises(
        LoraError, match=r"lora\.start: .*shapes do not fit .* set lora\.rank to the"
    ):
        _start(_transformer(), path, LoraConfig(rank=8, alpha=8.0))


@pytest.mark.parametrize("content", [None, b"", b"no safetensors at all"])
def test_a_start_that_is_no_file_of_tensors_is_refused(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / WEIGHTS_NAME
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        LoraError, match=r"lora\.start: .* cannot be read; got .*; set a folder with p"
    ):
        _start(_transformer(), path)
