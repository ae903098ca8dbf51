"""Runs with an average of the weights: what it is used for, and that training never sees it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import trainers.trainer
from miles_rollout.testing import tiny_qwen_image
from recipes import generate
from tests.tiny_run import metrics_of, tiny_config, tiny_trainer, train, without_perf
from trainers.build import RunError, run
from trainers.checkpoint import load_checkpoint
from trainers.evaluation import DETERMINISTIC
from trainers.image_grid import to_pil

SHORT = (
    "rollout.group_size=2",
    "rollout.num_inference_steps=3",
    "rollout.window={type: fixed, steps: [1]}",
    "eval={every: 0, num_prompts: 1, samples_per_prompt: 1, num_inference_steps: 2}",
    "optim.lr=1e-2",
)
EMA = "ema={decay: 0.5, every: 1, warmup: false}"


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(
        tiny_config(
            tmp_path_factory.mktemp("ema") / "run", *SHORT, EMA, "optim.updates_per_iteration=2"
        )
    )


def _last(folder: Path) -> Path:
    return folder / "checkpoints/iteration_000002"


def test_it_counts_updates_and_not_micro_batches(tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tmp_path, *SHORT, "ema={decay: 0.5, every: 2, warmup: false}",
        "optim.updates_per_iteration=2", "optim.micro_batch_size=1", "rollout.group_size=4",
    )  # fmt: skip
    assert trainer.ema is not None
    start, seen = trainer.policy.tensors(), []
    trainer.optimizer.register_step_post_hook(lambda *_: seen.append(trainer.policy.tensors()))
    train(trainer)
    assert trainer.ema.num_updates == trainer.num_updates == len(seen) == 4
    for name, tensor in trainer.ema.tensors().items():
        # The average's names are the parameters', with the adapter's own.
        plain = name.replace(".default.", ".")
        expected = 0.5 * (0.5 * start[plain] + 0.5 * seen[1][plain]) + 0.5 * seen[3][plain]
        torch.testing.assert_close(tensor, expected)


@pytest.mark.parametrize("evaluates", [True, False])
def test_evaluations_are_of_the_average_and_training_goes_on_from_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluates: bool
) -> None:
    ema = f"ema={{decay: 0.5, every: 1, warmup: false, evaluate: {str(evaluates).lower()}}}"
    trainer = tiny_trainer(tmp_path, *SHORT, ema, "iterations=1")
    assert trainer.ema is not None
    real, inside = trainers.trainer.evaluate, []

    def evaluate(*arguments: Any, **options: Any) -> Any:
        inside.append({n: p.detach().clone() for n, p in trainer.policy.parameters.items()})
        return real(*arguments, **options)

    monkeypatch.setattr(trainers.trainer, "evaluate", evaluate)
    train(trainer)
    own = {n: p.detach() for n, p in trainer.policy.parameters.items()}
    assert not _same(own, trainer.ema.tensors())
    assert _same(inside[-1], trainer.ema.tensors() if evaluates else own)


def test_the_weights_are_back_after_an_evaluation_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny_trainer(tmp_path, *SHORT, EMA, "iterations=1")
    with torch.no_grad():
        for parameter in trainer.policy.parameters.values():
            parameter.add_(0.1)
    before = trainer.policy.tensors()

    def fail(*_: Any, **__: Any) -> Any:
        raise KeyError

    monkeypatch.setattr(trainers.trainer, "evaluate", fail)
    with pytest.raises(KeyError):
        trainer._evaluate()
    assert _same(trainer.policy.tensors(), before)


def test_a_resumed_run_has_the_same_average(averaged: Path, tmp_path: Path) -> None:
    overrides = (*SHORT, EMA, "optim.updates_per_iteration=2")
    run(tiny_config(tmp_path / "run", *overrides, "iterations=1"))
    run(tiny_config(tmp_path / "run", *overrides, "resume=true"))
    assert without_perf(metrics_of(averaged)) == without_perf(metrics_of(tmp_path / "run"))
    (whole, a), (parts, b) = (load_checkpoint(_last(f)) for f in (averaged, tmp_path / "run"))
    assert whole.keys() == {"policy", "optimizer", "ema"}
    for group in whole:
        assert _same(whole[group], parts[group]), group
    assert a["ema_updates"] == b["ema_updates"] == 4
    name = "pytorch_lora_weights.safetensors"
    assert (_last(averaged) / name).read_bytes() == (_last(tmp_path / "run") / name).read_bytes()


@pytest.mark.parametrize("exports", [True, False])
def test_the_exported_lora_is_the_average_where_it_is_wanted(
    averaged: Path, tmp_path: Path, exports: bool
) -> None:
    folder = averaged
    if not exports:
        folder = run(tiny_config(tmp_path / "run", *SHORT, EMA[:-1] + ", export: false}"))
    tensors, _ = load_checkpoint(_last(folder))
    average = {name.replace(".default.", "."): t for name, t in tensors["ema"].items()}
    assert not _same(average, tensors["policy"])
    exported = load_file(_last(folder) / "pytorch_lora_weights.safetensors")
    assert _same(exported, average if exports else tensors["policy"])


def test_stock_diffusers_draws_the_average_and_so_does_generate(
    averaged: Path, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path / "x", *SHORT, EMA)
    trainer.restore(*load_checkpoint(_last(averaged)))
    assert trainer.ema is not None
    pictures = {}
    for name in ("own", "average"):
        if name == "average":
            trainer.ema.copy_to(trainer.policy.parameters)
        (batch,) = trainer.engine.generate(
            ["a cat"], 1, DETERMINISTIC, seed=3, num_inference_steps=2, height=32, width=32
        )
        assert batch.media is not None
        pictures[name] = to_pil(batch.media[0].image).tobytes()
    assert pictures["own"] != pictures["average"]
    generate.generate(averaged, ["a cat"], tmp_path / "out", seed=3, count=1)
    drawn = Image.open(tmp_path / "out/prompt_000_sample_000.png").tobytes()
    assert drawn == pictures["average"]

    stock = tiny_qwen_image()
    stock.load_lora_weights(_last(averaged))
    arguments = {
        "prompt": ["a cat"], "num_inference_steps": 2, "height": 32, "width": 32,
        "output_type": "latent",
    }  # fmt: skip
    ours, theirs = (
        pipe(**arguments, generator=torch.Generator().manual_seed(1)).images
        for pipe in (trainer.engine.pipe, stock)
    )
    assert torch.equal(ours, theirs)


def test_a_checkpoint_without_an_average_is_refused(tmp_path: Path) -> None:
    run(tiny_config(tmp_path / "run", *SHORT, "iterations=1"))
    with pytest.raises(
        RunError,
        match=r"resume: the checkpoint has no weights 'ema'; .* set ema null of the saved run",
    ):
        run(tiny_config(tmp_path / "run", *SHORT, EMA, "resume=true"))
