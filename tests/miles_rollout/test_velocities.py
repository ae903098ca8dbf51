"""The denoiser called again as it was, on other states; and the means that a rollout can keep."""

from dataclasses import replace

import pytest
import torch

from miles_rollout import RolloutEngine, RolloutParams, RolloutParamsError, RolloutTrajectory
from miles_rollout.conditions import StreamState
from miles_rollout.testing import tiny_sd3
from tests.miles_rollout.tiny import CFG, STEPS, generate

ODE = RolloutParams(sde_type="ode", call_step_indices=[0, 1, 3], debug=True)
FINAL = RolloutParams(sde_type="ode", return_step_indices=[STEPS], call_step_indices=[0, 2])


@pytest.mark.parametrize("guidance", [{}, CFG], ids=["plain", "guided"])
def test_on_the_recorded_states_it_is_the_recorded_velocity(any_pipe, guidance):
    (batch,) = generate(any_pipe, params=ODE, **guidance)
    trajectory, engine = batch.trajectory, RolloutEngine(any_pipe)
    stream = trajectory.streams["image"]
    assert (trajectory.call_steps, trajectory.replayable_steps) == ((0, 1, 3), ())
    for step in trajectory.call_steps:
        with torch.no_grad():
            got = engine.velocities(trajectory, step, {"image": stream.latent(step)})["image"]
        # Of an ODE nothing is scored: what the scheduler made of it tells what it was.
        change = (stream.latent(step + 1) - stream.latent(step)).float()
        expected = (stream.sigmas[step + 1] - stream.sigmas[step]) * got.float()
        near = (
            {"rtol": 1e-4, "atol": 1e-5}
            if got.dtype == torch.float32
            else {"rtol": 1, "atol": 0.05}
        )
        torch.testing.assert_close(change, expected, **near)
        assert (change - expected).abs().mean() < (change + expected).abs().mean() / 10


def test_beside_stochastic_steps_it_is_that_velocity_to_the_bit(any_pipe):
    params = RolloutParams(sde_step_indices=[1], call_step_indices=[2], debug=True)
    (batch,) = generate(any_pipe, params=params)
    trajectory, engine = batch.trajectory, RolloutEngine(any_pipe)
    assert (trajectory.call_steps, trajectory.replayable_steps) == ((1, 2), (1,))
    stream = trajectory.streams["image"]
    states = {"image": stream.latent(1)}
    with torch.no_grad():
        got = engine.velocities(trajectory, 1, states)["image"]
    assert torch.equal(got.float(), stream.debug["velocity"][:, 1])
    assert torch.equal(got, engine.replay(trajectory, 1).streams["image"].velocity)
    with torch.no_grad():
        other = engine.velocities(trajectory, 1, {"image": stream.latent(1) + 0.5})["image"]
    assert not torch.equal(got, other)


def test_rows_and_joined_rollouts_keep_their_prompts(pipe):
    engine = RolloutEngine(pipe)
    parts = generate(engine, params=FINAL, group_size=2, chunk_size=2)
    joined = RolloutTrajectory.cat([p.trajectory for p in parts])
    states = torch.randn(4, *joined.streams["image"].latents.shape[2:], generator=_generator())
    with torch.no_grad():
        whole = engine.velocities(joined, 2, {"image": states})["image"]
        for i, part in enumerate(parts):
            rows = slice(2 * i, 2 * i + 2)
            alone = engine.velocities(part.trajectory, 2, {"image": states[rows]})["image"]
            assert torch.equal(whole[rows], alone)
        cut = engine.velocities(joined.select([3]), 2, {"image": states[3:]})["image"]
    torch.testing.assert_close(cut, whole[3:], rtol=1e-4, atol=1e-5)


def _generator():
    return torch.Generator().manual_seed(4)


def test_gradients_reach_the_states(pipe):
    (batch,) = generate(pipe, params=FINAL)
    states = torch.zeros_like(batch.latents["image"]).requires_grad_()
    RolloutEngine(pipe).velocities(batch.trajectory, 0, {"image": states})["image"].sum().backward()
    assert states.grad is not None
    assert states.grad.abs().sum() > 0


def test_an_ode_rollout_can_keep_its_calls_and_its_last_latent_alone(pipe, tmp_path):
    (batch,) = generate(pipe, params=FINAL)
    trajectory = batch.trajectory
    stream = trajectory.streams["image"]
    assert stream.latent_step_indices.tolist() == [STEPS]
    assert torch.equal(stream.latents[:, 0], batch.latents["image"])
    assert trajectory.call_steps == (0, 2)
    for step in (0, 2):
        (call,) = trajectory.conditions[0].steps[step]
        assert isinstance(call.kwargs["hidden_states"], StreamState)
    (whole,) = generate(pipe, params=replace(FINAL, return_step_indices=None))
    more = whole.trajectory.streams["image"].latents.nbytes - stream.latents.nbytes
    assert whole.trajectory.nbytes - trajectory.nbytes >= more > 0
    trajectory.save(tmp_path)
    loaded = RolloutTrajectory.load(tmp_path)
    assert loaded.params == FINAL
    assert loaded.call_steps == (0, 2)


def test_the_kept_calls_change_no_bit_of_a_rollout(pipe):
    (plain,) = generate(pipe, params=RolloutParams(sde_step_indices=[1]))
    keeping = RolloutParams(sde_step_indices=[1], call_step_indices=[0, 3], return_means=True)
    (batch,) = generate(pipe, params=keeping)
    assert torch.equal(batch.latents["image"], plain.latents["image"])
    assert torch.equal(batch.trajectory.log_probs, plain.trajectory.log_probs)


def test_what_cannot_be_called_again_is_refused(pipe):
    (batch,) = generate(pipe, params=FINAL)
    trajectory, engine = batch.trajectory, RolloutEngine(pipe)
    state = batch.latents["image"]
    with pytest.raises(
        RolloutParamsError,
        match=r"velocities: the calls of step 1 were not kept; got those of \[0, 2\]; add 1 to call_st",
    ):
        engine.velocities(trajectory, 1, {"image": state})
    with pytest.raises(
        RolloutParamsError, match=r"needs a state of every row .*; pass \['image'\], "
    ):
        engine.velocities(trajectory, 0, {"image": state[:1]})
    with pytest.raises(RolloutParamsError, match=r"each with 2 rows"):
        engine.velocities(trajectory, 0, {"image": state, "audio": state})
    with pytest.raises(RolloutParamsError, match=r"needs a state of every row for each stream"):
        engine.velocities(trajectory, 0, {})


def test_a_call_that_holds_something_made_of_the_state_is_refused():
    """Guidance in one call doubles the latent; without it the call holds the latent itself."""
    engine = RolloutEngine(tiny_sd3())
    (batch,) = generate(engine, params=FINAL, negative_prompt=" ", guidance_scale=3.0)
    with pytest.raises(
        RolloutParamsError,
        match=r"not called with the state itself of image, but .* got calls of StableDiffusion3Pipeli",
    ):
        engine.velocities(batch.trajectory, 0, dict(batch.latents))
    (plain,) = generate(engine, params=FINAL)
    with torch.no_grad():
        got = engine.velocities(plain.trajectory, 0, dict(plain.latents))
    assert got["image"].shape == plain.latents["image"].shape


# -- means ----------------------------------------------------------------------------------------


def test_the_means_of_replayable_steps_are_kept_where_asked_for(any_pipe, tmp_path):
    params = RolloutParams(
        sde_step_indices=[0, 1, 3], return_step_indices=[1, 2, 3, 4], return_means=True, debug=True
    )
    (batch,) = generate(any_pipe, params=params, group_size=2, chunk_size=4)
    trajectory = batch.trajectory
    stream = trajectory.streams["image"]
    assert sorted(stream.means) == [1, 3], "step 0 cannot be replayed: its state was not kept"
    for step, mean in stream.means.items():
        assert torch.equal(mean, stream.debug["mean"][:, step])
        replay = RolloutEngine(any_pipe).replay(trajectory, step)
        assert torch.equal(mean, replay.streams["image"].mean)
    trajectory.save(tmp_path)
    loaded = RolloutTrajectory.load(tmp_path).streams["image"].means
    assert loaded.keys() == stream.means.keys()
    assert all(torch.equal(loaded[step], mean) for step, mean in stream.means.items())
    cut = trajectory.select([2, 1])
    assert torch.equal(cut.streams["image"].means[3], stream.means[3][[2, 1]])
    joined = RolloutTrajectory.cat([cut, trajectory.select([0])]).streams["image"].means
    assert torch.equal(joined[1], stream.means[1][[2, 1, 0]])
    without = replace(trajectory, streams={"image": replace(stream, means={})})
    assert trajectory.nbytes - without.nbytes == sum(m.nbytes for m in stream.means.values())


def test_no_means_are_kept_unless_asked_for(pipe):
    (batch,) = generate(pipe, params=RolloutParams(sde_step_indices=[1]))
    assert not batch.trajectory.streams["image"].means
