"""What SGLang's layout cannot say, and responses that contradict themselves or the parameters."""

import functools
from dataclasses import replace

import pytest
import torch

from miles_rollout import RolloutParams, RolloutParamsError
from miles_rollout.pipelines import adapter_for
from miles_rollout.sglang_layout import from_sglang, to_sglang
from tests.miles_rollout.tiny import run
from tests.miles_rollout.tiny_sglang import qwen_calls

WINDOW = RolloutParams(sde_step_indices=[1, 3], return_step_indices=[1, 2, 3, 4], debug=True)


@pytest.fixture(name="trajectory", scope="module")
def _trajectory(_pipes):
    return run(_pipes[torch.float32])[0]


@pytest.fixture(name="window", scope="module")
def _window(_pipes):
    return run(_pipes[torch.float32], WINDOW)[0]


# -- what the layout cannot say -------------------------------------------------------------------


def masked(trajectory):
    stream = trajectory.streams["image"]
    mask = torch.ones(stream.latents.shape[0], *stream.latents.shape[2:], dtype=torch.bool)
    return replace(trajectory, streams={"image": replace(stream, mask=mask)})


def positional(trajectory):
    (conditions,) = trajectory.conditions
    steps = {
        s: [replace(c, args=(torch.zeros(2),)) for c in cs] for s, cs in conditions.steps.items()
    }
    return replace(trajectory, conditions=(replace(conditions, steps=steps),))


def ragged(trajectory):
    (conditions,) = trajectory.conditions
    steps = {s: list(cs) * (1 + (s == 1)) for s, cs in conditions.steps.items()}
    return replace(trajectory, conditions=(replace(conditions, steps=steps),))


def two(trajectory):
    return replace(
        trajectory, streams=dict(trajectory.streams) | {"a": trajectory.streams["image"]}
    )


@pytest.mark.parametrize(
    ("change", "how", "message"),
    [
        (two, {}, r"a response holds one stream; got streams \['a', 'image'\]; pass stream="),
        (two, {"stream": "video"}, r"no such stream; got 'video'; choose among \['a', 'image'\]"),
        (masked, {}, "the layout has no mask.*got a mask on stream 'image'; keep such"),
        (positional, {}, "got a denoiser call with positional ones; keep such trajectories"),
        (ragged, {}, r"is the same in every step; got \[1, 2\] denoiser calls a step; keep"),
        (lambda t: t, {"branches": ("pos", "neg")}, r"has 1 guidance branches.*got branches \('po"),
        (lambda t: t, {"branches": ()}, r"has 1 guidance branches.*got branches \(\); pass what"),
    ],
)
def test_what_cannot_be_said_is_refused(trajectory, change, how, message):
    with pytest.raises(RolloutParamsError, match=message):
        to_sglang(change(trajectory), **how)


def test_guidance_branches_are_named_by_the_caller(pipe):
    trajectory, _ = run(pipe, scale=3.0)
    for branches in (None, ("pos",), ("pos", "pos")):
        with pytest.raises(RolloutParamsError, match=r"a step has 2 guidance branches, and .*\("):
            to_sglang(trajectory, branches=branches)


def test_without_a_kept_latent_there_is_no_schedule(pipe):
    trajectory, _ = run(pipe, RolloutParams(sde_type="ode", return_step_indices=()))
    with pytest.raises(
        RolloutParamsError, match="without a kept latent the layout drops the sched"
    ):
        to_sglang(trajectory)


# -- responses that contradict themselves ---------------------------------------------------------


def at(path, value):
    """A change of one field of response 1; a function of the old value, or the new one."""

    def change(responses):
        *parents, name = path.split(".")
        holder = responses[1]
        for parent in parents:
            holder = holder[parent]
        holder[name] = value(holder[name]) if callable(value) else value

    return change


def everywhere(path, value):
    def change(responses):
        for i in range(len(responses)):
            at(path, value)([None, responses[i]])

    return change


def nan(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[5 % tensor.numel()] = float("nan")
    return tensor


def collapsed(responses):
    responses[1] = responses[0]


DIT = "dit_trajectory"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (at("rollout_log_probs", None), "rollout_log_probs is missing; got None; ask .*rollout=True"),
        (at(DIT, None), "latent_step_indices is missing|sigmas is missing; .*return_dit_trajectory"),
        (at(f"{DIT}.latents", None), "dit_trajectory.latents is missing"),
        (at(f"{DIT}.sigmas", None), "dit_trajectory.sigmas is missing; got None; ask the server w"),
        (everywhere(f"{DIT}.latent_step_indices", None), r"tells which .*; got 4 latents for 5 bou"),
        (at("rollout_log_probs", lambda t: t[:3]), r"rollout_log_probs has shape \(4,\), .*\(3,\)"),
        (at("rollout_log_probs", lambda t: t[None]), r"has shape \(4,\), .*; got \(1, 4\); ask a"),
        (everywhere(f"{DIT}.timesteps", lambda t: t[1:]), r"timesteps has shape \(5,\).*; got \(4,"),
        (everywhere(f"{DIT}.sigmas", lambda t: t[:-1]), r"timesteps has shape \(4,\), with T = len"),
        (at(f"{DIT}.latents", lambda t: t[1:]), r"latents are \[K, \.\.\.\].*; got \(3, 16, 16\)"),
        (at(f"{DIT}.latents", lambda t: t[:, :8]), r"alike in all samples; got \(4, 8, 16\)"),
        (at(f"{DIT}.latents", lambda t: t.bfloat16()), r"alike in all samples; .* torch.bfloat16"),
        (at(f"{DIT}.latents", [1.0]), "latents is a tensor; got list; pass the response whole"),
        (at(f"{DIT}.latents", nan), r"latents is not finite; got nan at \[0, 0, 5\]; drop it"),
        (at("rollout_log_probs", nan), r"rollout_log_probs is not finite; got nan at \[1\]"),
        (everywhere(f"{DIT}.sigmas", nan), r"sigmas is not finite; got nan at \[0\]"),
        (at(f"{DIT}.sigmas", lambda t: t * 0.5), "sigmas differs from that of response 0; got"),
        (at(f"{DIT}.timesteps", lambda t: t + 1), "timesteps differs from that of response 0"),
        (everywhere(f"{DIT}.sigmas", lambda t: t * 1000), "sigmas lie in 0..1; got"),
        (everywhere(f"{DIT}.timesteps", lambda t: t.flip(0)), "timesteps rise, so .*one_minus_sig"),
        (
            everywhere(f"{DIT}.latent_step_indices", torch.tensor([1, 3, 2, 4])),
            r"latent_step_indices does not rise; got \[1, 3, 2, 4\]; pass each boundary once",
        ),
        (everywhere(f"{DIT}.latent_step_indices", torch.tensor([1, 2, 2, 4])), "does not rise"),
        (everywhere(f"{DIT}.latent_step_indices", torch.tensor([1, 2, 3, 5])), r"range; .*0\.\.4"),
        (everywhere(f"{DIT}.latent_step_indices", torch.tensor([-1, 2, 3, 4])), "out of range"),
        (everywhere(f"{DIT}.latent_step_indices", torch.tensor([1.0, 2, 3, 4])), "holds ints"),
        (
            everywhere(f"{DIT}.latent_step_indices", torch.tensor([0, 2, 3, 4])),
            r"other boundaries .*; got latent_step_indices \[0, 2, 3, 4\] for \[1, 2, 3, 4\]; set",
        ),
        (at(f"{DIT}.latent_step_indices", torch.tensor([0, 2, 3, 4])), "than for the first sample"),
        (everywhere("rollout_log_probs", lambda t: t * 0), "step 1 is stochastic by params, but al"),
        (everywhere("rollout_log_probs", lambda t: t + 1), "step 0 is deterministic by params, but"),
        (collapsed, "holds the very trajectory of sample 0, so a group would learn nothing"),
        (at("denoising_env", None), "pos_cond_kwargs is missing; .*rollout_return_denoising_env"),
        (at("denoising_env.pos_cond_kwargs", {"a": 1}), "pos_cond_kwargs has other names than the f"),
        (at("denoising_env.pos_cond_kwargs.attention_kwargs", {"scale": 0.5}), "differs between samples, and no"),
        (at("rollout_debug_tensors.rollout_model_outputs", None), "model_outputs is missing; .*debug"),
        (
            at("rollout_debug_tensors.rollout_noise_std_devs", lambda t: t[1:]),
            r"rollout_noise_std_devs is \[T, 1\]",
        ),
        (
            at("rollout_debug_tensors.rollout_prev_sample_means", lambda t: t[1:]),
            r"rollout_prev_sample_means has shape \(4, 16, 16\)",
        ),
    ],
)  # fmt: skip
def test_a_malformed_response_is_refused_by_its_field(window, pipe, change, message):
    responses = to_sglang(window)
    change(responses)
    with pytest.raises(RolloutParamsError, match=rf"response \d of stream 'image': .*({message})"):
        from_sglang(
            {"image": responses},
            params=window.params,
            calls=qwen_calls,
            batch_axes=adapter_for(pipe).batch_axes,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "AAAA"}, "latents is damaged; got"),
        ({"data": "%"}, "latents is damaged; got"),
        ({"data": None}, "latents is damaged; got"),
        ({"shape": [1]}, r"latents is not what it says; got \[5, 16, 16\] torch.float32 for \[1\]"),
        ({"dtype": "torch.bfloat16"}, "is not what it says; .* for .* torch.bfloat16; pass the se"),
    ],
)
def test_a_damaged_message_is_refused(trajectory, change, message):
    responses = to_sglang(trajectory, wire=True)
    responses[0]["dit_trajectory"]["latents"] |= change
    with pytest.raises(RolloutParamsError, match=f"response 0 of stream 'image': .*{message}"):
        from_sglang({"image": responses}, params=trajectory.params)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"velocity_sign": {"video": -1}}, "velocity_sign names no stream; got 'video'; choose"),
        ({"one_minus_sigma": ["video"]}, "one_minus_sigma names no stream; got 'video'"),
        (
            {"log_prob_no_const": True},
            "'sde' is a density .*; got log_prob_no_const True; ask .*=F",
        ),
        ({"params": RolloutParams(sde_streams=["vid"])}, "sde_streams: no such stream; got 'vid'"),
        (
            {"params": RolloutParams(sde_type="cps"), "log_prob_no_const": False},
            r"'cps' is the bare .*; got log_prob_no_const False; ask .*no_const=True",
        ),
        ({"params": RolloutParams(sde_step_indices=[9])}, "index 9 is out of range"),
    ],
)
def test_what_is_said_beside_the_layout_must_fit_it(trajectory, how, message):
    with pytest.raises(RolloutParamsError, match=message):
        from_sglang({"image": to_sglang(trajectory)}, **{"params": trajectory.params} | how)


@pytest.mark.parametrize("clock", [lambda s: s * 1000, lambda s: 1 - s])
def test_a_clock_of_1_minus_sigma_is_made_of_the_sigmas(trajectory, clock):
    responses, sigmas = to_sglang(trajectory), trajectory.streams["image"].sigmas
    everywhere("dit_trajectory.timesteps", lambda t: clock(sigmas))(responses)
    read = functools.partial(from_sglang, params=trajectory.params, one_minus_sigma=["image"])
    assert torch.equal(read({"image": responses}).streams["image"].timesteps, 1 - sigmas)
    everywhere("dit_trajectory.timesteps", lambda t: clock(sigmas) + 0.5)(responses)
    with pytest.raises(RolloutParamsError, match=r"neither sigma \* 1000 nor 1 - sigma; .*; leave"):
        read({"image": responses})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda r: {}, "no streams; got"),
        (lambda r: {"image": []}, "stream 'image' is a list of responses, one a sample; got list"),
        (lambda r: {"image": r, "audio": r[:1]}, r"share their samples; got .*'audio': 1"),
    ],
)
def test_streams_and_samples_must_be_there(trajectory, made, message):
    with pytest.raises(RolloutParamsError, match=message):
        from_sglang(made(to_sglang(trajectory)), params=trajectory.params)


def test_streams_of_two_requests_are_refused(pipe):
    short = run(pipe, num_inference_steps=3)[0]
    with pytest.raises(RolloutParamsError, match=r"streams share their steps; got .*'audio': 3"):
        from_sglang(
            {"image": to_sglang(run(pipe)[0]), "audio": to_sglang(short)}, params=short.params
        )


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        ({"return_means": True}, r"return_means True, call_step_indices \(\)"),
        ({"call_step_indices": [0]}, r"return_means False, call_step_indices \(0,\)"),
    ],
)
def test_what_is_kept_for_algorithms_without_log_probs_has_no_field(window, kept, told):
    message = rf"no field for means, nor for the calls of .*; got {told}; leave them out, or keep"
    params = replace(WINDOW, **kept)
    with pytest.raises(RolloutParamsError, match=message):
        to_sglang(replace(window, params=params))
    with pytest.raises(RolloutParamsError, match=message):
        from_sglang({"image": to_sglang(window)}, params=params)
