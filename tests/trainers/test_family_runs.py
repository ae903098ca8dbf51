"""One iteration of training on each of the families that text alone drives."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from miles_rollout import Media
from tests.tiny_run import OVERRIDES, metrics_of
from trainers.build import run
from trainers.config import TrainConfig
from trainers.config_loader import load

VIDEO = ("rollout.num_frames=5", "rollout.guidance_scale=3")
FAMILIES = {
    "tiny-wan": VIDEO,
    "tiny-wan2-2": (*VIDEO, "rollout.sampling={guidance_scale_2: 4}"),
    "tiny-z-image": ("rollout.guidance_scale=3",),
    "tiny-sana": ("rollout.guidance_scale=3", "rollout.sampling={use_resolution_binning: false}"),
    "tiny-hunyuan-video-1-5": (*VIDEO, "rollout.negative_prompt=x"),
    "tiny-ltx2": (
        "rollout.num_frames=9",
        "rollout.guidance_scale=3",
        "rollout.negative_prompt=x",
        "rollout.sampling={frame_rate: 24.0, spatio_temporal_guidance_blocks: [1]}",
        "eval.num_inference_steps=2",  # one step cannot be stretched to a terminal sigma
    ),
    "tiny-cosmos3": (
        "rollout.num_frames=5",
        "rollout.guidance_scale=3",
        "rollout.negative_prompt=x",
        "rollout.sampling={enable_sound: true}",
        "model.lora={rank: 2, alpha: 4, targets: [add_q_proj, add_v_proj]}",
    ),
}


def bright(
    media: Sequence[Media], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> dict[str, list[float]]:
    """The mean of a picture or a video."""
    shown = [m.image if m.video is None else m.video for m in media]
    return {"bright": [100 * x.double().mean().item() for x in shown if x is not None]}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_ratio_is_exactly_one_and_every_denoiser_learns(
    name: str, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\na blue square\n")
    given = ("iterations=", "data", "model.pipe", "model.lora", "rewards", "eval", "rollout.group")
    common = [o for o in OVERRIDES if not o.startswith(given)]
    own = (
        f"output_dir={tmp_path / 'run'}",
        "iterations=1",
        f"data={{train: {prompts}, eval: {prompts}}}",
        "eval={every: 1, num_prompts: 1, samples_per_prompt: 1, num_inference_steps: 1}",
        f"model.pipeline={name}",
        "model.lora={rank: 2, alpha: 4, targets: [to_q, to_k, to_v]}",
        "rollout.group_size=2",
        "rewards=[{name: 'tests.trainers.test_family_runs:bright'}]",
    )
    run(load(TrainConfig, [], [*common, *own, *FAMILIES[name]]))
    line = metrics_of(tmp_path / "run")[0]
    assert line["train/ratio_abs_minus_1"] == line["train/log_prob_max_abs_diff"] == 0
    assert line["train/grad_norm"] > 1e-3
    # B starts as zeros: what was trained is not.
    folder = tmp_path / "run" / "checkpoints" / "iteration_000001"
    files = sorted(folder.glob("*lora*"))
    assert len(files) == (2 if name == "tiny-wan2-2" else 1)
    for file in files:
        trained = [w for key, w in load_file(file).items() if "lora_B" in key]
        assert trained
        assert any(w.any() for w in trained)
