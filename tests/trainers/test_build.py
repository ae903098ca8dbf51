import dataclasses
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file

import trainers.build
from miles_rollout.errors import MilesRolloutError
from miles_rollout.testing import tiny_qwen_image
from tests.tiny_run import metrics_of, tiny_config, without_perf
from trainers.adapters import LoraError
from trainers.build import RunError, build_trainer, load_policy_pipeline, read_inputs, run
from trainers.checkpoint import CheckpointError, load_checkpoint
from trainers.config import TrainConfig
from trainers.config_loader import ConfigError, load
from trainers.data import DataError
from trainers.devices import build_device
from trainers.recorded import RecordedRolloutError

LONG = ("iterations=4", "checkpoint.keep=10", "optim.updates_per_iteration=2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations without interruption."""
    output_dir = tmp_path_factory.mktemp("whole") / "run"
    return run(tiny_config(output_dir, *LONG))


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(trainers.build, "load_pipeline", refuse)


def _interrupted(whole: Path, folder: Path, iteration: int, *, lines: int) -> Path:
    """What a run leaves that is killed between its checkpoint and ``lines`` lines of metrics."""
    (folder / "checkpoints").mkdir(parents=True)
    for path in (whole / "checkpoints").glob("iteration_*"):
        if int(path.name.removeprefix("iteration_")) <= iteration:
            shutil.copytree(path, folder / "checkpoints" / path.name)
    text = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(text[:lines]) + '{"iteration": ')
    return folder


def _same(a: Path, b: Path) -> None:
    """Weights, moments, counters, metrics and exported LoRA, bit for bit."""
    assert without_perf(metrics_of(a)) == without_perf(metrics_of(b))
    folders = sorted((a / "checkpoints").glob("iteration_*"))
    last = folders[-1].name
    (tensors_a, state_a), (tensors_b, state_b) = (
        load_checkpoint(folder / "checkpoints" / last) for folder in (a, b)
    )
    assert tensors_a.keys() == tensors_b.keys() == {"policy", "optimizer"}
    for group, members in tensors_a.items():
        assert members.keys() == tensors_b[group].keys()
        for name, tensor in members.items():
            assert tensor.dtype == tensors_b[group][name].dtype
            assert torch.equal(tensor, tensors_b[group][name]), name
    for state in (state_a, state_b):
        for key in ("output_dir", "resume"):
            del state["config"][key]
    assert state_a == state_b
    exported = (f / "checkpoints" / last / "pytorch_lora_weights.safetensors" for f in (a, b))
    first, second = (path.read_bytes() for path in exported)
    assert first == second


@pytest.mark.parametrize(
    ("iteration", "lines"),
    [(0, 1), (2, 3), (3, 4), (4, 5)],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    whole: Path, tmp_path: Path, iteration: int, lines: int
) -> None:
    folder = _interrupted(whole, tmp_path / "run", iteration, lines=lines)
    run(tiny_config(folder, *LONG, "resume=true"))
    _same(whole, folder)


def test_more_iterations_go_on_from_the_end(whole: Path, tmp_path: Path) -> None:
    short = [o for o in LONG if not o.startswith("iterations")]
    run(tiny_config(tmp_path / "a", *short, "iterations=2"))
    run(tiny_config(tmp_path / "a", *short, "iterations=4", "resume=true"))
    _same(whole, tmp_path / "a")


def test_a_checkpoint_by_path_starts_a_run_elsewhere(whole: Path, tmp_path: Path) -> None:
    checkpoint = whole / "checkpoints/iteration_000002"
    before = {path: path.read_bytes() for path in checkpoint.iterdir()}
    run(tiny_config(tmp_path / "b", *LONG, f"resume={checkpoint}"))
    assert [line["iteration"] for line in metrics_of(tmp_path / "b")] == [2, 3, 4]
    assert without_perf(metrics_of(tmp_path / "b")) == without_perf(metrics_of(whole)[2:])
    assert {path: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_an_earlier_checkpoint_by_path_sets_later_ones_aside(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _interrupted(whole, tmp_path / "run", 4, lines=5)
    (folder / "metrics.jsonl").write_text((whole / "metrics.jsonl").read_text())
    checkpoint = folder / "checkpoints/iteration_000002"
    keep_one = [*LONG, "checkpoint.keep=1", f"resume={checkpoint}", "optim.lr=0", "iterations=3"]
    run(tiny_config(folder, *keep_one))
    assert "2 later checkpoints are now in" in caplog.text
    root = folder / "checkpoints"
    aside = sorted(path.name for path in (root / "abandoned_1").iterdir())
    assert aside == ["iteration_000003", "iteration_000004"]
    assert (root / "iteration_000003").exists(), "the new one, which no old one crowds out"
    assert not (root / "iteration_000004").exists()


def test_an_export_that_a_kill_prevented_is_made_up_for(whole: Path, tmp_path: Path) -> None:
    folder = _interrupted(whole, tmp_path / "run", 4, lines=5)
    exported = folder / "checkpoints/iteration_000004/pytorch_lora_weights.safetensors"
    before = exported.read_bytes()
    exported.unlink()
    run(tiny_config(folder, *LONG, "resume=true"))
    assert exported.read_bytes() == before


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", ["policy.safetensors", "optimizer.safetensors", "state.json"])
def test_a_torn_checkpoint_is_an_error_and_an_older_one_is_taken_only_if_asked(
    whole: Path, tmp_path: Path, name: str
) -> None:
    folder = _interrupted(whole, tmp_path / "run", 3, lines=3)
    torn = folder / "checkpoints/iteration_000003" / name
    torn.write_bytes(torn.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"damaged.*resume from another one \(iteration_0"):
        run(tiny_config(folder, *LONG, "resume=true"))
    older = folder / "checkpoints/iteration_000002"
    with pytest.raises(AssertionError, match="the model was loaded"):
        run(tiny_config(folder, *LONG, f"resume={older}"))


def test_changed_settings_are_told_and_used(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    folder = _interrupted(whole, tmp_path / "run", 4, lines=5)
    made = []

    def build(*arguments: Any, **options: Any) -> Any:
        made.append(build_trainer(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(trainers.build, "build_trainer", build)
    with caplog.at_level(logging.WARNING):
        run(tiny_config(folder, *LONG, "resume=true", "optim.weight_decay=0.5", "optim.eps=1e-6"))
    assert (
        "settings differ from the saved run's: optim.eps 1e-08 -> 1e-06; "
        "optim.weight_decay 0.0001 -> 0.5" in caplog.text
    )
    (group,) = made[0].optimizer.param_groups
    assert (group["weight_decay"], group["eps"], group["betas"]) == (0.5, 1e-6, (0.9, 0.999))


def test_other_lines_in_a_prompt_file_are_told(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _interrupted(whole, tmp_path / "run", 4, lines=5)
    config = tiny_config(folder, *LONG, "resume=true")
    inputs = read_inputs(config)
    inputs.train_prompts.pop()
    with caplog.at_level(logging.WARNING):
        trainer = build_trainer(config, inputs)
        trainer.restore(*load_checkpoint(folder / "checkpoints/iteration_000004"))
    (message,) = [r.getMessage() for r in caplog.records if "settings differ" in r.getMessage()]
    assert re.fullmatch(r".*run's: prompts\.train '\w{12}' -> '\w{12}'", message)


def test_another_lora_than_the_saved_one_is_refused(whole: Path, tmp_path: Path) -> None:
    folder = _interrupted(whole, tmp_path / "run", 2, lines=2)
    with pytest.raises(LoraError, match=r"set lora\.rank"):
        run(tiny_config(folder, *LONG, "resume=true", "model.lora.rank=2"))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("resume", ["false", "other"])
def test_an_occupied_folder_is_refused_before_the_model_is_loaded(
    whole: Path, tmp_path: Path, resume: str
) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    if resume == "other":
        other = _interrupted(whole, tmp_path / "other", 2, lines=2)
        resume = str(other / "checkpoints/iteration_000002")
    with pytest.raises(RunError, match="holds another run, which would be lost; got"):
        run(tiny_config(whole, *LONG, f"resume={resume}"))
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_the_checkpoint_loads_into_stock_diffusers(whole: Path) -> None:
    """From a real run's folder: the same bits as the trained pipeline."""
    config = tiny_config(whole, *LONG)
    folder = whole / "checkpoints/iteration_000004"
    trainer = build_trainer(config, read_inputs(config))
    trainer.restore(*load_checkpoint(folder))
    stock = tiny_qwen_image()
    assert type(stock) is QwenImagePipeline

    def picture(pipe: QwenImagePipeline) -> torch.Tensor:
        return pipe(
            prompt=["a red circle on a blue background"],
            num_inference_steps=3,
            height=32,
            width=32,
            generator=torch.Generator().manual_seed(1),
            output_type="pt",
        ).images

    base = picture(stock)
    stock.load_lora_weights(folder)
    assert torch.equal(picture(stock), picture(trainer.engine.pipe))
    assert not torch.equal(picture(stock), base)


def test_the_folder_holds_config_metrics_and_checkpoints(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "samples", "checkpoints"}
    assert load(TrainConfig, [whole / "config.yaml"]) == tiny_config(whole, *LONG)
    saved = {path.name for path in (whole / "checkpoints/iteration_000004").iterdir()}
    assert saved == {
        "state.json",
        "policy.safetensors",
        "optimizer.safetensors",
        "pytorch_lora_weights.safetensors",
    }
    state = json.loads((whole / "checkpoints/iteration_000004/state.json").read_text())
    assert {"torch", "diffusers", "peft"} <= state["versions"].keys()
    assert load_file(whole / "checkpoints/iteration_000004/policy.safetensors")


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["data.train=nowhere.txt"], DataError, "nowhere.txt: cannot be read"),
        (["data.eval=nowhere.csv"], DataError, "unknown kind of file"),
        (["rollout.num_prompts=193"], ConfigError, "got 193 of 192"),
        (["eval.num_prompts=33"], ConfigError, "got 33 of 32"),
        (
            ["rewards=[{name: jpeg_compresibility}]"],
            ConfigError,
            "did you mean jpeg_compressibility?",
        ),
        (["rewards=[]"], ConfigError, "none has a weight"),
        (["scoring.timeout_s=0"], ConfigError, "timeout_s: must be within"),
        (["model.device=tpu0"], ConfigError, "model.device: not available here; got 'tpu0'"),
        (["resume=runs/nowhere"], RunError, "resume: no checkpoint there; got 'runs/nowhere'"),
        (["debug.load_rollouts=nowhere"], RecordedRolloutError, "no recorded rollout of iteration"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(
    tmp_path: Path, overrides: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message.replace("?", r"\?")) as caught:
        run(tiny_config(tmp_path / "run", *overrides))
    assert isinstance(caught.value, MilesRolloutError)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_model")
def test_an_output_dir_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"output_dir: cannot be made; got .*set another folder"):
        run(tiny_config(tmp_path / "file" / "run"))


def test_a_pipeline_that_is_not_there_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "pipe"
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    config = tiny_config(tmp_path / "run")
    broken = dataclasses.replace(
        config, model=dataclasses.replace(config.model, pipeline="someone/not-in-the-cache")
    )
    with pytest.raises(RunError, match=r"model\.pipeline: cannot be loaded; got 'someone/not"):
        run(broken)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ImportError("\nATokenizer needs the apackage library\nSee its page"),
            r"needs another package; got '.*' \(ATokenizer needs the apackage library\); install that$",
        ),
        (OSError(), r"cannot be loaded; got '.*' \(OSError\); set a folder"),
    ],
)
def test_what_loading_a_pipeline_raises_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def load(*_: Any) -> None:
        raise error

    monkeypatch.setattr("trainers.build.load_pipeline", load)
    with pytest.raises(RunError, match=r"^model\.pipeline: " + message):
        load_policy_pipeline(tiny_config(tmp_path))


def test_the_accelerator_is_found_or_the_cpu() -> None:
    assert build_device("cpu") == torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert build_device("auto") == (accelerator or torch.device("cpu"))
