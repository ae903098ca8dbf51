"""All prompts first, then the encoders leave, then the rest of the model comes to the device."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainers.build
from miles_rollout import RolloutEngine, RolloutParamsError, RolloutStateError
from miles_rollout.encodings import text_encoders
from miles_rollout.loading import TINY_PIPELINES, load_pipeline
from tests.tiny_run import metrics_of, tiny_config, train, trainer_of, without_perf
from trainers.build import build_engine
from trainers.config_loader import ConfigError
from trainers.evaluation import DETERMINISTIC

DROP = "model.drop_text_encoders=true"
NAMES = ["tiny-qwen-image", "tiny-sd3", "tiny-flux", "tiny-minimax-h3"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_samples_are_the_same_bits_without_the_encoders(name: str, dtype: torch.dtype) -> None:
    engine = RolloutEngine(load_pipeline(name, dtype))
    size = engine.adapter.small_request(engine.pipe)

    def sample(prompt: str) -> dict[str, torch.Tensor]:
        (batch,) = engine.generate(
            [prompt], 1, DETERMINISTIC, seed=0, num_inference_steps=3, **size
        )
        return dict(batch.latents)

    before = sample("a cat")
    names = text_encoders(engine.pipe)
    held = [weakref.ref(getattr(engine.pipe, name)) for name in names]
    assert engine.drop_text_encoders() == names
    gc.collect()
    assert [ref() for ref in held] == [None] * len(names), "their memory is not free"
    after = sample("a cat")
    assert all(torch.equal(before[stream], after[stream]) for stream in before)
    with pytest.raises(RolloutStateError, match=r"were dropped, and .*; got 'a dog'; encode all"):
        sample("a dog")
    with pytest.raises(RolloutParamsError, match=r"this pipeline has none; got .*; leave them be"):
        engine.drop_text_encoders()


@pytest.mark.parametrize("guided", [False, True])
def test_a_run_is_the_same_bits(tmp_path: Path, guided: bool) -> None:
    guidance = ("rollout.true_cfg_scale=2", "rollout.negative_prompt=blurry") if guided else ()
    overrides = ("iterations=1", *guidance)
    trainer = trainer_of(tiny_config(tmp_path / "without", *overrides, DROP))
    assert text_encoders(trainer.engine.pipe) == []
    train(trainer)
    train(trainer_of(tiny_config(tmp_path / "with", *overrides)))
    a, b = (metrics_of(tmp_path / name) for name in ("without", "with"))
    assert without_perf(a) == without_perf(b)


def test_both_are_never_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which modules are moved, encode and are dropped."""
    pipe = load_pipeline("tiny-qwen-image")
    monkeypatch.setattr(trainers.build, "load_pipeline", lambda *_: pipe)
    events: list[str] = []
    names = {id(m): n for n, m in pipe.components.items() if isinstance(m, nn.Module)}
    move = nn.Module.to

    def moved(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if id(module) in names:
            events.append(f"{names[id(module)]} moves")
        return move(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "to", moved)
    pipe.text_encoder.register_forward_pre_hook(lambda *_: events.append("encodes"))
    drop = RolloutEngine.drop_text_encoders

    def dropped(engine: RolloutEngine) -> list[str]:
        events.append("dropped")
        return drop(engine)

    monkeypatch.setattr(RolloutEngine, "drop_text_encoders", dropped)
    build_engine(tiny_config(tmp_path, DROP), torch.device("cpu"), ["a", "b", "a"])
    assert events[:4] == ["text_encoder moves", "encodes", "encodes", "dropped"]
    assert set(events[4:]) == {"transformer moves", "vae moves"}


def test_a_pipeline_without_text_encoders_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = load_pipeline("tiny-qwen-image")
    pipe.register_modules(text_encoder=None)
    monkeypatch.setattr(trainers.build, "load_pipeline", lambda *_: pipe)
    with pytest.raises(ConfigError, match=r"drop_text_encoders: this pipeline has none; got 'tiny"):
        build_engine(tiny_config(tmp_path, DROP), torch.device("cpu"), ["a"])


def test_the_names_cover_the_families_that_are_tried_here() -> None:
    assert set(NAMES) <= set(TINY_PIPELINES)
