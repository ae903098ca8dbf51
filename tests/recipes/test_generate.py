import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from recipes import generate
from recipes.generate import find
from tests.tiny_run import tiny_config
from trainers.build import RunError, build_trainer, read_inputs, run
from trainers.checkpoint import load_checkpoint
from trainers.evaluation import DETERMINISTIC
from trainers.image_grid import to_pil

PROMPTS = ["a red circle on a blue background", "a cat"]
GUIDED = ("iterations=1", "rollout.true_cfg_scale=3", "rollout.negative_prompt=' '")


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tiny_config(tmp_path_factory.mktemp("generate") / "run", *GUIDED))


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["generate", *arguments])
    generate.main()


def _pictures(folder: Path) -> dict[str, bytes]:
    return {path.name: Image.open(path).tobytes() for path in sorted(folder.glob("prompt_*.png"))}


def test_the_same_seed_gives_the_same_pictures(
    output_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = output_dir / "checkpoints/iteration_000001"
    for name, source, seed in (
        ("a", output_dir, "7"),
        ("b", checkpoint, "7"),
        ("c", output_dir, "8"),
    ):
        _main(
            monkeypatch,
            *[str(source), *PROMPTS, "--out", str(tmp_path / name)],
            *["--seed", seed, "--count", "2"],
        )
        assert capsys.readouterr().out == f"{tmp_path / name / 'grid.png'}\n"
        assert (tmp_path / name / "grid.png").is_file()
    a, b, c = (_pictures(tmp_path / name) for name in "abc")
    assert list(a) == [
        "prompt_000_sample_000.png",
        "prompt_000_sample_001.png",
        "prompt_001_sample_000.png",
        "prompt_001_sample_001.png",
    ]
    assert a == b
    assert not any(a[name] == c[name] for name in a)
    assert len(set(a.values())) == 4


def test_the_pictures_are_those_of_the_trained_weights(output_dir: Path, tmp_path: Path) -> None:
    grid = generate.generate(output_dir, PROMPTS, tmp_path, seed=3, count=1)
    assert grid == tmp_path / "grid.png"
    config = tiny_config(output_dir, *GUIDED)
    trainer = build_trainer(config, read_inputs(config))
    trainer.restore(*load_checkpoint(output_dir / "checkpoints/iteration_000001"))
    (batch,) = trainer.engine.generate(
        PROMPTS,
        1,
        DETERMINISTIC,
        seed=3,
        negative_prompt=" ",
        true_cfg_scale=3.0,
        num_inference_steps=config.eval.num_inference_steps,
        height=32,
        width=32,
    )
    assert batch.media is not None
    for number, media in enumerate(batch.media):
        assert isinstance(media.image, torch.Tensor)
        saved = Image.open(tmp_path / f"prompt_{number:03d}_sample_000.png")
        assert saved.tobytes() == to_pil(media.image).tobytes()


def test_a_run_folder_means_its_latest_checkpoint(output_dir: Path) -> None:
    latest = output_dir / "checkpoints/iteration_000001"
    assert find(output_dir) == find(latest) == latest
    with pytest.raises(RunError, match="generate: no checkpoint there; got"):
        find(output_dir / "samples")


def test_a_folder_that_cannot_be_made_is_told(output_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="--out: cannot be made; got"):
        generate.generate(output_dir, PROMPTS, tmp_path / "file" / "out", seed=0, count=1)


def test_full_weights_draw_too(tmp_path: Path) -> None:
    full = ("iterations=1", "model.lora=null", "optim.lr=0.01", "eval.every=0")
    run(tiny_config(tmp_path / "run", *full))
    grid = generate.generate(tmp_path / "run", ["a cat"], tmp_path / "a", seed=0, count=1)
    run(tiny_config(tmp_path / "still", *full, "optim.lr=0"))
    still = generate.generate(tmp_path / "still", ["a cat"], tmp_path / "b", seed=0, count=1)
    assert grid.read_bytes() != still.read_bytes()


def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _main(monkeypatch, str(tmp_path), "a cat")
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: generate: no checkpoint there")
    assert error.count("\n") == 1
