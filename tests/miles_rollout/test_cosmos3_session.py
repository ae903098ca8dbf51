"""Up to three streams of one scheduler, conditions inside the stepped tensors, two pipelines."""

import copy
import functools

import pytest
import torch
from diffusers import Cosmos3OmniPipeline, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.modular_pipelines.cosmos.denoise import Cosmos3VisionLoopSchedulerStep

from miles_rollout import RolloutEngine, RolloutParams, RolloutParamsError, RolloutStateError
from miles_rollout.loading import load_pipeline
from miles_rollout.testing import tiny_cosmos3_distilled
from tests.miles_rollout.tiny import ODE, assert_replays
from tests.miles_rollout.tiny_cosmos3 import (
    ACTION_WIDTH,
    SIZE,
    STEPS,
    STREAMS,
    call,
    conditions,
    run,
)

FORMS = ("tiny-cosmos3", "tiny-cosmos3-modular")
DTYPES = (torch.float32, torch.bfloat16)
load = functools.cache(load_pipeline)


@pytest.fixture(name="pipe", params=FORMS)
def _pipe(request):
    pipe = load(request.param)
    before = (type(pipe), pipe.scheduler, dict(pipe.config), pipe.transformer._forward_pre_hooks)
    yield pipe
    assert before == (
        type(pipe), pipe.scheduler, dict(pipe.config), pipe.transformer._forward_pre_hooks,
    )  # fmt: skip


def with_scheduler(pipe, scheduler):
    """The same pipeline with another scheduler."""
    other = copy.copy(pipe)
    vars(other)["scheduler"] = scheduler
    return other


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize(
    ("form", "kind", "dtype"),
    [
        *((FORMS[0], kind, torch.float32) for kind in STREAMS if kind != "policy"),
        *((form, kind, torch.bfloat16) for form in FORMS for kind in ("t2va", "i2v")),
        (FORMS[1], "policy_sound", torch.float32),
    ],
)
def test_a_deterministic_rollout_is_the_stock_call_bitwise(form, kind, dtype):
    pipe = load(form, dtype)
    stock = call(pipe, **conditions()[kind])
    trajectory, rolled = run(pipe, ODE, **conditions()[kind])
    assert_equal(stock, rolled)
    assert tuple(trajectory.streams) == STREAMS[kind]
    assert trajectory.num_steps == STEPS
    assert not trajectory.log_probs.any()
    _, noisy = run(pipe, **conditions()[kind])
    for name in STREAMS[kind]:
        assert not torch.equal(stock[name], noisy[name])
    assert_equal(stock, call(pipe, **conditions()[kind]))


@pytest.mark.parametrize("kind", STREAMS)
def test_replay_is_the_rollout_bitwise_with_gradient(kind):
    pipe = load("tiny-cosmos3")
    engine = RolloutEngine(pipe)
    trajectory, _ = run(pipe, **conditions()[kind])
    assert_replays(engine, trajectory)
    replay = engine.replay(trajectory, 1)
    heads = {"video": "proj_out", "audio": "audio_proj_out", "action": "action_proj_out.fc"}
    for name in STREAMS[kind]:
        head = pipe.transformer.get_submodule(heads[name]).weight
        log_prob = replay.streams[name].log_prob
        (gradient,) = torch.autograd.grad(log_prob.sum(), head, retain_graph=True)
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("kind", ["t2va", "v2v", "policy_sound"])
def test_both_forms_roll_out_the_same_bitwise(kind):
    ours, theirs = (run(load(form), **conditions()[kind])[0] for form in FORMS)
    assert_replays(RolloutEngine(load(FORMS[1])), theirs)
    assert ours.guidance == theirs.guidance
    for name in STREAMS[kind]:
        a, b = ours.streams[name], theirs.streams[name]
        assert torch.equal(a.latents, b.latents)
        assert torch.equal(a.log_probs, b.log_probs)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_guidance_is_off_at_a_scale_of_exactly_one(pipe, scale):
    trajectory, _ = run(pipe, **SIZE, guidance_scale=scale)
    calls = {len(made) for made in trajectory.conditions[0].steps.values()}
    assert calls == {1 if scale == 1 else 2}
    assert_replays(RolloutEngine(pipe), trajectory)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("policy_sound", {}),
        ("i2v", {"sde_type": "cps"}),
        ("policy_sound", {"latent_dtype": "float32"}),
    ],
)
def test_bfloat16_replays_bitwise(kind, params):
    pipe = load("tiny-cosmos3", torch.bfloat16)
    trajectory, _ = run(pipe, RolloutParams(debug=True, **params), **conditions()[kind])
    assert_replays(RolloutEngine(pipe), trajectory)


# -- conditions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "kept"), [("i2v", 1), ("v2v", 2), ("policy", 1)])
def test_conditioned_frames_are_neither_noised_nor_counted(pipe, kind, kept):
    trajectory, output = run(pipe, **conditions()[kind])
    video = trajectory.streams["video"]
    frames = video.latents[0, :, 0, :, :]  # boundary, channel, frame, height, width
    first = frames[0, :, :kept]
    for boundary in range(STEPS + 1):
        assert torch.equal(frames[boundary, :, :kept], first)
        assert boundary == 0 or not torch.equal(frames[boundary, :, kept:], frames[0, :, kept:])
    assert torch.equal(output["video"][0], frames[-1])
    free = frames[0, :, kept:].numel()
    assert video.num_elements.item() == free
    x, x_next = (t.double()[0, 0, :, kept:] for t in trajectory.pair("video", 2))
    mean, std = (video.debug[n].double()[0, 2] for n in ("mean", "std"))
    assert x.numel() == free
    gaussian = torch.distributions.Normal(mean[0, :, kept:], std)
    expected = gaussian.log_prob(x_next).mean().item()
    assert video.log_probs[0, 2].item() == pytest.approx(expected, abs=1e-5)


def test_channels_that_an_embodiment_lacks_stay_zero_and_are_not_counted(pipe):
    trajectory, output = run(pipe, **conditions()["policy"])
    action = trajectory.streams["action"]
    assert action.latents.shape == (1, STEPS + 1, 4, 12)
    assert not action.latents[..., ACTION_WIDTH:].any()
    assert action.num_elements.item() == 4 * ACTION_WIDTH
    assert torch.equal(action.latents[0, -1, :, :ACTION_WIDTH], output["action"])
    counts = torch.tensor([48.0, 36.0])
    parts = torch.stack([trajectory.streams[n].log_probs[0] for n in ("video", "action")], -1)
    joint = (parts * counts).sum(-1) / counts.sum()
    assert torch.allclose(trajectory.log_probs[0], joint, rtol=1e-6)


def test_channels_that_the_pipeline_zeroes_in_place_are_no_change(pipe):
    given = conditions()["policy"] | {"action_latents": torch.ones(4, 12)}
    trajectory, _ = run(pipe, **given)
    action = trajectory.streams["action"].latents[0]
    assert action[0, :, ACTION_WIDTH:].all()
    assert not action[1:, :, ACTION_WIDTH:].any()
    assert_replays(RolloutEngine(pipe), trajectory)


@pytest.mark.parametrize(
    ("kind", "stream"), [("inverse_dynamics", "video"), ("forward_dynamics", "action")]
)
def test_a_stream_that_is_wholly_conditioned_is_none(pipe, kind, stream):
    trajectory, _ = run(pipe, **conditions()[kind])
    assert stream not in trajectory.streams
    other = next(iter(trajectory.streams.values()))
    assert torch.equal(trajectory.log_probs, other.log_probs)
    with pytest.raises(RolloutParamsError, match=f"no such stream; got '{stream}'; choose among"):
        run(pipe, RolloutParams(sde_streams=[stream]), **conditions()[kind])


def test_a_request_without_anything_to_denoise_is_refused(pipe):
    handle = pipe.transformer.register_forward_hook(lambda *_: pytest.fail("ran"))
    everything = conditions()["v2v"] | {"condition_frame_indexes_vision": [0, 1, 2]}
    try:
        with pytest.raises(RolloutParamsError, match="nothing of this request is denoised"):
            run(pipe, **everything)
    finally:
        handle.remove()


def test_a_stream_that_was_not_asked_for_is_refused_before_the_denoiser_runs(pipe):
    handle = pipe.transformer.register_forward_hook(lambda *_: pytest.fail("ran"))
    try:
        with pytest.raises(RolloutParamsError, match="no such stream; got 'audio'; choose among v"):
            run(pipe, RolloutParams(sde_streams=["audio"]), **SIZE)
    finally:
        handle.remove()


# -- streams and schedulers -----------------------------------------------------------------------


def test_streams_share_the_schedule_and_draw_noise_of_their_own(pipe):
    trajectory, _ = run(pipe, **conditions()["policy_sound"])
    assert tuple(trajectory.streams) == ("video", "audio", "action")
    scheduler = copy.deepcopy(pipe.scheduler)
    scheduler.set_timesteps(STEPS)
    noises = []
    for stream in trajectory.streams.values():
        assert torch.equal(stream.sigmas, scheduler.sigmas)
        assert torch.equal(stream.timesteps[:-1], scheduler.timesteps.float())
        assert stream.timesteps[-1] == 0
        assert stream.log_probs.all()
        noises.append(stream.debug["noise"][0, 0].flatten()[:16])
    assert not any(torch.equal(a, b) for a, b in zip(noises, noises[1:] + noises[:1], strict=True))


def test_deterministic_steps_beside_stochastic_ones_are_eulers(pipe):
    trajectory, _ = run(
        pipe, RolloutParams(sde_step_indices=[1], debug=True), **conditions()["policy_sound"]
    )
    for stream in trajectory.streams.values():
        for step in (0, 2, 3):
            dt = (stream.sigmas[step + 1].double() - stream.sigmas[step].double()).float()
            x, x_next = stream.latent(step), stream.latent(step + 1)
            torch.testing.assert_close(x_next, x + dt * stream.debug["velocity"][:, step])
    assert trajectory.replayable_steps == (1,)


def test_a_stream_beside_the_stochastic_one_takes_eulers_steps_too(pipe):
    params = RolloutParams(sde_streams=["video"], debug=True)
    trajectory, _ = run(pipe, params, **conditions()["t2va"])
    audio = trajectory.streams["audio"]
    assert audio.sde_step_indices == ()
    assert torch.equal(trajectory.log_probs, trajectory.streams["video"].log_probs)
    dt = audio.sigmas[2] - audio.sigmas[1]
    torch.testing.assert_close(
        audio.latent(2), audio.latent(1) + dt * audio.debug["velocity"][:, 1]
    )
    replay = RolloutEngine(pipe).replay(trajectory, 1)
    assert list(replay.streams) == ["video"]
    assert torch.equal(replay.log_prob, trajectory.log_probs[:, 1])


@pytest.mark.parametrize(
    "scheduler",
    [
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, use_karras_sigmas=True,
            sigma_min=0.147, sigma_max=200.0,
        ),
    ],
    ids=["euler", "karras"],
)  # fmt: skip
def test_other_schedulers(pipe, scheduler):
    other = with_scheduler(pipe, scheduler)
    kind = conditions()["t2va"]
    stock = call(other, **kind)
    assert_equal(stock, run(other, ODE, **kind)[1])
    trajectory, _ = run(other, **kind)
    assert_replays(RolloutEngine(other), trajectory)
    stds = trajectory.streams["video"].debug["std"].flatten()
    assert stds.max() < 5  # the first sigma is close to 1


def test_the_native_schedule_is_taken_as_the_pipeline_sets_it(pipe):
    native = copy.copy(pipe)
    native._internal_dict = type(pipe.config)({**pipe.config, "use_native_flow_schedule": True})
    trajectory, _ = run(native, **SIZE)
    sigmas = trajectory.streams["video"].sigmas
    assert sigmas[0] == pytest.approx(5 * 0.999 / (1 + 4 * 0.999))
    assert_replays(RolloutEngine(native), trajectory)


def test_states_are_not_kept_twice(pipe):
    trajectory, _ = run(pipe, RolloutParams(), **conditions()["t2va"])
    for made in trajectory.conditions[0].steps.values():
        for call_ in made:
            assert call_.kwargs["vision_tokens"][0].stream == "video"
            assert call_.kwargs["sound_tokens"][0].stream == "audio"


# -- pipelines that others have changed -----------------------------------------------------------


def test_steps_of_a_subclass_leave_their_marks():
    marks = []

    class Marked(Cosmos3OmniPipeline):
        @staticmethod
        def _mask_velocity_predictions(*args, **kwargs):
            marks.append(len(marks))
            return Cosmos3OmniPipeline._mask_velocity_predictions(*args, **kwargs)

    pipe = copy.copy(load("tiny-cosmos3"))
    pipe.__class__ = Marked
    trajectory, _ = run(pipe, **SIZE)
    assert len(marks) == 2 * STEPS
    assert_replays(RolloutEngine(pipe), trajectory)
    assert type(pipe) is Marked


def test_steps_of_a_modified_block_leave_their_marks():
    marks = []

    class Marked(Cosmos3VisionLoopSchedulerStep):
        def __call__(self, components, block_state, i, t):
            marks.append(i)
            return super().__call__(components, block_state, i, t)

    pipe = copy.copy(load("tiny-cosmos3-modular"))
    pipe._blocks = pipe.blocks
    loop = pipe._blocks.sub_blocks["denoise"].sub_blocks["vision"].sub_blocks["denoise"]
    loop.sub_blocks["update_vision"] = Marked()
    run(pipe, **SIZE)
    (_batch,) = RolloutEngine(pipe).generate(
        ["a dog"], 1, ODE, seed=0, num_inference_steps=STEPS, **SIZE
    )
    assert marks == 2 * list(range(STEPS))


def test_a_callback_that_changes_a_live_latent_is_seen():
    pipe = load("tiny-cosmos3")

    def change(_pipe, step, _t, tensors):
        return {"latents": tensors["latents"] * (0.5 if step == 1 else 1.0)}

    with pytest.raises(RolloutStateError, match="'video' was changed between steps 1 and 2"):
        run(pipe, RolloutParams(sde_step_indices=[1]), **SIZE, callback_on_step_end=change)
    run(pipe, RolloutParams(sde_step_indices=[3]), **SIZE, callback_on_step_end=change)


# -- the distilled blocks -------------------------------------------------------------------------


DISTILLED = {"negative_prompt": None, "guidance_scale": None, "num_inference_steps": None}


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_distilled_blocks_roll_out_with_the_noise_of_their_scheduler(dtype, kind):
    pipe = tiny_cosmos3_distilled(dtype=dtype)
    request = conditions()[kind] | DISTILLED
    stock = call(pipe, **request)
    trajectory, rolled = run(pipe, ODE, **request)
    assert_equal(stock, rolled)
    assert_equal(stock, call(pipe, **request))
    assert trajectory.guidance == {"do_guidance": False, "guidance_scale": 1.0}


def test_stochastic_steps_beside_a_schedulers_own_noise_are_refused_by_name():
    pipe = tiny_cosmos3_distilled()
    handle = pipe.transformer.register_forward_hook(lambda *_: pytest.fail("ran"))
    try:
        with pytest.raises(
            RolloutParamsError,
            match=r"FlowMatchEulerDiscreteScheduler has stochastic_sampling on.*=True",
        ):
            run(pipe, RolloutParams(sde_step_indices=[1]), **DISTILLED, **SIZE)
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_distilled_blocks_without_noise_of_their_own_roll_out_and_replay(kind):
    pipe = with_scheduler(tiny_cosmos3_distilled(), FlowMatchEulerDiscreteScheduler(shift=1.0))
    trajectory, _ = run(pipe, **conditions()[kind], **DISTILLED)
    assert trajectory.streams["video"].sigmas.tolist() == pytest.approx([1, 0.94, 0.83, 0.6, 0])
    assert_replays(RolloutEngine(pipe), trajectory)
