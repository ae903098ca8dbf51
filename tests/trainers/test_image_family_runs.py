"""Families other than Qwen-Image train by the same loop: ratios of 1, weights that move."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.miles_rollout.models import load, small_references
from tests.tiny_run import tiny_config, tiny_trainer, train, trainer_of
from trainers.build import read_inputs
from trainers.config_loader import ConfigError

RUN = (
    "iterations=1",
    "eval.every=1",
    "tracking={wandb: disabled, media_every: 1}",
    "rollout.group_size=2",
)
LORA = "model.lora={rank: 4, alpha: 8, targets: [attn.to_q, attn.to_k, attn.to_v]}"
SIDE = ("rollout.height=64", "rollout.width=64")


@pytest.mark.parametrize(
    "overrides",
    [
        # A JPEG has no alpha, which this family's pictures have.
        (
            "model.pipeline=tiny-qwen-image-2-1", *SIDE,
            "rewards=[{name: jpeg_compressibility}]",
        ),
        (
            "model.pipeline=tiny-qwen-image-2-1", *SIDE, "model.dtype=bfloat16",
            "rollout.true_cfg_scale=3", "rollout.negative_prompt=' '",
        ),
        ("model.pipeline=tiny-flux-2-klein", *SIDE, "rollout.guidance_scale=3"),
    ],
    ids=["qwen-image-2-1", "qwen-image-2-1-cfg-bf16", "flux-2-klein"],
)  # fmt: skip
def test_a_family_trains(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    load(overrides[0].partition("=")[2])  # a skip where diffusers is too old
    trainer = tiny_trainer(tmp_path, *RUN, LORA, *overrides)
    start = {name: tensor.clone() for name, tensor in trainer.policy.tensors().items()}
    line = train(trainer)[0]
    assert line["train/ratio_abs_minus_1"] == 0
    assert line["train/grad_norm"] > 0
    assert any(not torch.equal(t, start[name]) for name, t in trainer.policy.tensors().items())


def test_a_family_that_needs_references_says_so_before_a_prompt_is_encoded(tmp_path: Path) -> None:
    load("tiny-qwen-image-edit-plus")
    config = tiny_config(tmp_path, "model.pipeline=tiny-qwen-image-edit-plus")
    with pytest.raises(ConfigError, match=r"edits reference images, .* got image of NoneType"):
        trainer_of(config)


def _edits(folder: Path, colours: tuple[str, ...]) -> Path:
    """Prompts that edit pictures, each its own."""
    lines = []
    for number, colour in enumerate(colours):
        Image.new("RGB", (64, 64), colour).save(folder / f"{number}.png")
        line = {"prompt": f"make it {colour}", "inputs": {"image": [f"{number}.png"]}}
        lines.append(json.dumps(line))
    path = folder / "edits.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("drop", ["false", "true"])
def test_a_family_that_edits_trains_on_the_pictures_of_its_prompts(
    tmp_path: Path, drop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load("tiny-qwen-image-edit-plus")
    small_references(monkeypatch)
    path = _edits(tmp_path, ("red", "blue"))
    trainer = trainer_of(
        tiny_config(
            tmp_path / "run",
            "model.pipeline=tiny-qwen-image-edit-plus",
            *(*RUN, LORA, f"data.train={path}", f"data.eval={path}"),
            *("rollout.height=128", "rollout.width=128"),
            *("rollout.chunk_size=1", "rollout.true_cfg_scale=2", "rollout.negative_prompt=' '"),
            *("eval.chunk_size=1", f"model.drop_text_encoders={drop}"),
        )
    )
    line = train(trainer)[0]
    assert line["train/ratio_abs_minus_1"] == 0
    assert line["train/grad_norm"] > 0


def test_pictures_that_a_family_does_not_take_are_refused_before_a_model_is_loaded(
    tmp_path: Path,
) -> None:
    path = _edits(tmp_path, ("red", "blue"))
    config = tiny_config(tmp_path / "run", f"data.train={path}")
    with pytest.raises(
        ConfigError, match=r"data\.train: this pipeline takes no such input; got im"
    ):
        read_inputs(config)
