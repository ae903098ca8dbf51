"""What is told of a model without its weights is what is found with them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_rollout import RolloutEngine
from miles_rollout.loading import TINY_PIPELINES, load_pipeline
from tests.tiny_run import tiny_config
from trainers.config import TrainConfig
from trainers.config_loader import load
from trainers.evaluation import DETERMINISTIC
from trainers.model_sizes import measure


def _config(name: str, *overrides: str) -> TrainConfig:
    engine = RolloutEngine(load_pipeline(name))
    small = engine.adapter.small_request(engine.pipe)
    own = {k: v for k, v in small.items() if k in ("height", "width", "num_frames")}
    further = {k: v for k, v in small.items() if k not in own}
    size = [f"rollout.{key}={value}" for key, value in own.items()]
    size += [f"rollout.sampling.{key}={value}" for key, value in further.items()]
    return load(TrainConfig, [], [f"model.pipeline={name}", *size, *overrides])


@pytest.mark.parametrize("name", TINY_PIPELINES)
def test_latents_told_by_modules_are_those_of_a_rollout(name: str) -> None:
    config = _config(name)
    measured = measure(config)
    assert measured is not None
    pipe = load_pipeline(name)
    adapter = RolloutEngine(pipe).adapter
    told = adapter.latent_elements(pipe.components, config.rollout.arguments())
    # None is an honest answer; another number is not.
    assert told is None or told == measured.latents
    assert set(measured.denoisers) <= set(adapter.denoisers)


@pytest.mark.parametrize("name", ["tiny-qwen-image", "tiny-sd3", "tiny-flux", "tiny-minimax-h3"])
def test_these_are_told(name: str) -> None:
    config = _config(name)
    pipe = load_pipeline(name)
    adapter = RolloutEngine(pipe).adapter
    assert adapter.latent_elements(pipe.components, config.rollout.arguments())


@pytest.mark.parametrize(
    ("name", "overrides", "branches"),
    [
        ("tiny-qwen-image", (), 1),
        ("tiny-qwen-image", ("rollout.true_cfg_scale=2", "rollout.negative_prompt=' '"), 2),
        ("tiny-sd3", (), 1),
        ("tiny-sd3", ("rollout.guidance_scale=3",), 2),
        ("tiny-flux", ("rollout.guidance_scale=3",), 1),
        ("tiny-minimax-h3", (), 1),
    ],
)
def test_branches_are_the_samples_that_a_step_costs(
    name: str, overrides: tuple[str, ...], branches: int, tmp_path: Path
) -> None:
    config = _config(name, *overrides)
    measured = measure(config)
    assert measured is not None
    assert measured.branches == branches
    engine = RolloutEngine(load_pipeline(name))
    rows: Counter[str] = Counter()

    def count(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows["all"] += len(kwargs["hidden_states"])

    engine.pipe.transformer.register_forward_pre_hook(count, with_kwargs=True)
    rollout = config.rollout
    list(
        engine.generate(
            ["a cat"],
            1,
            DETERMINISTIC,
            seed=0,
            decode=False,
            negative_prompt=rollout.negative_prompt,
            **rollout.arguments(3),
        )
    )
    assert rows["all"] == branches * engine.adapter.num_steps(3)
    if name == "tiny-minimax-h3":
        return
    # The same from a folder, of which no weight is read.
    engine.pipe.save_pretrained(tmp_path)
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    from_folder = measure(
        load(TrainConfig, [], [*_overrides(config), f"model.pipeline={tmp_path}"])
    )
    assert from_folder is not None
    assert (from_folder.branches, from_folder.latents) == (branches, measured.latents)
    for key, module in measured.denoisers.items():
        empty = from_folder.denoisers[key]
        assert {p.device for p in empty.parameters()} == {torch.device("meta")}
        sizes = [sum(p.numel() for p in m.parameters()) for m in (module, empty)]
        assert sizes[0] == sizes[1]


def _overrides(config: TrainConfig) -> list[str]:
    rollout = config.rollout
    given = {"height": rollout.height, "width": rollout.width}
    given |= {"true_cfg_scale": rollout.true_cfg_scale, "guidance_scale": rollout.guidance_scale}
    found = [f"rollout.{key}={value}" for key, value in given.items() if value is not None]
    if rollout.negative_prompt is not None:
        found.append(f"rollout.negative_prompt='{rollout.negative_prompt}'")
    return found


def test_measuring_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    measure(tiny_config(tmp_path, "model.pipeline=Qwen/Qwen-Image"))
    assert torch.equal(before, torch.get_rng_state())
