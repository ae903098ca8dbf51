from dataclasses import replace
from pathlib import Path

import pytest

from trainers.build import read_inputs
from trainers.config import TrainConfig
from trainers.config_loader import load, to_yaml
from trainers.data import load_prompts
from trainers.dry_run import describe
from trainers.model_sizes import measure
from trainers.windows import FixedWindow, RandomWindow

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml"))
PROMPTS = sorted((ROOT / "configs/prompts").iterdir())
H3_VIDEO, H3_JOINT = (f"configs/minimax_h3/t2va_{kind}.yaml" for kind in ("video_only", "joint"))
ALIGNED = "configs/qwen_image/flow_grpo_aligned.yaml"


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt files are given relative to it."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", CONFIGS)
def test_every_config_loads_and_can_be_described(path: str, tmp_path: Path) -> None:
    config = load(TrainConfig, [path])
    text = describe(config, read_inputs(config))
    for part in ("batch", "denoiser forwards an iteration", "memory"):
        assert f"\n{part}" in text
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert load(TrainConfig, [tmp_path / "resolved.yaml"]) == config


@pytest.mark.parametrize("path", CONFIGS)
def test_every_config_says_what_it_is(path: str) -> None:
    first, *rest = Path(path).read_text().splitlines()
    assert first.startswith("# ")
    header = "\n".join(line for line in [first, *rest] if line.startswith("#"))
    assert "Hardware:" in header
    assert "Expected result:" in header


def test_no_two_configs_write_to_one_folder() -> None:
    folders = [load(TrainConfig, [path]).output_dir for path in CONFIGS]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("kind", ["shapes", "films", "general", "signs"])
def test_held_out_prompts_are_held_out(kind: str) -> None:
    train, held_out = (
        {record.prompt for record in load_prompts(f"configs/prompts/{kind}_{part}.txt")}
        for part in ("train", "eval")
    )
    assert not train & held_out


def test_the_public_qwen_image_recipe_is_as_published() -> None:
    config = load(TrainConfig, [ALIGNED])
    rollout, optim = config.rollout, config.optim
    assert (rollout.num_prompts, rollout.group_size, rollout.num_samples) == (32, 16, 512)
    assert (rollout.height, rollout.width, rollout.num_inference_steps) == (512, 512, 10)
    assert (rollout.true_cfg_scale, rollout.negative_prompt) == (4.0, " ")
    assert (rollout.sde_type, rollout.noise_level) == ("sde", 1.2)
    assert rollout.window == RandomWindow(size=2, start_min=0, start_max=3)
    windows = {rollout.window.choose(i, 10, config.seed) for i in range(100)}
    assert windows == {(0, 1), (1, 2), (2, 3), (3, 4)}
    assert (optim.lr, optim.betas, optim.eps, optim.weight_decay) == (
        3e-4,
        (0.9, 0.999),
        1e-8,
        1e-4,
    )
    assert (optim.max_grad_norm, optim.updates_per_iteration, optim.warmup_updates) == (1.0, 2, 0)
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.alpha) == (64, 128.0)
    assert (config.model.lora.init, len(config.model.lora.targets)) == ("gaussian", 12)
    assert (config.model.dtype, config.model.gradient_checkpointing) == ("bfloat16", True)
    assert (config.algorithm.clip_range, config.algorithm.adv_clip_max) == (1e-4, 5.0)
    assert (config.algorithm.advantage_std, config.algorithm.kl_beta) == ("batch", 0.0)
    assert (config.eval.every, config.checkpoint.every) == (30, 30)
    assert config.eval.num_inference_steps == 50


@pytest.mark.parametrize(("name", "reward"), [("pickscore_8gpu", "pickscore"), ("ocr_4gpu", "ocr")])
def test_the_public_qwen_image_rewards_have_the_published_batch(name: str, reward: str) -> None:
    config = load(TrainConfig, [f"configs/qwen_image/{name}.yaml"])
    aligned = load(TrainConfig, [ALIGNED])
    for part in ("model", "algorithm", "optim", "seed"):
        assert getattr(config, part) == getattr(aligned, part)
    # What the public "random" window always comes to.
    window = FixedWindow(steps=(3, 4))
    assert config.rollout == replace(aligned.rollout, window=window)
    assert [r.name for r in config.rewards] == [reward]
    held_out = {"ocr": "clip_score", "pickscore": "jpeg_compressibility"}
    assert [r.name for r in config.eval.rewards] == [held_out[config.rewards[0].name]]
    assert replace(config.eval, rewards=()) == aligned.eval


def test_every_sign_has_one_quoted_text() -> None:
    for part in ("train", "eval"):
        for record in load_prompts(f"configs/prompts/signs_{part}.txt"):
            before, text, after = record.prompt.split('"')
            assert before
            assert text
            assert not after


def test_the_public_video_recipe_of_minimax_h3_is_as_published() -> None:
    config = load(TrainConfig, [H3_VIDEO])
    rollout, optim = config.rollout, config.optim
    assert (rollout.num_prompts, rollout.group_size, rollout.chunk_size) == (2, 8, 1)
    assert (rollout.height, rollout.width) == (768, 1344)
    # Ten evaluations; frames come in 17 n + 5, and five seconds are the least.
    assert (rollout.num_inference_steps, config.eval.num_inference_steps) == (11, 21)
    assert (rollout.num_frames or 0) % 17 == 5
    assert (rollout.num_frames or 0) / 24 >= 5
    assert (rollout.sde_type, rollout.noise_level) == ("sde", 0.7)
    assert rollout.sde_streams == ("video",)
    windows = {rollout.window.choose(i, 10, config.seed) for i in range(50)}
    assert windows == {(1, 2), (2, 3)}
    assert (optim.lr, optim.eps, optim.weight_decay) == (1e-4, 1e-15, 1e-4)
    assert (optim.max_grad_norm, optim.updates_per_iteration) == (1.0, 2)
    assert (config.algorithm.clip_range, config.algorithm.kl_beta) == (1e-4, 0.0)
    assert config.algorithm.advantage_std == "batch"
    _has_the_published_h3_model(config)


def test_the_public_joint_recipe_of_minimax_h3_is_as_published() -> None:
    config = load(TrainConfig, [H3_JOINT])
    rollout, optim = config.rollout, config.optim
    assert (rollout.num_prompts, rollout.group_size) == (32, 8)
    assert (rollout.height, rollout.width, rollout.num_inference_steps) == (256, 384, 11)
    assert (rollout.sde_type, rollout.noise_level, rollout.sde_streams) == ("cps", 0.8, None)
    assert rollout.stream_weights == {"video": 0.5, "audio": 0.5}
    windows = {rollout.window.choose(i, 10, config.seed) for i in range(200)}
    assert windows == {(i, i + 1, i + 2) for i in range(7)}
    assert (optim.lr, optim.weight_decay, optim.updates_per_iteration) == (3e-4, 1e-4, 2)
    _has_the_published_h3_model(config)


def _has_the_published_h3_model(config: TrainConfig) -> None:
    model = config.model
    assert (model.pipeline, model.workflow, model.dtype) == (
        "MiniMaxAI/MiniMax-H3",
        "t2va",
        "bfloat16",
    )
    assert model.drop_text_encoders
    assert model.gradient_checkpointing
    assert model.lora is not None
    assert (model.lora.rank, model.lora.alpha, len(model.lora.targets)) == (64, 128.0, 6)


def test_the_public_recipe_of_ltx_2_is_as_published() -> None:
    config = load(TrainConfig, ["configs/ltx2/t2v_video_only.yaml"])
    rollout = config.rollout
    assert (rollout.num_samples, rollout.group_size, rollout.rows) == (64, 8, 1)
    assert (rollout.height, rollout.width, rollout.num_frames) == (512, 768, 57)
    assert rollout.sampling["frame_rate"] == 24.0
    assert (rollout.sde_type, rollout.sde_streams) == ("cps", ("video",))
    assert {rollout.window.choose(i, 10, config.seed)[0] for i in range(200)} == set(range(7))
    assert config.algorithm.clip_range == 1e-5
    sizes = measure(config)
    assert sizes is not None
    assert (sizes.branches, list(sizes.denoisers)) == (1, ["transformer"]), "unguided"


def test_the_public_recipe_of_cosmos3_is_as_published() -> None:
    config = load(TrainConfig, ["configs/cosmos3/nano_t2i.yaml"])
    rollout = config.rollout
    assert (rollout.group_size, rollout.rows, rollout.num_frames) == (16, 1, 1)
    assert (rollout.width, rollout.height) == (832, 480)
    windows = {rollout.window.choose(i, 16, config.seed) for i in range(50)}
    assert windows == {(3, 4), (4, 5), (5, 6)}
    assert config.model.lora is not None
    # The generating half of the attention, and nothing of the understanding one.
    names = {target.rpartition(".")[2] for target in config.model.lora.targets}
    assert names == {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
