"""Fewer steps after the window: the window's steps stay bitwise, and what is skipped is not computed."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.configuration_utils import FrozenDict

import trainers.build
from miles_rollout import RolloutEngine, RolloutParams
from miles_rollout.families import find_adapter
from miles_rollout.loading import TINY_PIPELINES
from tests.miles_rollout.models import CASES, MODELS, load, small_references
from tests.miles_rollout.tiny import Calls, assert_replays
from tests.tiny_run import OVERRIDES, tiny_config, tiny_trainer, train, trainer_of
from trainers.build import read_inputs
from trainers.config import TrainConfig
from trainers.config_loader import ConfigError
from trainers.config_loader import load as load_config
from trainers.dry_run import describe
from trainers.evaluation import evaluate
from trainers.short_schedule import check_schedule, shortened, steps_in_all

ABLE = {
    "tiny-flux", "tiny-flux-2-klein", "tiny-hunyuan-video-1-5", "tiny-ltx2", "tiny-ltx2-3",
    "tiny-qwen-image", "tiny-qwen-image-2-1", "tiny-qwen-image-edit-plus",
    "tiny-qwen-image-pretrained", "tiny-z-image",
}  # fmt: skip
FAMILIES = [case for case in CASES if case.values[0][0] in ABLE]
STEPS, WINDOW, AFTER = 6, (1,), 2
EDGE = "rollout.window={type: fixed, steps: [0]}"


def test_these_families_have_it() -> None:
    adapters = {name: find_adapter(name) for name in TINY_PIPELINES}
    assert {n for n, a in adapters.items() if a and a.base_sigmas(4) is not None} == ABLE
    for name in ABLE:
        adapter = adapters[name]
        assert adapter is not None
        assert "sigmas" in adapter.sampling
        for count in (1, 7, 10, 28, 50):
            sigmas = adapter.base_sigmas(count) or []
            assert len(sigmas) == count
            assert sigmas[0] == 1
            assert all(a > b > 0 for a, b in pairwise(sigmas))


@pytest.mark.parametrize("case", FAMILIES)
def test_the_window_is_bitwise_that_of_the_whole_schedule(
    case: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_references(monkeypatch)
    name, cfg = case
    model = replace(MODELS[name], steps=STEPS)
    engine = RolloutEngine(load(name))
    base = engine.adapter.base_sigmas(STEPS)
    assert base is not None

    def rollout(**sampling: Any) -> Any:
        modules = [getattr(engine.pipe, n) for n in engine.adapter.denoisers]
        with Calls(*modules, rows_of=model.rows_of) as calls:
            (batch,) = engine.generate(
                model.prompts, 1, RolloutParams(sde_step_indices=WINDOW, debug=True), seed=5,
                inputs=[model.inputs()] * model.num_prompts if model.inputs else None, decode=False,
                **model.engine_arguments(cfg), **sampling,
            )  # fmt: skip
        return batch.trajectory, len(calls)

    (whole, all_calls), (short, fewer_calls) = (
        rollout(),
        rollout(sigmas=shortened(base, WINDOW, AFTER)),
    )
    taken = steps_in_all(WINDOW, STEPS, AFTER)
    assert taken == 4
    assert fewer_calls * STEPS == all_calls * taken
    assert torch.equal(short.log_probs[:, :2], whole.log_probs[:, :2])
    assert short.log_probs[:, 1].all()
    for stream, ours in short.streams.items():
        theirs = whole.streams[stream]
        assert ours.num_steps == taken
        assert torch.equal(ours.latents[:, :3], theirs.latents[:, :3])
        assert not torch.equal(ours.latents[:, 3], theirs.latents[:, 3])
        for ours_of, theirs_of in (
            (ours.sigmas, theirs.sigmas),
            (ours.timesteps, theirs.timesteps),
        ):
            assert torch.equal(ours_of[:3], theirs_of[:3])
            # Shifts act on each sigma by itself, so those after the window are the grid's as well.
            assert torch.equal(ours_of[3:], theirs_of[5:])
    assert_replays(engine, short)


@pytest.mark.parametrize(
    ("window", "after", "kept"),
    [
        ((0,), 9, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ((0,), 8, [0, 1, 2, 3, 4, 6, 7, 8, 9]),
        ((0, 1), 3, [0, 1, 2, 6, 9]),
        ((2, 0), 3, [0, 1, 2, 3, 6, 9]),
        ((3, 4), 2, [0, 1, 2, 3, 4, 5, 9]),
        ((3, 4), 1, [0, 1, 2, 3, 4, 5]),
        ((8,), 1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ((9,), 3, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_which_steps_are_left(window: tuple[int, ...], after: int, kept: list[int]) -> None:
    assert shortened([float(i) for i in range(10)], window, after) == kept
    assert steps_in_all(window, 10, after) == len(kept)


def test_every_number_of_steps_is_possible() -> None:
    base = [float(i) for i in range(50)]
    for after in range(1, 50):
        kept = shortened(base, (0,), after)
        assert len(kept) == after + 1
        assert all(a < b for a, b in pairwise(kept))


def _windows(trainer: Any, iterations: int) -> list[tuple[int, ...]]:
    rollout, seed = trainer.config.rollout, trainer.config.seed
    return [rollout.window.choose(i, 6, seed) for i in range(iterations)]


@pytest.mark.parametrize(
    "window",
    [
        "{type: progressive, size: 1, iterations: 1}",
        "{type: random, size: 2, start_min: 1}",
    ],
)
@pytest.mark.parametrize("share", ["false", "true"])
def test_each_iteration_has_the_steps_that_its_window_leaves(
    tmp_path: Path, window: str, share: str
) -> None:
    overrides = (
        *(o for o in OVERRIDES if not o.startswith("rollout.window")), f"rollout.window={window}",
        "rollout.num_inference_steps=6", "rollout.same_noise=true", f"rollout.share_prefix={share}",
        f"output_dir={tmp_path}",
    )  # fmt: skip

    def trainer(*more: str) -> Any:
        return trainer_of(load_config(TrainConfig, [], [*overrides, *more]))

    short, whole = trainer("rollout.steps_after_window=2"), trainer()
    for iteration, steps in enumerate(_windows(short, 6)):
        expected = min(max(steps) + 3, 6)
        pairs = zip(short.rollouts.chunks(iteration), whole.rollouts.chunks(iteration), strict=True)
        for ours, theirs in pairs:
            ours, theirs = ours.trajectory, theirs.trajectory
            assert (ours.log_probs.shape[1], theirs.log_probs.shape[1]) == (expected, 6)
            assert ours.replayable_steps == steps
            for step in steps:
                assert torch.equal(ours.log_probs[:, step], theirs.log_probs[:, step])
                for a, b in zip(ours.pair("image", step), theirs.pair("image", step), strict=True):
                    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((EDGE,), "rollout 24 = 8 x 3 steps x 1"),
        (
            (
                "rollout.num_inference_steps=6", "rollout.window={type: fixed, steps: [1]}",
                "rollout.same_noise=true", "rollout.share_prefix=true",
            ),
            "rollout 26 = (2 prompts x 1 shared steps + 8 x 3) x 1",
        ),
        (
            (EDGE, "rollout.true_cfg_scale=4", "rollout.negative_prompt=' '"),
            "rollout 48 = 8 x 3 steps x 2 (guidance)",
        ),
    ],
)  # fmt: skip
def test_a_dry_run_tells_what_is_computed(
    tmp_path: Path, overrides: tuple[str, ...], told: str
) -> None:
    config = tiny_config(tmp_path, *overrides, "rollout.steps_after_window=2")
    assert told in describe(config, read_inputs(config))
    trainer = trainer_of(config)
    rows: list[int] = []
    trainer.engine.pipe.transformer.register_forward_pre_hook(
        lambda _, __, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    list(trainer.rollouts.chunks(0))
    assert sum(rows) == int(told.split()[1])


@pytest.mark.parametrize("algorithm", ["grpo", "diffusion_nft"])
def test_a_run_trains_the_window_of_fewer_steps(tmp_path: Path, algorithm: str) -> None:
    trainer = tiny_trainer(
        tmp_path, EDGE, "rollout.steps_after_window=2", f"algorithm.type={algorithm}"
    )
    before = {name: weight.clone() for name, weight in trainer.policy.tensors().items()}
    lines = [line for line in train(trainer) if "train/loss" in line]
    assert len(lines) == 2
    changed = [not torch.equal(w, before[n]) for n, w in trainer.policy.tensors().items()]
    assert any(changed)
    if algorithm == "grpo":
        assert [line["train/ratio_abs_minus_1"] for line in lines] == [0, 0]
        assert all("train/log_prob_abs_diff/step_0" in line for line in lines)


def test_an_evaluation_keeps_all_steps(tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tmp_path, EDGE, "rollout.steps_after_window=2",
        "eval={num_prompts: 2, samples_per_prompt: 1, num_inference_steps: 5}",
    )  # fmt: skip
    config = trainer.config
    with Calls(trainer.engine.pipe.transformer) as calls:
        evaluate(trainer.engine, trainer.eval_prompts, trainer.scorer, config.eval, config.rollout)
    assert len(calls) == 5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rollout.steps_after_window=0",), "steps_after_window must be at least 1; got 0"),
        (
            (EDGE, "rollout.steps_after_window=9"),
            "steps_after_window has no effect where at most 9 steps follow the window; got 9; set 8 "
            "or less",
        ),
        (
            ("rollout.steps_after_window=3",),
            "no effect where at most 0 steps follow the window; got 3; set null",
        ),
        (
            ("rollout.window={type: all, exclude_last: true}", "rollout.steps_after_window=1"),
            "no effect where at most 1 steps follow the window; got 1; set null",
        ),
        (
            (
                "rollout.window={type: random, size: 2, start_min: 4}",
                "rollout.steps_after_window=4",
            ),
            "no effect where at most 4 steps follow the window; got 4; set 3 or less",
        ),
        (
            ("rollout.window={type: progressive, size: 4}", "rollout.steps_after_window=6"),
            "no effect where at most 6 steps follow the window; got 6; set 5 or less",
        ),
        (
            (
                "rollout.window={type: progressive, size: 4}", "rollout.steps_after_window=2",
                "rollout.sde_type=cps",
            ),
            "cps has no density in the last step 9, which ends at sigma 0",
        ),
        (
            (EDGE, "rollout.steps_after_window=3", "rollout.sampling={sigmas: [1.0, 0.5]}"),
            "steps_after_window cuts the pipeline's own schedule; got sampling.sigmas [1.0, 0.5] "
            "beside it; leave one of them out",
        ),
        (
            (
                EDGE, "rollout.steps_after_window=3", "rollout.sde_type=ode",
                "algorithm={type: diffusion_nft}",
            ),
            "steps_after_window: with sde_type ode no step is stochastic, and none comes after; got "
            "3; set null, and a smaller num_inference_steps",
        ),
        *(
            (
                (EDGE, "rollout.steps_after_window=2", f"model.pipeline={name}", *more),
                "rollout.steps_after_window: the schedule of this pipeline is its scheduler's, and a "
                "call cannot cut it; got 2; set null",
            )
            for name, more in (
                ("tiny-sd3", ()), ("tiny-sana", ()), ("tiny-wan", ()), ("tiny-wan2-2", ()),
                ("tiny-cosmos3", ("rollout.num_frames=5",)), ("tiny-minimax-h3", ()),
            )
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_without_a_model(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(trainers.build, "load_pipeline", None)
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, [], overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("scheduler", "config", "after", "message"),
    [
        (UniPCMultistepScheduler(), {}, 2, "needs FlowMatchEulerDiscreteScheduler; got UniPCMult"),
        (
            FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
            {},
            2,
            "would space all steps anew; got use_karras_sigmas true; set null",
        ),
        (
            FlowMatchEulerDiscreteScheduler(shift_terminal=0.02),
            {},
            1,
            "which a single step leaves out; got 1 with shift_terminal 0.02; set 2 or more",
        ),
        (
            FlowMatchEulerDiscreteScheduler(),
            {"sample_sigmas": [1.0, 0.5]},
            2,
            "a schedule of its own; got sample_sigmas [1.0, 0.5]; set null",
        ),
    ],
)
def test_a_loaded_pipeline_with_another_schedule_is_refused(
    scheduler: Any, config: dict[str, Any], after: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_schedule(SimpleNamespace(scheduler=scheduler, config=FrozenDict(config)), after)
    assert message in str(caught.value)


def test_the_loaded_pipeline_is_checked_before_a_prompt_is_encoded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.steps_after_window: the scheduler stretches"):
        tiny_trainer(tmp_path, EDGE, "rollout.steps_after_window=1")
