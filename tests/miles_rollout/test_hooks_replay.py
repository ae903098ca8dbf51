"""What a loop of one's own keeps for its replay, and the score of what its denoiser predicts then."""

import pytest
import torch

from miles_rollout import RolloutEngine, RolloutParams, RolloutParamsError, RolloutStateError
from miles_rollout.hooks import (
    abort_rollout_if_enabled,
    finalize_rollout_if_enabled,
    init_rollout_env_if_enabled,
)
from tests.miles_rollout.tiny_loop import noise, prepared, scheduler, steps

# -- conditions -----------------------------------------------------------------------------------


def finished(**env):
    request, drive = {}, scheduler()
    prepared(request, schedulers={"image": drive})
    if env:
        init_rollout_env_if_enabled(request, **env)
    *_, _ = steps(request, drive, noise())
    return finalize_rollout_if_enabled(request)


def test_conditions_are_cut_by_the_axes_that_are_declared():
    rope = noise(5, 2, 3)  # two positions, not two samples
    embeds = noise(6, 7, 2, 3)
    trajectory = finished(
        conditions={"embeds": embeds, "rope": rope, "sizes": [[8], [9]], "scale": 3.5},
        batch_axes={"embeds": 1, "rope": None},
    )
    kept = trajectory.select([1]).conditions[0].steps[0][0].kwargs
    assert torch.equal(kept["embeds"], embeds[:, 1:])
    assert torch.equal(kept["rope"], rope)
    assert (kept["sizes"], kept["scale"]) == ([[9]], 3.5)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"conditions": {"rope": noise(5, 7, 3)}}, r"axis 0 of 'rope' should hold 2 rows; got shape"),
        ({"conditions": {"sizes": [1, 2, 3]}}, r"axis 0 of 'sizes' .*; got shape \(3,\); pass batch_"),
        (
            {"conditions": {"e": noise()}, "batch_axes": {"e": 2}},
            r"axis 2 of 'e' should hold 2 rows; got shape \(2, 6\)",
        ),
        ({"conditions": {"e": noise()}, "batch_axes": {"f": 0}}, "no condition; got 'f'; choose am"),
        ({"conditions": {"e": object()}}, "'e' cannot be recorded for replay; got a object"),
    ],
)  # fmt: skip
def test_conditions_without_a_row_for_each_sample(env, message):
    request = prepared()
    with pytest.raises(RolloutParamsError, match=message):
        init_rollout_env_if_enabled(request, **env)


def test_conditions_are_kept_once_and_own_their_storage():
    request = prepared()
    embeds = noise(6)
    init_rollout_env_if_enabled(request, {"embeds": embeds})
    with pytest.raises(
        RolloutStateError, match="already kept; got a second call; pass all of them"
    ):
        init_rollout_env_if_enabled(request, {"mask": embeds})
    abort_rollout_if_enabled(request)
    trajectory = finished(conditions={"embeds": embeds})
    before = embeds.clone()
    embeds.zero_()
    kept = [calls[0].kwargs["embeds"] for calls in trajectory.conditions[0].steps.values()]
    assert all(torch.equal(tensor, before) for tensor in kept)
    assert len({id(tensor) for tensor in kept}) == 1


def test_the_engine_says_that_a_loops_conditions_are_no_denoiser_calls(pipe):
    trajectory = finished(conditions={"embeds": noise(6)})
    with pytest.raises(
        RolloutParamsError, match=r"name no denoiser; .* then RolloutTrajectory.score"
    ):
        RolloutEngine(pipe).replay(trajectory, 1)


# -- scoring --------------------------------------------------------------------------------------


def test_the_recorded_velocity_scores_the_recorded_log_prob_bitwise():
    request, drive = {}, scheduler()
    params = RolloutParams(debug=True, sde_step_indices=[0, 2])
    prepared(request, params, schedulers={"image": drive})
    *_, _ = steps(request, drive, noise())
    trajectory = finalize_rollout_if_enabled(request)
    held = trajectory.streams["image"]
    for step in (0, 2):
        velocity = held.debug["velocity"][:, step].requires_grad_()
        replay = trajectory.score(step, {"image": velocity})
        assert torch.equal(replay.log_prob, trajectory.log_probs[:, step])
        assert torch.equal(replay.streams["image"].mean, held.debug["mean"][:, step])
        (gradient,) = torch.autograd.grad(replay.log_prob.sum(), velocity)
        assert gradient.abs().min() > 0


@pytest.mark.parametrize(
    ("step", "velocities", "message"),
    [
        (1, {"image": noise()}, r"step 1 has the stochastic streams \[\]; got velocities of \['im"),
        (0, {}, r"step 0 has the stochastic streams \['image'\]; got velocities of \[\]; score a"),
        (0, {"video": noise()}, r"no such stream; got 'video'; choose among \['image'\]"),
        (0, {"image": noise(1, 2, 1)}, r"velocity must have the sample's shape \(2, 6\)"),
        (0, {"image": noise() * float("inf")}, "log-prob of step 0 is not finite; got"),
    ],
)
def test_scores_that_mean_nothing_are_refused(step, velocities, message):
    request, drive = {}, scheduler()
    prepared(request, RolloutParams(sde_step_indices=[0]), schedulers={"image": drive})
    *_, _ = steps(request, drive, noise())
    trajectory = finalize_rollout_if_enabled(request)
    with pytest.raises((RolloutParamsError, RolloutStateError), match=message):
        trajectory.score(step, velocities)
