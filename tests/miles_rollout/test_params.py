"""What a rollout may be asked to do, and what the refusals say."""

import dataclasses
import math

import pytest
import torch

from miles_rollout import RolloutParams, RolloutParamsError

L4 = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])


def params(**kwargs):
    # The wrong types of this file must reach the checks of production.
    unchecked = getattr(RolloutParams.__init__, "__wrapped__", RolloutParams.__init__)
    made = object.__new__(RolloutParams)
    unchecked(made, **kwargs)
    return made


def steps(sigmas=L4, stream="image", **kwargs):
    return params(**kwargs).plan(torch.as_tensor(sigmas), stream).sde_steps


def test_every_step_is_stochastic_unless_told_otherwise():
    plan = RolloutParams().plan(L4, "image")
    assert plan == (4, (0, 1, 2, 3), (0, 1, 2, 3, 4), ())
    assert plan.replayable == (0, 1, 2, 3)


def test_every_step_means_every_step_with_a_density():
    assert steps(sde_type="cps") == (0, 1, 2)
    assert steps([1.0, 0.5, 0.5, 0.0]) == (0, 2)


def test_a_schedule_without_any_density_is_refused():
    with pytest.raises(RolloutParamsError, match="no step of stream 'image' has a density: cps"):
        steps([1.0, 0.0], sde_type="cps")


def test_one_step_schedules_work():
    assert steps([1.0, 0.0]) == (0,)


def test_no_indices_mean_no_stochastic_step():
    for nothing in ([], ()):
        assert steps(sde_step_indices=nothing) == ()
        assert params(sde_step_indices=nothing).is_deterministic
    assert params(sde_type="ode").plan(L4, "image").sde_steps == ()


def test_order_and_container_do_not_matter():
    expected = (0, 2)
    for given in ([0, 2], [2, 0], (2, 0), range(0, 4, 2), (i for i in (2, 0)), {0, 2}):
        assert steps(sde_step_indices=given) == expected
    assert params(sde_step_indices=[2, 0]).plan(L4, "image").replayable == expected


def test_calls_are_kept_of_replayable_steps_and_of_those_that_are_named():
    plan = params(sde_step_indices=[0, 2], return_step_indices=[2, 3], call_step_indices=(3, 2))
    made = plan.plan(L4, "image")
    assert (made.replayable, made.recorded) == ((2,), (2, 3))
    deterministic = params(sde_type="ode", return_step_indices=[4], call_step_indices={1})
    assert deterministic.plan(L4, "image").recorded == (1,)
    other = params(sde_streams=["audio"], call_step_indices=[0]).plan(L4, "video")
    assert (other.sde_steps, other.recorded) == ((), (0,))
    assert params().call_step_indices == ()


def test_kept_boundaries_reach_the_final_latent():
    plan = RolloutParams(sde_step_indices=[2], return_step_indices=[4, 2]).plan(L4, "image")
    assert plan.boundaries == (2, 4)
    assert plan.replayable == ()
    assert RolloutParams(return_step_indices=[]).plan(L4, "image").boundaries == ()


def test_streams_that_are_not_named_are_deterministic():
    assert steps(sde_streams=["video"], stream="video") == (0, 1, 2, 3)
    assert steps(sde_streams=["video"], stream="audio") == ()
    assert params(sde_streams=[]).is_deterministic


def test_later_changes_to_what_was_given_do_not_matter():
    indices, weights = [1, 2], {"video": 1.0}
    made = RolloutParams(sde_step_indices=indices, stream_weights=weights)
    indices.append(3)
    weights["audio"] = 1.0
    assert made.sde_step_indices == (1, 2)
    assert made.stream_weights == {"video": 1.0}


def test_params_are_frozen_and_equal_by_value():
    assert RolloutParams(sde_step_indices=[1]) == RolloutParams(sde_step_indices=(1,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        RolloutParams().noise_level = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"sde_step_indices": [4]},
            r"RolloutParams.sde_step_indices: index 4 is out of range: this request has 4 steps; "
            r"got \[4\]; set indices in 0..3",
        ),
        ({"sde_step_indices": [-1]}, r"index -1 is out of range.*set indices in 0..3"),
        (
            {"return_step_indices": [5]},
            r"RolloutParams.return_step_indices: index 5 is out of range: this request has 5 "
            r"boundaries; got \[5\]; set indices in 0..4",
        ),
        ({"return_step_indices": [-1]}, "index -1 is out of range"),
        (
            {"call_step_indices": [4]},
            r"RolloutParams.call_step_indices: index 4 is out of range: this request has 4 steps; "
            r"got \[4\]; set indices in 0..3",
        ),
        (
            {"sde_type": "ode", "call_step_indices": [0, 7]},
            "call_step_indices: index 7 is out of range",
        ),
        ({"call_step_indices": [-1]}, "call_step_indices: index -1 is out of range"),
        ({"call_step_indices": [2, 2]}, "call_step_indices: index 2 is given twice"),
        ({"call_step_indices": [True]}, "call_step_indices: index True is not an int"),
        ({"call_step_indices": 1}, "call_step_indices: must be a list; got 1"),
        ({"sde_step_indices": [1, 1]}, r"index 1 is given twice; got \(1, 1\); set each index"),
        ({"return_step_indices": [0, 0]}, "index 0 is given twice"),
        ({"sde_step_indices": [True]}, "index True is not an int"),
        ({"sde_step_indices": [1.0]}, "index 1.0 is not an int"),
        ({"return_step_indices": ["1"]}, "index '1' is not an int"),
        ({"sde_step_indices": torch.tensor([1])}, "is not an int"),
        ({"sde_step_indices": 3}, "sde_step_indices: must be a list; got 3"),
        ({"sde_step_indices": "12"}, "must be a list; got '12'"),
        ({"sde_streams": "video"}, "sde_streams: must be a list; got 'video'"),
        ({"sde_type": "flow"}, "unknown kind; got 'flow'; set one of ode, sde, cps, dance_sde"),
        ({"sde_type": "ode", "sde_step_indices": [1]}, "an ode rollout has no stochastic step"),
        ({"sde_type": "ode", "sde_streams": ["image"]}, "an ode rollout has no stochastic step"),
        ({"noise_level": 0}, "a stochastic step without noise has no density"),
        ({"noise_level": -1.0}, "must be finite and >= 0; got -1.0"),
        ({"noise_level": math.nan}, "must be finite"),
        ({"noise_level": math.inf}, "must be finite"),
        ({"noise_level": True}, "noise_level: must be a number; got True"),
        ({"noise_level": "0.7"}, "noise_level: must be a number; got '0.7'"),
        ({"sde_type": "cps", "noise_level": 1.1}, "cps keeps the coefficients only up to 1"),
        (
            {"sde_type": "cps", "sde_step_indices": [1, 3]},
            r"step 3 of 4 of stream 'image' has no density: cps has std 0 onto the terminal sigma "
            r"0; got \[1, 3\]; set steps among \[0, 1, 2\]",
        ),
        ({"latent_dtype": "bfloat16"}, 'unknown; got \'bfloat16\'; set "pipeline" or "float32"'),
        ({"stream_weights": "mean"}, "stream_weights: unknown; got 'mean'"),
        ({"stream_weights": {"audio": math.nan}}, "weight of 'audio' is not a finite number"),
        ({"stream_weights": {"audio": "1"}}, "weight of 'audio' is not a finite number"),
        ({"stream_weights": {}}, "stream_weights: no weights; got {}"),
    ],
)
def test_mistakes_are_refused(kwargs, message):
    with pytest.raises(RolloutParamsError, match=message):
        steps(**kwargs)


def test_a_step_that_does_not_move_has_no_density():
    message = r"step 1 of 3 .* sigma does not fall \(0.5 to 0.5\); .* set steps among \[0, 2\]"
    with pytest.raises(RolloutParamsError, match=message):
        steps([1.0, 0.5, 0.5, 0.0], sde_step_indices=[1])


def test_a_repeated_first_sigma_leaves_no_density_at_1():
    repeated = [1.0, 1.0, 0.5, 0.0]
    assert steps(repeated) == (2,)
    assert steps(repeated, sde_type="dance_sde") == (1, 2)
    with pytest.raises(RolloutParamsError, match="infinite std at sigma 1 after the first step"):
        steps(repeated, sde_step_indices=[1])


def test_noise_level_0_is_fine_where_no_step_is_stochastic():
    assert steps(noise_level=0, sde_step_indices=()) == ()
    assert steps(noise_level=0.0, sde_type="ode") == ()
