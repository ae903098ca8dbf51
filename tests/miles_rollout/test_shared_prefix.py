"""What is shared, when it is let go, and what is refused; the families are in `test_models`."""

import inspect

import pytest
import torch

from miles_rollout import RolloutParams, RolloutParamsError, RolloutStateError, rollout
from miles_rollout.shared_prefix import SharedPrefix
from tests.miles_rollout.tiny import (
    CFG,
    PROMPTS,
    SEEDS,
    STEPS,
    Calls,
    assert_same,
    call,
    generate,
    generators,
)

LATE = RolloutParams(sde_step_indices=[2])


def shared(pipe, prefix, params=LATE, seed=0, **kwargs):
    with rollout(pipe, params, SEEDS, prefix=prefix) as session:
        call(pipe, generator=generators(seed=seed), **kwargs)
    return session.trajectory


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"same_noise": False}, "needs samples that start from one noise; got same_noise=False"),
        ({"chunk_size": 3}, "chunks of the same prompts; got chunk_size 3 for 2 prompts; set a ch"),
        ({"chunk_size": 4}, "chunks of the same prompts; got chunk_size 4 for 2 prompts"),
    ],
)
def test_what_cannot_be_shared_is_refused(pipe, arguments, message):
    how = {"same_noise": True, "share_prefix": True} | arguments
    with Calls(pipe.transformer) as calls, pytest.raises(RolloutParamsError, match=message):
        generate(pipe, group_size=2, **how)
    assert not calls


@pytest.mark.parametrize("chunk_size", [1, 2])
def test_prompts_times_window_plus_samples_times_the_rest(pipe, chunk_size):
    """P w + P G (T - w) denoiser samples, guidance on: two of them a sample."""
    with Calls(pipe.transformer) as calls:
        generate(
            pipe, group_size=4, params=LATE, chunk_size=chunk_size, same_noise=True,
            share_prefix=True, **CFG,
        )  # fmt: skip
    assert sum(calls.rows) == 2 * (2 * 2 + 2 * 4 * (STEPS - 2))


def test_answers_are_held_for_the_steps_before_noise_and_no_others(pipe):
    prefix = SharedPrefix()
    assert prefix.nbytes == 0
    trajectory = shared(pipe, prefix)
    state = trajectory.streams["image"].latent(0)
    assert prefix.nbytes == 2 * state.nbytes
    assert prefix.complete


def test_an_interrupted_rollout_leaves_nothing_to_share(pipe):
    prefix = SharedPrefix()

    def stop(pipe, step, timestep, kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shared(pipe, prefix, seed=1, callback_on_step_end=stop)
    assert not prefix.complete
    for _ in range(2):  # fills it, then is answered
        assert_same(shared(pipe, prefix), shared(pipe, None))


def test_another_start_another_schedule_and_other_guidance_are_refused(pipe):
    prefix = SharedPrefix()
    shared(pipe, prefix)
    for different in ({"seed": 1}, {"prompts": PROMPTS[::-1]}):
        with pytest.raises(RolloutStateError, match="do not start as those that filled"):
            shared(pipe, prefix, **different)
    with pytest.raises(RolloutStateError, match="step 0 makes other denoiser calls"):
        shared(pipe, prefix, scale=3.0)
    with pytest.raises(RolloutStateError, match="step 2 makes other denoiser calls"):
        shared(pipe, prefix, RolloutParams(sde_step_indices=[3]))
    assert type(pipe.transformer).__call__ is torch.nn.Module.__call__


def test_an_earlier_window_uses_the_part_it_shares(pipe):
    prefix = SharedPrefix()
    shared(pipe, prefix)
    params = RolloutParams(sde_step_indices=[1])
    with Calls(pipe.transformer) as calls:
        ours = shared(pipe, prefix, params)
    assert len(calls) == STEPS - 1
    assert_same(ours, shared(pipe, None, params))


def test_a_pipeline_may_write_into_what_it_got():
    """Into the first answer, which is kept, and into a later one, which is asked for again."""
    with torch.random.fork_rng():
        prefix, layer = SharedPrefix(), torch.nn.Linear(2, 2)
    x = torch.ones(1, 2)
    expected = layer(x).detach()
    for _ in range(3):
        with torch.no_grad(), prefix.over({"transformer": layer}, lambda *_: 0):
            got = layer(x)
        assert torch.equal(got, expected)
        got.zero_()


def test_the_signature_that_pipelines_inspect_stays(pipe):
    before = inspect.signature(pipe.transformer.forward)
    seen = []

    def look(pipe, step, timestep, kwargs):
        seen.append((inspect.signature(pipe.transformer.forward), type(pipe.transformer).__name__))
        return kwargs

    shared(pipe, SharedPrefix(), callback_on_step_end=look)
    assert seen == [(before, "QwenImageTransformer2DModel")] * STEPS
