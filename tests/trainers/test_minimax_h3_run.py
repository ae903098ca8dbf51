"""A whole run on the tiny MiniMax H3: two streams, one sample a chunk, videos with sound."""

import math
from collections import Counter
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import av
import pytest
import torch
from safetensors.torch import load_file

from miles_rollout import RolloutEngine
from miles_rollout.testing import tiny_minimax_h3
from recipes.generate import generate
from tests.tiny_run import metrics_of, tiny_h3_config, train, trainer_of, without_perf
from tests.trainers.test_update import move_adapter
from tests.wandb_reader import read_run, run_folders
from trainers.advantages import Advantages
from trainers.build import run
from trainers.config import TrainConfig
from trainers.config_loader import load
from trainers.evaluation import DETERMINISTIC
from trainers.iteration_metrics import Clock, log_prob_metrics
from trainers.lora import LoraConfig
from trainers.policy import Policy, PolicyError

LONG = ("optim.updates_per_iteration=2", "debug.save_rollouts=true")
STREAMS = ("video", "audio")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two iterations of two updates, with videos in W&B."""
    output_dir = tmp_path_factory.mktemp("h3") / "run"
    patch = pytest.MonkeyPatch()
    patch.setenv("WANDB_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    media = "tracking={wandb: offline, media_every: 2, num_media: 1}"
    run(tiny_h3_config(output_dir, *LONG, media))
    patch.undo()
    return SimpleNamespace(output_dir=output_dir, metrics=metrics_of(output_dir))


def test_the_first_ratio_is_exactly_one_of_each_stream_and_jointly(whole: Any) -> None:
    for line in whole.metrics[:2]:
        assert line["train/ratio_abs_minus_1"] == 0
        assert line["train/log_prob_max_abs_diff"] == 0
        for step in (1, 2):
            assert line[f"train/log_prob_abs_diff/step_{step}"] == 0
        assert 0 < line["train/ratio_abs_minus_1/update_1"] < 0.1
        for stream in STREAMS:
            assert line[f"train/ratio_abs_minus_1/{stream}"] == 0
            assert line[f"train/log_prob_mean_abs_diff/{stream}"] == 0
            assert line[f"train/log_prob_max_abs_diff/{stream}"] == 0
            assert line[f"train/log_prob_abs_diff/{stream}/step_1"] == 0
            # Over both updates, of which the second is off the rollout's policy.
            assert 0 < abs(line[f"train/ratio_mean/{stream}"] - 1) < 0.01


def test_both_streams_and_both_rewards_are_told(whole: Any) -> None:
    steps = {f"rollout/log_prob/{s}/step_{i}" for s in STREAMS for i in (1, 2)}
    rewards = {f"rollout/reward/bright_and_loud/{name}" for name in ("bright", "loud")}
    for line in whole.metrics[:2]:
        assert steps | rewards <= line.keys()
        assert not any(key.endswith(("step_0", "step_3")) for key in line)
    for line in whole.metrics:
        assert all(value is not None and math.isfinite(value) for value in line.values())


def test_the_joint_log_prob_is_that_of_all_elements(whole: Any) -> None:
    """592 latent elements of video and 1656 of audio."""
    for line in whole.metrics[:2]:
        means = _means(line)
        joint = (592 * means["video"] + 1656 * means["audio"]) / (592 + 1656)
        assert line["rollout/log_prob/mean"] == pytest.approx(joint, rel=1e-5)


def test_samples_are_videos_with_their_sound(whole: Any) -> None:
    names = {path.name for path in (whole.output_dir / "samples").iterdir()}
    due = ("iteration_000000_eval_samples", "iteration_000000_rollout_samples")
    assert names == {
        *(f"{name}{end}" for name in due for end in (".png", "_00.mp4")),
        *(f"iteration_000002_eval_samples{end}" for end in (".png", "_00.mp4")),
        *(f"before_after{end}" for end in (".png", "_00.mp4", "_01.mp4")),
    }
    with av.open(str(whole.output_dir / "samples" / f"{due[0]}_00.mp4")) as container:
        (video,), (sound,) = container.streams.video, container.streams.audio
        assert (video.average_rate, video.frames) == (24, 124)
        assert (sound.rate, sound.channels) == (32000, 2)
        assert float(sound.duration * sound.time_base) == pytest.approx(165600 / 32000, abs=0.07)


def test_wandb_gets_the_encoded_files(whole: Any) -> None:
    (folder,) = run_folders(whole.output_dir)
    rows = read_run(folder).history
    (shown,) = (row["eval/samples"] for row in rows if row["iteration"] == 0)
    assert (shown["_type"], shown["count"]) == ("videos", 1)
    files = sorted((folder / "files/media/videos").rglob("*.mp4"))
    assert len(files) == 3
    for path in files:
        with av.open(str(path)) as container:
            assert len(container.streams.audio) == 1


def test_a_resumed_run_is_the_uninterrupted_one(whole: Any, tmp_path: Path) -> None:
    run(tiny_h3_config(tmp_path, *LONG, "iterations=1"))
    run(tiny_h3_config(tmp_path, *LONG, "resume=true"))
    assert without_perf(metrics_of(tmp_path)) == without_perf(whole.metrics)
    last = "checkpoints/iteration_000002"
    for name in ("policy.safetensors", "optimizer.safetensors", "pytorch_lora_weights.safetensors"):
        a, b = (load_file(folder / last / name) for folder in (tmp_path, whole.output_dir))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name


def test_recorded_rollouts_of_two_streams_train_the_same_bits(whole: Any, tmp_path: Path) -> None:
    recorded = f"debug.load_rollouts={whole.output_dir / 'rollouts'}"
    metrics = train(trainer_of(tiny_h3_config(tmp_path, LONG[0], recorded)))
    assert without_perf(metrics) == without_perf(whole.metrics)


def test_each_sample_is_denoised_and_replayed_once_a_step(tmp_path: Path) -> None:
    trainer = trainer_of(
        tiny_h3_config(tmp_path, "iterations=1", "rollout.group_size=4", "eval.every=0")
    )
    counts: Counter[str] = Counter()
    rows: set[int] = set()

    def count(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        counts["train" if torch.is_grad_enabled() else "rollout"] += 1
        rows.add(len(kwargs["hidden_states"]))

    trainer.engine.pipe.transformer.register_forward_pre_hook(count, with_kwargs=True)
    batches, scores = trainer.rollouts.collect(0, Clock())
    assert [len(batch.prompts) for batch in batches] == [1] * 8
    assert (counts["rollout"], counts["train"]) == (8 * 3, 0)
    trainer._train(batches, Advantages(values=scores.total.float()), ~scores.masked)
    assert (counts["rollout"], counts["train"]) == (8 * 3, 8 * 2)
    assert rows == {1}
    for batch in batches:
        assert all(m.video is not None and m.video.device.type == "cpu" for m in batch.media or [])


def test_video_alone_can_be_trained(tmp_path: Path) -> None:
    line = _one_update(tmp_path, "rollout.sde_streams=[video]")
    assert line["train/ratio_abs_minus_1"] == line["train/ratio_abs_minus_1/video"] == 0
    assert line["train/grad_norm"] > 0
    assert line["rollout/log_prob/mean"] == pytest.approx(_means(line)["video"])
    assert not any("audio" in key for key in line)


def test_weights_of_the_streams_reach_the_loss(tmp_path: Path) -> None:
    norms = []
    for share in (0.0, 0.5, 592 / (592 + 1656)):
        weights = f"rollout.stream_weights={{video: {share}, audio: {1 - share}}}"
        line = _one_update(tmp_path, weights)
        assert line["train/ratio_abs_minus_1"] == 0
        means = _means(line)
        joint = share * means["video"] + (1 - share) * means["audio"]
        assert line["rollout/log_prob/mean"] == pytest.approx(joint, rel=1e-5)
        norms.append(line["train/grad_norm"])
    assert len(set(norms)) == 3
    by_elements = _one_update(tmp_path)["train/grad_norm"]
    assert norms[2] == pytest.approx(by_elements, rel=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers.*")
def test_both_partitions_are_trained_and_exported(tmp_path: Path) -> None:
    """A file a denoiser; each is bitwise the trained one in a fresh pipeline of stock diffusers."""
    engine = RolloutEngine(_both_partitions())
    policy = Policy(engine, LoraConfig(rank=2, alpha=8.0, targets=("to_q", "ff.net.2")), seed=3)
    assert set(policy.modules) == {"transformer", "transformer_ref"}
    move_adapter(policy)
    policy.export(tmp_path)
    names = {"pytorch_lora_weights.safetensors", "pytorch_lora_weights_transformer_ref.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert policy.is_exported(tmp_path)
    a, b = (load_file(tmp_path / name) for name in sorted(names))
    assert a.keys() == b.keys()
    assert any(not torch.equal(a[key], b[key]) for key in a), "each has its own seed"

    by_pipeline, by_module = _both_partitions(), _both_partitions()
    second = {"weight_name": "pytorch_lora_weights_transformer_ref.safetensors"}
    with torch.random.fork_rng(devices=[]):  # loading draws, and then overwrites
        by_pipeline.load_lora_weights(tmp_path)
        by_pipeline.load_lora_weights(tmp_path, **second, load_into_transformer_ref=True)
        by_module.transformer.load_lora_adapter(
            tmp_path, weight_name="pytorch_lora_weights.safetensors"
        )
        by_module.transformer_ref.load_lora_adapter(tmp_path, **second)
    call = _recorded_call(engine)
    for name in ("transformer", "transformer_ref"):
        with torch.no_grad():
            trained, *loaded = (
                getattr(pipe, name)(**call) for pipe in (engine.pipe, by_pipeline, by_module)
            )
            (bare, _) = getattr(_both_partitions(), name)(**call)
        for video, audio in loaded:
            assert torch.equal(video, trained[0])
            assert torch.equal(audio, trained[1])
        assert not torch.equal(bare, trained[0])


def test_one_of_two_denoisers_can_be_trained() -> None:
    lora = LoraConfig(rank=2, alpha=8.0, targets=("to_q",))
    pipe = _both_partitions()
    policy = Policy(RolloutEngine(pipe), lora, seed=3, denoisers=["transformer_ref"])
    assert {name.partition(".")[0] for name in policy.parameters} == {"transformer_ref"}
    assert not any(p.requires_grad for p in pipe.transformer.parameters())
    alone = tiny_minimax_h3()
    alone.transformer_ref = None
    with pytest.raises(PolicyError, match=r"holds no such denoiser; got \['transformer_ref'\]; ch"):
        Policy(RolloutEngine(alone), lora, seed=3, denoisers=["transformer_ref"])


def test_a_denoiser_that_nothing_trains_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _one_update(tmp_path, "model.denoisers=[transformer, transformer_ref]")
    message = "no step of this update used transformer_ref; got model.denoisers [transformer, trans"
    assert [record.getMessage()[: len(message)] for record in caplog.records] == [message]
    caplog.clear()
    _one_update(tmp_path)
    assert not caplog.records


def test_videos_of_a_checkpoint(whole: Any, tmp_path: Path) -> None:
    assert generate(whole.output_dir, ["a cat"], tmp_path, seed=1, count=1).name == "grid.png"
    assert {p.name for p in tmp_path.iterdir()} == {"grid.png", "prompt_000_sample_000.mp4"}
    with av.open(str(tmp_path / "prompt_000_sample_000.mp4")) as container:
        assert container.streams.video[0].frames == 124
        assert container.streams.audio[0].rate == 32000


def test_the_resolved_config_says_one_row_a_chunk(whole: Any) -> None:
    config = load(TrainConfig, [whole.output_dir / "config.yaml"])
    assert (config.rollout.chunk_size, config.eval.chunk_size) == (1, 1)


def _one_update(tmp_path: Path, *overrides: str) -> dict[str, float]:
    """The metrics of a first update with made-up rewards, without decoding."""
    trainer = trainer_of(tiny_h3_config(tmp_path, *overrides))
    batches = list(trainer.rollouts.chunks(0))
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    metrics, _ = trainer._train(
        batches, Advantages(values=advantages), torch.ones(4, dtype=torch.bool)
    )
    return metrics | log_prob_metrics(batches)


def _means(line: dict[str, float]) -> dict[str, float]:
    """The log-prob of each stream over both trained steps."""
    keys = {s: [f"rollout/log_prob/{s}/step_{i}" for i in (1, 2)] for s in STREAMS}
    return {s: fmean(line[key] for key in k) for s, k in keys.items() if k[0] in line}


def _both_partitions() -> Any:
    """The second partition has weights of its own."""
    pipe = tiny_minimax_h3()
    pipe.update_components(transformer_ref=tiny_minimax_h3(seed=1).transformer)
    return pipe


def _recorded_call(engine: RolloutEngine) -> dict[str, Any]:
    """What the denoiser is called with in the first step of a sample."""
    calls: list[dict[str, Any]] = []

    def keep(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        calls.append(kwargs)

    handle = engine.pipe.transformer.register_forward_pre_hook(keep, with_kwargs=True)
    size = {"height": 32, "width": 32, "num_frames": 124, "num_inference_steps": 2}
    list(engine.generate(["a cat"], 1, DETERMINISTIC, seed=0, decode=False, **size))
    handle.remove()
    return calls[0]
