"""Replay is the rollout again, bit for bit, whatever happened in between."""

import copy
import math

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig

from miles_rollout import (
    RolloutEngine,
    RolloutParams,
    RolloutParamsError,
    RolloutStateError,
    RolloutTrajectory,
    flow_step,
)
from tests.miles_rollout.tiny import (
    CFG,
    DEBUG,
    PROMPTS,
    STEPS,
    assert_replays,
    assert_same,
    generate,
    run,
)


def with_lora(pipe):
    """A copy with a LoRA adapter whose B is not zero."""
    pipe = copy.deepcopy(pipe)
    with torch.random.fork_rng(devices=[]):
        pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]))
    generator = torch.Generator().manual_seed(0)
    for name, weight in pipe.transformer.named_parameters():
        if "lora_" in name:
            weight.data.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return pipe


@pytest.mark.parametrize("cfg", [{}, CFG], ids=["plain", "cfg"])
@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
def test_replay_is_the_rollout_bitwise(any_pipe, cfg, lora, sde_type):
    engine = RolloutEngine(with_lora(any_pipe) if lora else any_pipe)
    batch = generate(engine, params=RolloutParams(sde_type=sde_type, debug=True), **cfg)[0]
    assert batch.trajectory.guidance["do_true_cfg"] == bool(cfg)
    assert_replays(engine, batch.trajectory)
    with torch.no_grad():
        assert_replays(engine, batch.trajectory)


def test_replay_in_float32_state_is_bitwise_too(half_pipe):
    params = RolloutParams(latent_dtype="float32", debug=True)
    engine = RolloutEngine(half_pipe)
    assert_replays(engine, generate(engine, params=params, **CFG)[0].trajectory)
    params = RolloutParams(latent_dtype="float32", debug=True, sde_step_indices=[1, 2])
    assert_replays(engine, generate(engine, params=params)[0].trajectory)


def test_replay_of_a_plain_session_is_bitwise(pipe):
    trajectory, _ = run(pipe, DEBUG, scale=3.0)
    assert_replays(RolloutEngine(pipe), trajectory)


def test_replay_of_a_window_is_bitwise_that_of_the_whole(any_pipe):
    engine = RolloutEngine(any_pipe)
    steps = [1, 2]
    whole = generate(engine, params=RolloutParams(sde_step_indices=steps))[0].trajectory
    asked = RolloutParams(sde_step_indices=steps, return_step_indices=[1, 2, 3])
    window = generate(engine, params=asked)[0].trajectory
    for step in steps:
        a, b = engine.replay(whole, step), engine.replay(window, step)
        assert torch.equal(a.log_prob, b.log_prob)
        assert torch.equal(a.streams["image"].velocity, b.streams["image"].velocity)


def test_replay_with_gradient_checkpointing_and_training_mode(any_pipe):
    pipe = with_lora(any_pipe)
    engine = RolloutEngine(pipe)
    trajectory = generate(engine, **CFG)[0].trajectory
    plain = engine.replay(trajectory, 1)
    pipe.transformer.enable_gradient_checkpointing()
    pipe.transformer.train()
    assert_replays(engine, trajectory)
    lora = [w for n, w in pipe.transformer.named_parameters() if "lora_" in n]
    checkpointed = engine.replay(trajectory, 1)
    for a, b in zip(
        torch.autograd.grad(plain.log_prob.sum(), lora),
        torch.autograd.grad(checkpointed.log_prob.sum(), lora),
        strict=True,
    ):
        assert a.abs().sum() > 0
        assert torch.equal(a, b)


def test_replay_after_the_disk_is_bitwise(any_pipe, tmp_path):
    engine = RolloutEngine(any_pipe)
    generate(engine, **CFG)[0].trajectory.save(tmp_path)
    assert_replays(engine, RolloutTrajectory.load(tmp_path))


def test_replay_of_joined_chunks_with_prompts_of_other_lengths_is_bitwise(any_pipe):
    engine = RolloutEngine(any_pipe)
    prompts = ["a", "a red circle and more words", "b c", "d"]
    chunks = generate(engine, prompts, group_size=2, chunk_size=3, **CFG)
    assert [len(c.prompts) for c in chunks] == [3, 3, 2]
    joined = RolloutTrajectory.cat([c.trajectory for c in chunks])
    assert_replays(engine, joined)
    assert_replays(engine, joined, samples=[0, 1, 2])


def test_replay_in_micro_batches_is_close(pipe):
    engine = RolloutEngine(pipe)
    trajectory = generate(engine, group_size=2, chunk_size=4, **CFG)[0].trajectory
    for samples in ([0], [3, 1], [2, 3], torch.tensor([1])):
        for step in range(STEPS):
            replay = engine.replay(trajectory, step, samples)
            torch.testing.assert_close(
                replay.log_prob, trajectory.log_probs[samples, step], atol=1e-5, rtol=0
            )


@pytest.mark.parametrize("cfg", [False, True])
def test_a_strided_initial_latent_replays_bitwise(any_pipe, cfg):
    noise = torch.randn(16, 2, 16, generator=torch.Generator().manual_seed(0))
    noise = noise.to(any_pipe.transformer.dtype).transpose(0, 1)
    scale = 3.0 if cfg else 1.0
    trajectory, _ = run(any_pipe, DEBUG, latents=noise, generator=None, scale=scale)
    assert_replays(RolloutEngine(any_pipe), trajectory)


@pytest.mark.parametrize("inside", [False, True])
def test_replay_restores_the_autocast_state_of_the_rollout(pipe, inside):
    engine = RolloutEngine(pipe)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        trajectory = generate(engine, **CFG)[0].trajectory
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        assert_replays(engine, trajectory)


def test_a_rollout_in_inference_mode_can_be_trained_on(pipe):
    pipe = with_lora(pipe)
    engine = RolloutEngine(pipe)
    with torch.inference_mode():
        trajectory = generate(engine)[0].trajectory
    assert_replays(engine, trajectory)
    engine.replay(trajectory, 0).log_prob.sum().backward()


def test_dropout_stops_a_rollout_and_a_replay(pipe):
    pipe = copy.deepcopy(pipe)
    engine = RolloutEngine(pipe)
    trajectory = generate(engine)[0].trajectory
    pipe.transformer.transformer_blocks[0].img_mlp.net[1].p = 0.1
    assert_replays(engine, trajectory)
    pipe.transformer.train()
    with pytest.raises(RolloutStateError, match="draws dropout masks"):
        engine.replay(trajectory, 1)
    with pytest.raises(RolloutStateError, match="draws dropout masks"):
        generate(engine)


def test_replay_follows_the_adapter_that_is_on(pipe):
    pipe = with_lora(pipe)
    engine = RolloutEngine(pipe)
    trajectory, _ = run(pipe, DEBUG, attention_kwargs={"scale": 0.5})
    other, _ = run(pipe, DEBUG)
    assert not torch.equal(trajectory.log_probs, other.log_probs)
    assert_replays(engine, trajectory)
    pipe.transformer.disable_adapters()
    off = engine.replay(trajectory, 1).log_prob
    assert not torch.equal(off, trajectory.log_probs[:, 1])
    pipe.transformer.enable_adapters()
    assert_replays(engine, trajectory)


@pytest.mark.parametrize("in_place", [False, True])
def test_prompts_that_a_callback_changes_are_replayed_as_they_were(pipe, in_place):
    def change(_, step, __, tensors):
        embeds = tensors["prompt_embeds"]
        # Not scaled: the denoiser normalises it.
        return {"prompt_embeds": embeds.add_(1.0) if in_place else embeds + 1.0}

    names = ["latents", "prompt_embeds"]
    trajectory, _ = run(
        pipe, DEBUG, callback_on_step_end=change, callback_on_step_end_tensor_inputs=names
    )
    # Not by log-probs: they are those of the noise, whatever the denoiser says.
    plain, _ = run(pipe)
    final = [t.streams["image"].latents[:, -1] for t in (trajectory, plain)]
    assert (final[0] - final[1]).abs().max() > 1e-4
    assert_replays(RolloutEngine(pipe), trajectory)


def test_a_denoiser_under_an_offloading_hook_replays_bitwise(pipe):
    pipe = copy.deepcopy(pipe)
    add_hook_to_module(pipe.transformer, AlignDevicesHook("cpu", io_same_device=True))
    engine = RolloutEngine(pipe)
    trajectory = generate(engine)[0].trajectory
    assert_replays(engine, trajectory)
    remove_hook_from_module(pipe.transformer)
    assert_same(trajectory, generate(engine)[0].trajectory)


def test_a_sample_replays_from_its_own_latents_alone(pipe):
    engine = RolloutEngine(pipe)
    (batch,) = generate(engine, ["a red circle"], group_size=4, chunk_size=4)
    log_probs = batch.trajectory.log_probs
    for i in range(4):
        assert all((log_probs[i] != log_probs[j]).all() for j in range(i))
        assert torch.allclose(
            engine.replay(batch.trajectory, 1, [i]).log_prob, log_probs[[i], 1], atol=1e-5
        )


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_log_ratio_of_changed_weights_is_the_written_one(pipe, scale):
    """Old and new log-prob of the stored pair, by the formula and the denoiser called by hand."""
    pipe = copy.deepcopy(pipe)
    engine = RolloutEngine(pipe)
    trajectory, _ = run(pipe, RolloutParams(), scale=scale)
    with torch.no_grad():
        pipe.transformer.proj_out.weight.mul_(1.01)
    embeds, mask = pipe.encode_prompt(PROMPTS)
    negative, negative_mask = pipe.encode_prompt([" "] * 2)
    stream = trajectory.streams["image"]
    for step in range(STEPS):
        x, x_next = stream.latents[:, step], stream.latents[:, step + 1]
        s, n, second = (stream.sigmas[i].item() for i in (step, step + 1, 1))

        def velocity(embeds, mask, x=x, step=step):
            with torch.no_grad():
                return pipe.transformer(
                    hidden_states=x.contiguous(),
                    timestep=stream.timesteps[step].expand(2) / 1000,
                    encoder_hidden_states=embeds,
                    encoder_hidden_states_mask=mask,
                    img_shapes=[[(1, 4, 4)]] * 2,
                    return_dict=False,
                )[0]

        v = velocity(embeds, mask)
        if scale > 1:
            v_neg = velocity(negative, negative_mask)
            guided = v_neg + scale * (v - v_neg)
            v = guided * v.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        g = 0.7 * math.sqrt(s / (1 - (second if s == 1 else s)))
        dt = n - s
        mean = x * (1 + g**2 / (2 * s) * dt) + v * (1 + g**2 * (1 - s) / (2 * s)) * dt
        std = g * math.sqrt(-dt)
        new = torch.distributions.Normal(mean, std).log_prob(x_next).mean((1, 2))
        log_ratio = engine.replay(trajectory, step).log_prob - trajectory.log_probs[:, step]
        assert log_ratio.abs().min() > 1e-6
        torch.testing.assert_close(
            log_ratio.detach(), new - trajectory.log_probs[:, step], atol=2e-6, rtol=0
        )


def test_the_gradient_is_that_of_the_denoiser_called_by_hand(pipe):
    pipe = with_lora(pipe)
    engine = RolloutEngine(pipe)
    trajectory = generate(engine)[0].trajectory
    lora = [w for n, w in pipe.transformer.named_parameters() if "lora_" in n]
    ours = torch.autograd.grad(engine.replay(trajectory, 1).log_prob.sum(), lora)
    call = trajectory.conditions[0].calls(1, {"image": trajectory.pair("image", 1)[0]})[0]
    velocity = pipe.transformer(**call.kwargs)[0]
    x, x_next = trajectory.pair("image", 1)
    sigma, sigma_next = trajectory.streams["image"].sigmas[1:3]
    scored = flow_step(
        "sde", x, velocity, sigma=sigma, sigma_next=sigma_next, noise_level=0.7, next_sample=x_next
    )
    theirs = torch.autograd.grad(scored.log_prob.sum(), lora)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_replay_refuses_steps_and_rows_that_were_not_recorded(pipe):
    engine = RolloutEngine(pipe)
    trajectory, _ = run(pipe, RolloutParams(sde_step_indices=[1], return_step_indices=[1, 2]))
    for step in (0, 2, -1):
        with pytest.raises(RolloutParamsError, match=rf"step {step} was not recorded; .* \[1\]"):
            engine.replay(trajectory, step)
    with pytest.raises(RolloutParamsError, match="no sample 2"):
        engine.replay(trajectory, 1, [2])


def test_a_log_prob_that_is_not_finite_stops_the_replay(pipe):
    pipe = copy.deepcopy(pipe)
    engine = RolloutEngine(pipe)
    trajectory, _ = run(pipe)
    pipe.transformer.proj_out.weight.data.fill_(float("nan"))
    with pytest.raises(RolloutStateError, match="log-prob of step 1 is not finite"):
        engine.replay(trajectory, 1)
