"""Video families besides MiniMax H3 by the same loop: ratios of 1, videos with their sound, resume."""

from pathlib import Path
from typing import Any

import av
import pytest
import torch
from safetensors.torch import load_file

from miles_rollout import RolloutEngine
from miles_rollout.loading import load_pipeline
from tests.miles_rollout.models import load as skip_if_too_old
from tests.tiny_run import ROOT, metrics_of, without_perf
from tests.trainers.test_update import move_adapter
from trainers.build import run
from trainers.config import TrainConfig
from trainers.config_loader import load
from trainers.lora import LoraConfig
from trainers.policy import Policy

SMALL = (
    "model.device=cpu",
    "rollout.group_size=2",
    "eval={every: 0, num_prompts: 1, num_inference_steps: 3}",
    "checkpoint.every=1",
    "tracking={wandb: disabled, media_every: 2, num_media: 1}",
    "optim.lr=1e-3",
    f"data.train={ROOT / 'configs/prompts/shapes_train.txt'}",
    f"data.eval={ROOT / 'configs/prompts/shapes_eval.txt'}",
)


def _run(family: str, output_dir: Path, *overrides: str) -> Path:
    path = ROOT / f"configs/{family}/tiny_cpu.yaml"
    return run(load(TrainConfig, [path], [*SMALL, f"output_dir={output_dir}", *overrides]))


@pytest.mark.parametrize(
    ("family", "rate", "frames"),
    [("ltx2", 24000, 9), ("cosmos3", None, 5)],
    ids=["ltx2", "cosmos3"],
)
def test_a_recipe_trains_both_streams_and_resumes(
    tmp_path: Path, family: str, rate: int | None, frames: int
) -> None:
    skip_if_too_old(f"tiny-{family}")
    whole = _run(family, tmp_path / "whole", "iterations=2")
    metrics = metrics_of(whole)
    for line in metrics[:2]:
        assert line["train/ratio_abs_minus_1"] == 0
        for stream in ("video", "audio"):
            assert line[f"train/log_prob_max_abs_diff/{stream}"] == 0
            assert any(key.startswith(f"rollout/log_prob/{stream}/step_") for key in line)
        assert line["train/grad_norm"] > 0
    (path,) = (whole / "samples").glob("iteration_000000_rollout_samples_00.mp4")
    with av.open(str(path)) as container:
        (video,), (sound,) = container.streams.video, container.streams.audio
        assert video.frames == frames
        assert rate in (None, sound.rate)
    _run(family, tmp_path / "parts", "iterations=1")
    _run(family, tmp_path / "parts", "iterations=2", "resume=true")
    assert without_perf(metrics_of(tmp_path / "parts")) == without_perf(metrics)


def test_a_pipeline_without_lora_loading_takes_the_export_by_its_denoiser(tmp_path: Path) -> None:
    skip_if_too_old("tiny-cosmos3")
    output_dir = _run("cosmos3", tmp_path, "iterations=1")
    stock = load_pipeline("tiny-cosmos3")
    assert not hasattr(stock, "load_lora_weights")
    bare = {name: p.clone() for name, p in stock.transformer.named_parameters()}
    folder = output_dir / "checkpoints/iteration_000001"
    with torch.random.fork_rng(devices=[]):
        stock.transformer.load_lora_adapter(
            str(folder), weight_name="pytorch_lora_weights.safetensors"
        )
    saved = load_file(folder / "policy.safetensors")
    loaded = {
        f"transformer.{name.replace('.default_0.', '.').replace('.default.', '.')}": p
        for name, p in stock.transformer.named_parameters()
        if ".lora_" in name
    }
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    assert any(".lora_B." in name and tensor.abs().sum() > 0 for name, tensor in saved.items())
    held = dict(stock.transformer.named_parameters())
    for name, weight in bare.items():
        head, _, tail = name.rpartition(".")
        assert torch.equal(held.get(name, held.get(f"{head}.base_layer.{tail}")), weight)


def test_both_experts_of_wan_2_2_are_trained_and_exported(tmp_path: Path) -> None:
    """By the documented ways, the second expert by its own file, in a fresh stock pipeline."""
    skip_if_too_old("tiny-wan2-2")
    engine = RolloutEngine(load_pipeline("tiny-wan2-2"))
    lora = LoraConfig(rank=2, alpha=8.0, targets=("attn1.to_q", "ffn.net.2"))
    policy = Policy(engine, lora, seed=3)
    assert set(policy.modules) == {"transformer", "transformer_2"}
    move_adapter(policy)
    policy.export(tmp_path)
    second = {"weight_name": "pytorch_lora_weights_transformer_2.safetensors"}
    stock = load_pipeline("tiny-wan2-2")

    def latents(pipe: Any) -> torch.Tensor:
        size = engine.adapter.small_request(pipe)
        return pipe(
            prompt="a cat",
            guidance_scale=1.0,
            num_inference_steps=4,
            generator=torch.Generator().manual_seed(1),
            output_type="latent",
            **size,
        ).frames

    trained, bare = latents(engine.pipe), latents(stock)
    with torch.random.fork_rng(devices=[]):
        stock.load_lora_weights(str(tmp_path))
        first_only = latents(stock)
        stock.load_lora_weights(str(tmp_path), load_into_transformer_2=True, **second)
    assert torch.equal(latents(stock), trained)
    assert not torch.equal(bare, first_only)
    assert not torch.equal(first_only, trained)
