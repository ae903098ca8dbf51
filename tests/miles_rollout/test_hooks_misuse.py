"""What an author of another framework gets wrong with the hooks, and what the hooks say to it."""

import dataclasses
import inspect
import threading
from types import MappingProxyType, SimpleNamespace

import pydantic
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from miles_rollout import (
    FlowRolloutController,
    RolloutParams,
    RolloutParamsError,
    RolloutStateError,
)
from miles_rollout.hooks import (
    Sharding,
    abort_rollout_if_enabled,
    accept_transition,
    finalize_rollout_if_enabled,
    init_rollout_env_if_enabled,
    prepare_rollout_if_enabled,
    rollout_step_kwargs,
)
from tests.miles_rollout.tiny import assert_same
from tests.miles_rollout.tiny_loop import PARAMS, SEEDS, noise, prepared, scheduler, steps, stock

SIGMAS = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])


def alone(seed):
    request, drive = {}, scheduler()
    prepared(request, schedulers={"image": drive})
    *_, final = steps(request, drive, noise(seed))
    return final, finalize_rollout_if_enabled(request)


def build(params, seeds):
    made = FlowRolloutController(params, seeds, stream="video", sigmas=SIGMAS, timesteps=1 - SIGMAS)
    return {"video": made}


# -- requests -------------------------------------------------------------------------------------


def test_interleaved_requests_are_what_each_is_alone():
    loops = []
    for seed in (0, 1, 2):
        request, drive = {}, scheduler()
        prepared(request, schedulers={"image": drive})
        loops.append((seed, request, steps(request, drive, noise(seed))))
    finals = {}
    for _ in range(4):
        for seed, _, loop in loops:
            finals[seed] = next(loop)
    for seed, request, _ in loops:
        final, trajectory = alone(seed)
        mine = finalize_rollout_if_enabled(request)
        assert torch.equal(finals[seed], final)
        assert_same(mine, trajectory)
        assert torch.equal(mine.streams["image"].latents, trajectory.streams["image"].latents)


def test_interleaved_requests_on_one_scheduler_are_refused():
    drive = scheduler()
    first, second = ({}, {})
    for request in (first, second):
        prepared(request, schedulers={"image": drive})
    loops = [steps(request, drive, noise()) for request in (first, second)]
    next(loops[0])
    with pytest.raises(RolloutStateError, match="expected step 0; got step 1; take every step"):
        next(loops[1])


def test_a_schedule_that_another_request_set_is_refused():
    drive = scheduler()
    request = prepared(schedulers={"image": drive})
    drive.set_timesteps(4)  # the same values: no harm
    assert torch.equal([*steps(request, drive, noise())][-1], alone(0)[0])
    abort_rollout_if_enabled(request)
    drive.set_timesteps(4)
    request = prepared(schedulers={"image": drive})
    drive.set_timesteps(5)
    with pytest.raises(RolloutStateError, match="stream 'image' was set again after prepare_"):
        next(steps(request, drive, noise()))


@pytest.mark.parametrize("make", [dict, SimpleNamespace, lambda: type("Request", (), {})()])
def test_a_request_can_be_used_again_and_is_left_as_it_was(make):
    request = make()
    before = dict(request if isinstance(request, dict) else vars(request))
    for _ in range(2):
        drive = scheduler()
        prepared(request, schedulers={"image": drive})
        *_, final = steps(request, drive, noise())
        assert torch.equal(final, alone(0)[0])
        assert finalize_rollout_if_enabled(request).num_samples == 2
    assert (request if isinstance(request, dict) else vars(request)) == before
    assert finalize_rollout_if_enabled(request) is None


def test_after_an_exception_the_request_is_free_again():
    def loop(request):
        drive = scheduler()
        prepared(request, schedulers={"image": drive})
        try:
            taken = steps(request, drive, noise())
            next(taken)
            if fails:
                raise KeyError("out of memory")
            *_, final = taken
            return final, finalize_rollout_if_enabled(request)
        finally:
            abort_rollout_if_enabled(request)

    request = {}
    fails = True
    with pytest.raises(KeyError, match="out of memory"):
        loop(request)
    assert request == {}
    fails = False
    final, trajectory = loop(request)
    assert torch.equal(final, alone(0)[0])
    assert trajectory.num_samples == 2
    abort_rollout_if_enabled(request)
    abort_rollout_if_enabled(object())


def test_a_request_that_an_exception_left_in_a_rollout_says_how_to_free_it():
    request = prepared()
    with pytest.raises(RolloutStateError, match=r"already in a rollout.*abort_rollout_if_enabled"):
        prepared(request)
    with pytest.raises(RolloutStateError, match="interrupted after 0 of 4 steps"):
        finalize_rollout_if_enabled(request)
    assert request == {}


@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str = "a"


@dataclasses.dataclass
class Slotted:
    __slots__ = ("name",)


class Strict(pydantic.BaseModel):
    name: str = "a"


@pytest.mark.parametrize(
    "request_", [Frozen(), Slotted(), Strict(), MappingProxyType({}), (), None], ids=repr
)
def test_a_request_that_can_hold_nothing_is_refused_and_fine_without_a_rollout(request_):
    with pytest.raises(RolloutStateError, match=r"must hold its rollout, and a \w+ takes no attr"):
        prepare_rollout_if_enabled(request_, PARAMS, SEEDS, schedulers={"image": scheduler()})
    prepare_rollout_if_enabled(request_, None)
    init_rollout_env_if_enabled(request_, {})
    assert rollout_step_kwargs(request_, stream="image") == {}
    assert finalize_rollout_if_enabled(request_) is None
    abort_rollout_if_enabled(request_)


@pytest.mark.parametrize("request_", [{"miles_rollout": 1}, SimpleNamespace(miles_rollout={})])
def test_a_name_of_the_users_own_is_neither_taken_for_a_rollout_nor_overwritten(request_):
    before = dict(request_) if isinstance(request_, dict) else dict(vars(request_))
    assert rollout_step_kwargs(request_, stream="image") == {}
    assert finalize_rollout_if_enabled(request_) is None
    with pytest.raises(RolloutStateError, match="uses the name 'miles_rollout' for something else"):
        prepared(request_)
    assert (request_ if isinstance(request_, dict) else vars(request_)) == before


def test_threads_do_not_disturb_each_other():
    found = {}

    def work(seed):
        found[seed] = alone(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        final, trajectory = alone(seed)
        assert torch.equal(found[seed][0], final)
        assert_same(found[seed][1], trajectory)


# -- what prepare is given ------------------------------------------------------------------------


def unset():
    return accept_transition(FlowMatchEulerDiscreteScheduler())


def late():
    made = scheduler()
    made.set_begin_index(2)
    return made


SHARED = scheduler()


@pytest.mark.parametrize(
    ("schedulers", "message"),
    [
        ({}, r"schedulers maps stream names to schedulers; got \{\}; pass"),
        (
            {"image": stock()},
            "stream 'image' does not accept a transition; got FlowMatch.*; pass acc",
        ),
        (
            {"image": unset()},
            "stream 'image' has no schedule of T timesteps, .*; pass it after its set",
        ),
        ({"image": late()}, "would start within its schedule; got begin_index 2; pass a scheduler"),
        ({"a": SHARED, "b": SHARED}, "'a' and 'b' would step one scheduler twice; .* of its own"),
        (
            {"video": scheduler(4), "audio": scheduler(5)},
            "got 4 steps for 'video' and 5 for 'audio'; give both schedules one length",
        ),
        ({"image": scheduler(stochastic_sampling=True)}, "has stochastic_sampling on"),
    ],
    ids=["none", "stock", "unset", "late", "shared", "lengths", "stochastic"],
)
def test_schedulers_that_cannot_drive_a_rollout(schedulers, message):
    request = {}
    with pytest.raises(RolloutParamsError, match=message):
        prepared(request, schedulers=schedulers)
    assert request == {}


def controller(stream="video", params=PARAMS, seeds=(3, 4)):
    return FlowRolloutController(params, seeds, stream=stream, sigmas=SIGMAS, timesteps=SIGMAS)


def used():
    made = controller()
    made.transition(noise(1), noise(), step=0, ode=lambda v, x: x)
    return made


@pytest.mark.parametrize(
    ("controllers", "message"),
    [
        (lambda: {}, "returns {stream: FlowRolloutController}; got dict; pass one controller a"),
        (controller, "returns {stream: .*got FlowRolloutController; pass one controller a stream"),
        (lambda: {"video": controller("vid")}, "noise of the stream .*; got 'vid' under 'video'"),
        (lambda: {"video": controller(seeds=(3, 5))}, r"not one of this request; got seeds \(3, 5"),
        (lambda: {"video": controller(params=RolloutParams(noise_level=0.5))}, "noise_level=0.5"),
        (lambda: {"video": used()}, "not one of this request; .*, 1 steps taken; pass a new one"),
    ],
    ids=["none", "bare", "name", "seeds", "params", "used"],
)
def test_controllers_of_another_request(controllers, message):
    with pytest.raises(RolloutParamsError, match=message):
        prepared(build_controller=lambda params, seeds: controllers())


@pytest.mark.parametrize(
    ("params", "seeds", "kwargs", "message"),
    [
        ({"sde_type": "sde"}, SEEDS, {}, "params are RolloutParams, or None .*; got a dict; build"),
        (PARAMS, (), {}, "rollout: no seeds; got"),
        (PARAMS, [True], {}, "seeds must be ints, one a row; got True"),
        (RolloutParams(sde_streams=["vid"]), SEEDS, {}, "no such stream; got 'vid'; choose among im"),
        (RolloutParams(stream_weights={"vid": 1}), SEEDS, {}, "stream_weights: no such stream"),
        (RolloutParams(sde_step_indices=[4]), SEEDS, {}, r"index 4 is out of range.*in 0\.\.3"),
        (PARAMS, SEEDS, {"ode_transition": {"vid": min}}, "ode_transition names no stream; got 'vid'"),
        (
            PARAMS,
            SEEDS,
            {"sharding": {"vid": Sharding(gather=abs, shard=abs)}},
            "sharding names no stream; got 'vid'; choose among image",
        ),
    ],
)  # fmt: skip
def test_arguments_that_name_nothing(params, seeds, kwargs, message):
    request = {}
    with pytest.raises((RolloutParamsError, RolloutStateError), match=message):
        # Past the tests' type checks, which a user does not have.
        inspect.unwrap(prepare_rollout_if_enabled)(
            request, params, seeds, schedulers={"image": scheduler()}, **kwargs
        )
    assert request == {}


@pytest.mark.parametrize(
    ("sigmas", "timesteps", "sign", "message"),
    [
        ([1.0], [1.0], 1, r"sigmas are \[T \+ 1\] with T >= 1 steps; got \(1,\)"),
        ([1.0, 0.5, 0.0], [1.0, 0.5], 1, r"have the sigmas' length.*; got \(2,\) for \(3,\)"),
        ([1.0, float("nan"), 0.0], [1.0, 0.5, 0.0], 1, "a schedule is finite"),
        ([14.6, 0.5, 0.0], [2.0, 1.0, 0.0], 1, "stochastic step 0 are not within 1..0; got 14.6 to"),
        ([1.0, 0.5, 0.0], [1.0, 0.5, 0.0], 0.5, "velocity_sign is 1 where .*; got 0.5; pass 1 or -1"),
    ],
)  # fmt: skip
def test_a_schedule_that_is_none(sigmas, timesteps, sign, message):
    with pytest.raises(RolloutParamsError, match=f"stream 'video': .*{message}"):
        inspect.unwrap(FlowRolloutController.__init__)(
            object.__new__(FlowRolloutController),
            PARAMS,
            SEEDS,
            stream="video",
            sigmas=torch.tensor(sigmas),
            timesteps=torch.tensor(timesteps),
            velocity_sign=sign,
        )


# -- steps ----------------------------------------------------------------------------------------


def test_step_kwargs_may_be_asked_for_once_or_each_step():
    request, drive = {}, scheduler()
    prepared(request, schedulers={"image": drive})
    kwargs, x = rollout_step_kwargs(request, stream="image"), noise()
    for t in drive.timesteps:
        x = drive.step(x.sin(), t, x, return_dict=False, **kwargs)[0]
    assert torch.equal(x, alone(0)[0])
    with pytest.raises(
        RolloutStateError, match="all 4 steps of stream 'image' were taken; got ste"
    ):
        drive.step(x, drive.timesteps[-1], x, **kwargs)


def test_a_step_that_is_taken_twice_is_refused():
    request = prepared(build_controller=build)
    take = rollout_step_kwargs(request, stream="video")["transition"]
    x = take(noise(1), noise(), step=0, ode=lambda v, x: x)
    with pytest.raises(
        RolloutStateError, match="expected step 1; got step 0; take every step once"
    ):
        take(noise(1), x, step=0, ode=lambda v, x: x)


def test_both_branches_of_guidance_through_one_scheduler_are_too_many_steps():
    request, drive = {}, scheduler()
    prepared(request, schedulers={"image": drive})

    def loop(x):
        for t in drive.timesteps:
            for _ in range(2):
                x = drive.step(x.sin(), t, x, **rollout_step_kwargs(request, stream="image"))[0]

    with pytest.raises(RolloutStateError, match="all 4 steps of stream 'image' were taken"):
        loop(noise())


def test_a_transition_in_another_streams_scheduler_is_refused():
    video, audio = scheduler(shift=12.0), scheduler(shift=3.0)
    request = prepared(schedulers={"video": video, "audio": audio})
    kwargs, x = rollout_step_kwargs(request, stream="audio"), noise()
    with pytest.raises(RolloutStateError, match="transition belongs to another scheduler"):
        video.step(x, video.timesteps[0], x, **kwargs)
    with pytest.raises(
        RolloutStateError, match="no such stream; got 'image'; choose among video, a"
    ):
        rollout_step_kwargs(request, stream="image")


def test_a_stock_scheduler_takes_no_transition():
    request = prepared()
    drive, x = stock(), noise()
    with pytest.raises(TypeError, match="unexpected keyword argument 'transition'"):
        drive.step(x, drive.timesteps[0], x, **rollout_step_kwargs(request, stream="image"))


def test_a_scheduler_that_accepts_a_transition_already_is_only_copied():
    drive = accept_transition(scheduler())
    request = prepared(schedulers={"image": drive})
    *_, final = steps(request, drive, noise())
    assert torch.equal(final, alone(0)[0])


@pytest.mark.parametrize("params", [PARAMS, RolloutParams(sde_type="ode")])
def test_a_velocity_of_another_shape_is_not_broadcast(params):
    request, drive = {}, scheduler()
    prepared(request, params, schedulers={"image": drive})
    with pytest.raises(RolloutParamsError, match=r"got \(2, 1\) for \(2, 6\) of stream 'image'"):
        drive.step(
            noise(1, 2, 1),
            drive.timesteps[0],
            noise(),
            **rollout_step_kwargs(request, stream="image"),
        )


def test_a_loop_without_an_update_of_its_own_says_what_to_pass():
    request = prepared(build_controller=build)
    take = rollout_step_kwargs(request, stream="video")["transition"]
    with pytest.raises(RolloutStateError, match="got neither ode= nor ode_transition; pass one"):
        take(noise(1), noise())


def test_an_ode_transition_gets_the_number_of_its_step():
    seen = []

    def own(velocity, sample, step):
        seen.append(step)
        return sample - (SIGMAS[step + 1] - SIGMAS[step]) * velocity

    for given in (own, {"video": own}):
        request, x = {}, noise()
        prepared(
            request, RolloutParams(sde_type="ode"), build_controller=build, ode_transition=given
        )
        for _ in range(4):
            x = rollout_step_kwargs(request, stream="video")["transition"](x.cos(), x)
        assert finalize_rollout_if_enabled(request).num_steps == 4
    assert seen == [0, 1, 2, 3] * 2
