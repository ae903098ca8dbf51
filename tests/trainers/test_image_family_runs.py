"""Families other than Qwen-Image train by the same loop: ratios of 1, weights that move."""

from pathlib import Path

import pytest
import torch

from tests.miles_rollout.models import load
from tests.tiny_run import tiny_config, tiny_trainer, train, trainer_of
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
