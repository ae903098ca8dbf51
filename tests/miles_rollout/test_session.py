"""A rollout changes nothing that it was not asked to, and holds what it says."""

import copy
import threading

import pytest
import torch
from diffusers import QwenImagePipeline

from miles_rollout import RolloutParams, RolloutParamsError, RolloutStateError, rollout
from miles_rollout.noise import keyed_noise
from miles_rollout.testing import tiny_qwen_image
from tests.miles_rollout.tiny import (
    ODE,
    PROMPTS,
    SEEDS,
    STEPS,
    Calls,
    assert_same,
    call,
    generators,
    run,
)

NOISY = RolloutParams()


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("output_type", ["latent", "pt"])
def test_a_deterministic_rollout_is_the_stock_call_bitwise(any_pipe, scale, output_type):
    stock = call(any_pipe, scale=scale, output_type=output_type)
    _, rolled = run(any_pipe, ODE, scale=scale, output_type=output_type)
    assert torch.equal(stock, rolled)
    assert stock.dtype == rolled.dtype


def test_the_stock_call_is_the_same_after_a_rollout(pipe):
    before = call(pipe)
    scheduler, sigmas, index = pipe.scheduler, pipe.scheduler.sigmas, pipe.scheduler.step_index
    _, noisy = run(pipe)
    assert pipe.scheduler is scheduler
    assert scheduler.sigmas is sigmas
    assert scheduler.step_index == index
    assert not torch.equal(before, noisy)
    assert torch.equal(before, call(pipe))


def test_the_pipeline_keeps_its_class_and_config_within_the_scope(pipe):
    config = dict(pipe.config)
    with rollout(pipe, NOISY, SEEDS) as session:
        assert isinstance(pipe, QwenImagePipeline)
        assert type(pipe).__name__ == "QwenImagePipeline"
        assert dict(pipe.config) == config
        call(pipe, generator=session.generators)
    assert type(pipe) is QwenImagePipeline


@pytest.mark.parametrize("step", [0, 2])
def test_an_exception_in_the_loop_leaves_nothing_behind(pipe, step):
    before = call(pipe)

    def fail(_, at, __, ___):
        if at == step:
            raise KeyError("in the middle")
        return {}

    with pytest.raises(KeyError, match="in the middle"), rollout(pipe, NOISY, SEEDS) as session:
        call(pipe, callback_on_step_end=fail)
    with pytest.raises(RolloutStateError, match="the trajectory is made when the scope ends"):
        _ = session.trajectory
    assert torch.equal(before, call(pipe))
    run(pipe)


def test_an_exception_in_the_denoiser_leaves_nothing_behind(pipe):
    def fail(*_):
        raise KeyError("in a hook")

    handle = pipe.transformer.register_forward_hook(fail)
    with pytest.raises(KeyError, match="in a hook"):
        run(pipe)
    handle.remove()
    run(pipe)


def test_two_rollouts_in_a_row_equal_separate_ones(pipe):
    first, second = run(pipe)[0], run(pipe, seeds=[13, 14])[0]
    for trajectory, seeds in ((first, SEEDS), (second, [13, 14])):
        again = run(copy.deepcopy(pipe), seeds=seeds)[0]
        assert torch.equal(trajectory.streams["image"].latents, again.streams["image"].latents)


def test_interleaved_rollouts_of_two_pipelines_equal_separate_ones(pipe):
    other, alone, results = copy.deepcopy(pipe), run(pipe)[0], []

    def interleave(_, step, __, ___):
        if step == 1:
            results.append(run(other, seeds=[13, 14])[0])
        return {}

    outer = run(pipe, callback_on_step_end=interleave)[0]
    inner = run(pipe, seeds=[13, 14])[0]
    assert_same(outer, alone)
    assert_same(results[0], inner)


def test_rollouts_of_two_pipelines_in_two_threads_equal_separate_ones(pipe):
    pipes = [copy.deepcopy(pipe) for _ in range(2)]
    results = [None, None]

    def work(i):
        results[i] = run(pipes[i], seeds=[20 + i, 30 + i])[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, result in enumerate(results):
        assert_same(result, run(pipe, seeds=[20 + i, 30 + i])[0])


# -- randomness -----------------------------------------------------------------------------------


def test_a_rollout_is_a_function_of_its_seeds(pipe):
    a, b, c = run(pipe)[0], run(pipe)[0], run(pipe, seeds=[11, 13])[0]
    latents = [t.streams["image"].latents for t in (a, b, c)]
    assert torch.equal(latents[0], latents[1])
    assert_same(a, b)
    assert torch.equal(latents[0][0], latents[2][0])
    assert not torch.equal(latents[0][1], latents[2][1])


def test_samples_with_other_seeds_differ_pairwise(pipe):
    prompts = ["a red circle"] * 4
    same = [torch.Generator().manual_seed(5) for _ in range(4)]
    trajectory, _ = run(pipe, seeds=[1, 2, 3, 4], prompts=prompts, generator=same)
    first, *_, last = trajectory.streams["image"].latents.unbind(1)
    for i in range(4):
        assert torch.equal(first[i], first[0])
        for j in range(i):
            assert not torch.equal(last[i], last[j])
            assert (trajectory.log_probs[i] != trajectory.log_probs[j]).all()


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1, 1)])
def test_noise_does_not_depend_on_the_batch(pipe, sizes):
    prompts, seeds = [*PROMPTS, "a yellow triangle", "x"], [1, 2, 3, 4]
    params = RolloutParams(debug=True)
    whole, _ = run(pipe, params, seeds=seeds, prompts=prompts)
    start, gens = 0, generators(4)
    for size in sizes:
        rows = slice(start, start + size)
        part, _ = run(pipe, params, seeds=seeds[rows], prompts=prompts[rows], generator=gens[rows])
        a, b = whole.streams["image"], part.streams["image"]
        assert torch.equal(a.debug["noise"][rows], b.debug["noise"])
        assert torch.equal(a.latents[rows, 0], b.latents[:, 0])
        torch.testing.assert_close(a.latents[rows], b.latents, atol=1e-5, rtol=0)
        start += size


def test_the_noise_of_a_step_is_the_keyed_noise_whatever_else_is_stochastic(pipe):
    for steps in ([2], [0, 2], None):
        params = RolloutParams(sde_step_indices=steps, debug=True)
        noise = run(pipe, params)[0].streams["image"].debug["noise"]
        assert torch.equal(
            noise[:, 2], keyed_noise(SEEDS, noise.shape[2:], "transition", "image", 2)
        )
        assert steps is None or not noise[:, 1].any()


def test_the_sessions_generators_differ_by_seed_and_repeat(pipe):
    with rollout(pipe, NOISY, [1, 2]) as session:
        call(pipe, generator=session.generators)
    first = session.trajectory.streams["image"].latents[:, 0]
    with rollout(pipe, NOISY, [2, 1]) as session:
        call(pipe, prompts=PROMPTS[::-1], generator=session.generators)
    assert torch.equal(session.trajectory.streams["image"].latents[:, 0], first.flip(0))
    assert not torch.equal(first[0], first[1])


# -- what it holds --------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_counts_agree(pipe, scale):
    with Calls(pipe.transformer) as calls:
        trajectory, _ = run(pipe, scale=scale)
    branches = 2 if scale > 1 else 1
    stream = trajectory.streams["image"]
    assert calls.rows == [2] * (STEPS * branches)
    assert len(stream.sigmas) - 1 == trajectory.log_probs.shape[1] == STEPS
    assert len(stream.timesteps) - 1 == stream.latents.shape[1] - 1 == STEPS
    recorded = {step: len(calls) for step, calls in trajectory.conditions[0].steps.items()}
    assert recorded == dict.fromkeys(range(STEPS), branches)
    assert trajectory.guidance == {"do_true_cfg": scale > 1, "true_cfg_scale": scale}


def test_first_and_last_latent(any_pipe):
    noise = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(3))
    noise = noise.to(any_pipe.transformer.dtype)
    trajectory, output = run(any_pipe, latents=noise, generator=None)
    latents = trajectory.streams["image"].latents
    assert torch.equal(latents[:, 0], noise)
    assert torch.equal(latents[:, -1], output)
    assert latents.dtype == noise.dtype


def test_the_schedule_is_the_schedulers(pipe):
    seen = []

    def look(pipe, *_):
        seen.append((pipe.scheduler.sigmas, pipe.scheduler.timesteps))
        return {}

    stream = run(pipe, callback_on_step_end=look)[0].streams["image"]
    sigmas, timesteps = seen[0]
    assert torch.equal(stream.sigmas, sigmas)
    assert torch.equal(stream.timesteps, torch.cat([timesteps, torch.zeros(1)]))


def test_a_single_step(pipe):
    single = copy.deepcopy(pipe)
    single.scheduler.register_to_config(shift_terminal=None)
    trajectory, output = run(single, num_inference_steps=1)
    assert trajectory.log_probs.shape == (2, 1)
    assert torch.isfinite(trajectory.log_probs).all()
    assert torch.equal(trajectory.streams["image"].latents[:, 1], output)


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
def test_a_schedule_that_is_not_a_number_is_refused(pipe):
    """diffusers stretches a schedule of one step onto its terminal sigma as 0 / 0."""
    with pytest.raises(RolloutParamsError, match=r"no step .* has a density: .* \(nan to 0\)"):
        run(pipe, num_inference_steps=1)


def test_a_single_row_given_as_a_string(pipe):
    with rollout(pipe, NOISY, [1]) as session:
        pipe("a red circle", num_inference_steps=2, height=32, width=32, generator=generators(1))
    assert session.trajectory.log_probs.shape == (1, 2)


def test_the_callers_own_sigmas(pipe):
    """The scheduler shifts them; a repeated one has no density and is left out."""
    trajectory, _ = run(pipe, num_inference_steps=4, sigmas=[1.0, 0.6, 0.6, 0.2])
    stream = trajectory.streams["image"]
    assert stream.sigmas[1] == stream.sigmas[2]
    assert stream.sde_step_indices == (0, 2, 3)
    assert (trajectory.log_probs[:, 1] == 0).all()
    with pytest.raises(RolloutParamsError, match=r"step 1 of 4 .* sigma does not fall"):
        run(pipe, RolloutParams(sde_step_indices=[1]), sigmas=[1.0, 0.6, 0.6, 0.2])


def test_nothing_kept(pipe):
    trajectory, output = run(pipe, RolloutParams(return_step_indices=[]))
    assert trajectory.streams["image"].latents.shape == (2, 0)
    assert trajectory.replayable_steps == ()
    full, expected = run(pipe)
    assert torch.equal(output, expected)
    assert torch.equal(trajectory.log_probs, full.log_probs)


def test_debug_tensors_tell_the_steps(pipe):
    stream = run(pipe, RolloutParams(sde_step_indices=[1], debug=True))[0].streams["image"]
    debug = stream.debug
    assert debug["velocity"].shape == debug["mean"].shape == debug["noise"].shape
    assert debug["std"].shape == (2, STEPS, 1, 1)
    rebuilt = debug["mean"] + debug["std"] * debug["noise"]
    torch.testing.assert_close(rebuilt, stream.latents[:, 1:])


def test_float32_state_under_a_bfloat16_pipeline(half_pipe):
    pipe = half_pipe
    trajectory, output = run(pipe, RolloutParams(latent_dtype="float32"))
    latents = trajectory.streams["image"].latents
    assert latents.dtype == torch.float32
    assert output.dtype == torch.bfloat16
    assert torch.equal(latents[:, -1].bfloat16(), output)
    assert not torch.equal(latents, latents.bfloat16().float())


def test_inference_mode_changes_nothing_and_leaves_trainable_tensors(pipe):
    plain = run(pipe)[0]
    with torch.inference_mode():
        inside = run(pipe)[0]
    assert_same(plain, inside)
    tensors = [inside.streams["image"].latents, inside.log_probs]
    inside.conditions[0].map(tensors.append)
    assert not any(t.is_inference() or t.requires_grad for t in tensors)


def test_a_float64_state_mixes_with_deterministic_steps(pipe):
    double = copy.deepcopy(pipe).to(torch.float64)
    trajectory, _ = run(double, RolloutParams(sde_step_indices=[1]))
    assert trajectory.streams["image"].latents.dtype == torch.float64
    assert trajectory.replayable_steps == (1,)


def test_the_default_dtype_changes_nothing(pipe):
    params = RolloutParams(sde_step_indices=[1])
    plain = run(pipe, params)[0].streams["image"]
    torch.set_default_dtype(torch.float64)
    try:
        other = run(pipe, params)[0].streams["image"]
    finally:
        torch.set_default_dtype(torch.float32)
    for name in ("latents", "log_probs", "timesteps"):
        a, b = getattr(plain, name), getattr(other, name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_stock_call_of_a_sharing_pipeline_is_never_recorded_as_ours(pipe, when):
    sharing = QwenImagePipeline.from_pipe(pipe)
    sharing.set_progress_bar_config(disable=True)

    def other(*_):
        call(sharing)
        return {}

    if when == "inside":
        with pytest.raises(RolloutStateError):
            run(pipe, callback_on_step_end=other)
        return
    with rollout(pipe, NOISY, SEEDS) as session:
        other()
        call(pipe)
    assert_same(session.trajectory, run(pipe)[0])


def test_a_subclassed_pipeline(pipe):
    class Mine(QwenImagePipeline):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    mine = Mine(**pipe.components)
    mine.set_progress_bar_config(disable=True)
    assert torch.equal(call(mine), run(mine, ODE)[1])
    assert type(mine) is Mine


def test_return_dict_is_honoured(pipe):
    with rollout(pipe, NOISY, [1]) as session:
        output = pipe(
            ["a"], num_inference_steps=2, height=32, width=32, generator=generators(1),
            output_type="latent", return_dict=False,
        )  # fmt: skip
    assert isinstance(output, tuple)
    assert torch.equal(output[0], session.trajectory.streams["image"].latents[:, -1])


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_denoiser_is_recorded_all_the_same(whole):
    pipe = tiny_qwen_image()
    plain = run(pipe)[0]
    if whole:
        pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    else:
        pipe.transformer.compile(backend="eager")
    try:
        compiled = run(pipe)[0]
    finally:
        torch._dynamo.reset()
    assert {s: len(c) for s, c in compiled.conditions[0].steps.items()} == dict.fromkeys(
        range(4), 1
    )
    torch.testing.assert_close(compiled.log_probs, plain.log_probs)


def test_a_subclass_that_hands_its_arguments_on_is_seen_with_names_and_defaults(pipe):
    class Handing(type(pipe)):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    class Naming(type(pipe)):
        def __call__(self, prompt, **kwargs):
            return super().__call__(prompt, **kwargs)

    arguments = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "latent"}
    for cls in (Handing, Naming):
        other = cls(**pipe.components)
        other.set_progress_bar_config(disable=True)
        with rollout(other, NOISY, SEEDS) as session:
            other(PROMPTS, generator=generators(), **arguments)
        assert session.trajectory.guidance == {"do_true_cfg": False, "true_cfg_scale": 1.0}
        with (
            pytest.raises(RolloutParamsError, match="num_images_per_prompt"),
            rollout(other, NOISY, SEEDS),
        ):
            other(PROMPTS, generator=generators(), num_images_per_prompt=2, **arguments)
