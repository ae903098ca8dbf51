"""Replay is the rollout again; generate is the stock call; randomness has one law."""

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
    rollout,
)
from miles_rollout.noise import derive_seed, keyed_generator
from miles_rollout.pipelines import GenericAdapter
from miles_rollout.pipelines.qwen_image import QwenImageAdapter
from tests.miles_rollout.tiny import ODE, PROMPTS, SEEDS, STEPS, Calls, call, run

SIZE = {"height": 32, "width": 32, "num_inference_steps": STEPS}
DEBUG = RolloutParams(debug=True)
CFG = {"negative_prompt": " ", "true_cfg_scale": 3.0}


def generate(pipe, prompts=PROMPTS, group_size=1, params=DEBUG, **kwargs):
    engine = pipe if isinstance(pipe, RolloutEngine) else RolloutEngine(pipe)
    return list(
        engine.generate(
            prompts, group_size, params, **{"seed": 0, "decode": False, **SIZE, **kwargs}
        )
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


def assert_replays(engine, trajectory, samples=None):
    """Bitwise the recorded velocity and log-prob in every replayable step."""
    stream = trajectory.streams["image"]
    rows = slice(None) if samples is None else samples
    assert trajectory.replayable_steps
    for step in trajectory.replayable_steps:
        replay = engine.replay(trajectory, step, samples)
        again = replay.streams["image"]
        assert torch.equal(replay.log_prob, trajectory.log_probs[rows, step])
        assert torch.equal(again.log_prob, stream.log_probs[rows, step])
        if stream.debug:
            assert torch.equal(again.velocity.float(), stream.debug["velocity"][rows, step])
            assert torch.equal(again.mean, stream.debug["mean"][rows, step])
            assert torch.equal(again.std, stream.debug["std"][rows, step])


# -- replay ---------------------------------------------------------------------------------------


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
        return {"prompt_embeds": embeds.mul_(1.1) if in_place else embeds * 1.1}

    names = ["latents", "prompt_embeds"]
    trajectory, _ = run(
        pipe, DEBUG, callback_on_step_end=change, callback_on_step_end_tensor_inputs=names
    )
    assert not torch.equal(trajectory.log_probs, run(pipe)[0].log_probs)
    assert_replays(RolloutEngine(pipe), trajectory)


def test_a_denoiser_under_an_offloading_hook_replays_bitwise(pipe):
    pipe = copy.deepcopy(pipe)
    add_hook_to_module(pipe.transformer, AlignDevicesHook("cpu", io_same_device=True))
    engine = RolloutEngine(pipe)
    trajectory = generate(engine)[0].trajectory
    assert_replays(engine, trajectory)
    remove_hook_from_module(pipe.transformer)
    assert torch.equal(trajectory.log_probs, generate(engine)[0].trajectory.log_probs)


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


# -- guidance -------------------------------------------------------------------------------------


def combine(positive, negative, scale=4.0):
    outputs = [(torch.tensor(positive),), (torch.tensor(negative),)]
    return QwenImageAdapter().combine(outputs, {"do_true_cfg": True, "true_cfg_scale": scale})[
        "image"
    ]


def test_guidance_is_rescaled_per_token():
    one = combine([[[1.0, 0.0]]], [[[0.0, 1.0]]])
    torch.testing.assert_close(one, torch.tensor([[[0.8, -0.6]]]))
    two = combine([[[1.0, 0.0], [0.0, 2.0]]], [[[0.0, 1.0], [1.0, 0.0]]])
    expected = torch.tensor([[[0.8, -0.6], [-0.7022, 1.8727]]])
    torch.testing.assert_close(two, expected, atol=1e-4, rtol=0)


def test_guidance_without_a_negative_prompt_is_off_and_says_so(pipe):
    with pytest.warns(UserWarning, match="true_cfg_scale has no effect without a negative prompt"):
        (guided,) = generate(pipe, true_cfg_scale=4.0)
    (plain,) = generate(pipe)
    assert torch.equal(guided.latents["image"], plain.latents["image"])
    assert guided.trajectory.guidance == {"do_true_cfg": False, "true_cfg_scale": 1.0}
    assert_replays(RolloutEngine(pipe), guided.trajectory)


def test_a_negative_prompt_without_guidance_says_so(pipe):
    with pytest.warns(UserWarning, match="negative_prompt has no effect at true_cfg_scale 1.0"):
        (batch,) = generate(pipe, negative_prompt=" ", true_cfg_scale=1.0)
    assert not batch.trajectory.guidance["do_true_cfg"]


def test_one_negative_prompt_stands_for_all(pipe):
    one = generate(pipe, **CFG)[0]
    each = generate(pipe, **CFG | {"negative_prompt": [" ", " "]})[0]
    assert torch.equal(one.latents["image"], each.latents["image"])
    with pytest.raises(
        RolloutParamsError, match="one negative prompt, or one a prompt; got 1 for 2"
    ):
        generate(pipe, **CFG | {"negative_prompt": [" "]})


def test_one_negative_prompt_in_a_plain_session_serves_every_row(pipe):
    engine = RolloutEngine(pipe)
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    with rollout(pipe, DEBUG, SEEDS) as session:
        pipe(PROMPTS, negative_prompt=" ", true_cfg_scale=3.0, generator=generators, **SIZE)
    trajectory = session.trajectory
    assert_replays(engine, trajectory)
    alone = engine.replay(trajectory, 1, [1]).log_prob
    torch.testing.assert_close(alone, trajectory.log_probs[[1], 1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("prompts", [["a b c", "d e f"], ["a", "a red circle and more"]])
def test_masks_are_there_for_prompts_of_one_and_of_several_lengths(pipe, prompts):
    engine = RolloutEngine(pipe)
    encodings = engine.encode(prompts)
    arguments = engine.adapter.collate(encodings, None)
    lengths = [len(e["embeds"]) for e in encodings]
    assert arguments["prompt_embeds_mask"].sum(1).tolist() == lengths
    with Calls(pipe.transformer) as calls:
        assert_replays(engine, generate(engine, prompts, **CFG)[0].trajectory)
    assert calls.rows == [2] * (2 * STEPS + 2 * STEPS)


# -- generate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [{}, CFG], ids=["plain", "cfg"])
def test_generate_is_the_stock_call_with_the_same_embeddings(any_pipe, cfg):
    engine = RolloutEngine(any_pipe)
    (batch,) = generate(engine, params=ODE, seed=7, decode=True, **cfg)
    encodings = engine.encode(PROMPTS)
    arguments = engine.adapter.collate(encodings, engine.encode([" "] * 2) if cfg else None)
    arguments |= {"true_cfg_scale": cfg.get("true_cfg_scale", 1.0)}
    for output_type in ("latent", "pt"):
        stock = any_pipe(
            **arguments,
            **SIZE,
            generator=[keyed_generator("initial_noise", 7, 0, p, 0) for p in range(2)],
            output_type=output_type,
        ).images
        if output_type == "latent":
            assert torch.equal(batch.latents["image"], stock)
        else:
            assert torch.equal(torch.stack([m.image for m in batch.media]), stock.float())


def test_a_prompt_encoded_alone_is_close_to_one_in_a_batch(pipe):
    engine = RolloutEngine(pipe)
    embeds, mask = pipe.encode_prompt(PROMPTS)
    arguments = engine.adapter.collate(engine.encode(PROMPTS), None)
    torch.testing.assert_close(arguments["prompt_embeds"], embeds, atol=1e-5, rtol=0)
    assert torch.equal(arguments["prompt_embeds_mask"], mask)


@pytest.mark.parametrize("size", [{}, {"width": 48}])
def test_decode_is_the_pipelines_own(any_pipe, size):
    engine = RolloutEngine(any_pipe)
    (batch,) = generate(engine, decode=True, **SIZE | size)
    with rollout(any_pipe, DEBUG, [derive_seed("sample", 0, 0, p, 0) for p in range(2)]):
        own = any_pipe(
            **engine.adapter.collate(engine.encode(PROMPTS), None),
            **SIZE | size,
            generator=[keyed_generator("initial_noise", 0, 0, p, 0) for p in range(2)],
            output_type="pt",
        ).images
    images = torch.stack([m.image for m in batch.media])
    assert torch.equal(images, own.float())
    last = batch.trajectory.streams["image"].latent(STEPS)
    again = engine.decode({"image": last}, **batch.trajectory.request)
    assert torch.equal(images, torch.stack([m.image for m in again]))


def test_each_distinct_prompt_is_encoded_once(pipe):
    engine = RolloutEngine(pipe)
    prompts = ["a", "b", "a"]
    with Calls(pipe.text_encoder) as calls:
        generate(engine, prompts, group_size=3, chunk_size=2, max_sequence_length=64, **CFG)
        assert calls.rows == [1, 1, 1]  # two prompts and the negative one
        generate(engine, prompts, seed=1, max_sequence_length=64, **CFG)
        assert len(calls) == 3


def test_the_text_encoder_can_leave_after_encoding(pipe):
    engine = RolloutEngine(pipe)
    (before,) = generate(engine)
    encoder = pipe.text_encoder
    try:
        vars(pipe)["text_encoder"] = None
        (after,) = generate(engine)
    finally:
        vars(pipe)["text_encoder"] = encoder
    assert torch.equal(before.latents["image"], after.latents["image"])


def test_a_pipeline_cast_after_encoding_encodes_again(pipe):
    other = copy.deepcopy(pipe)
    engine = RolloutEngine(other)
    generate(engine)
    other.to(torch.bfloat16)
    (batch,) = generate(engine)
    assert batch.latents["image"].dtype == torch.bfloat16


def test_the_longest_prompt_length_reaches_the_pipeline(pipe):
    engine = RolloutEngine(pipe)
    long = " ".join(["circle"] * 600)
    length = {}
    for longest in (None, 8, 600):
        (batch,) = generate(engine, [long], max_sequence_length=longest, num_inference_steps=2)
        embeds = batch.trajectory.conditions[0].steps[0][0].kwargs["encoder_hidden_states"]
        length[longest] = embeds.shape[1]
    assert length == {None: 512, 8: 8, 600: 600}


def test_prompts_reach_the_tokenizer_as_given(pipe, monkeypatch):
    seen = []
    original = pipe.encode_prompt
    monkeypatch.setattr(
        pipe, "encode_prompt", lambda **k: seen.append(k["prompt"]) or original(**k)
    )
    prompts = [" a ", "a", "a\n"]
    (batch,) = generate(pipe, prompts)
    assert [prompt for prompt in seen if prompt is not None] == batch.prompts == prompts
    assert len({tuple(row.flatten().tolist()) for row in batch.latents["image"]}) == 3


def test_duplicate_prompts_are_groups_of_their_own(pipe):
    (batch,) = generate(pipe, ["a", "a"], metadata=[{"k": 1}, {"k": 2}])
    assert batch.group_ids.tolist() == [0, 1]
    assert batch.metadata == [{"k": 1}, {"k": 2}]
    assert not torch.equal(*batch.latents["image"])


def test_rows_run_sample_by_sample(pipe):
    batches = generate(pipe, ["a", "b"], group_size=3, prompt_ids=[7, 3], chunk_size=4)
    assert [b.group_ids.tolist() for b in batches] == [[7, 3, 7, 3], [7, 3]]
    assert [b.sample_ids.tolist() for b in batches] == [[0, 0, 1, 1], [2, 2]]
    assert [b.prompts for b in batches] == [["a", "b", "a", "b"], ["a", "b"]]
    assert all(b.media is None for b in batches)


def noise_by_row(batches):
    return {
        (group, sample): (stream.latents[i, 0], stream.debug["noise"][i])
        for batch in batches
        for stream in [batch.trajectory.streams["image"]]
        for i, (group, sample) in enumerate(
            zip(batch.group_ids.tolist(), batch.sample_ids.tolist(), strict=True)
        )
    }


def test_the_noise_of_a_row_depends_on_its_ids_alone(pipe):
    engine = RolloutEngine(pipe)
    rows = noise_by_row(generate(engine, ["a", "b"], group_size=3, chunk_size=6))
    assert len(rows) == 6
    others = [
        generate(engine, ["a", "b"], group_size=3, chunk_size=1),
        generate(engine, ["a", "b"], group_size=3, chunk_size=4),
        generate(engine, ["b", "x"], group_size=2, prompt_ids=[1, 0]),
    ]
    for batches in others:
        for key, (initial, noise) in noise_by_row(batches).items():
            assert torch.equal(rows[key][0], initial)
            assert torch.equal(rows[key][1], noise)
    for change in ({"seed": 1}, {"iteration": 1}):
        for key, (initial, noise) in noise_by_row(generate(engine, ["a", "b"], **change)).items():
            assert not torch.equal(rows[key][0], initial)
            assert not torch.equal(rows[key][1], noise)
    initials = [initial for initial, _ in rows.values()]
    assert not any(torch.equal(a, b) for i, a in enumerate(initials) for b in initials[:i])


def test_same_noise_starts_a_group_from_one_latent(pipe):
    rows = noise_by_row(generate(pipe, ["a", "b"], group_size=2, same_noise=True))
    assert torch.equal(rows[0, 0][0], rows[0, 1][0])
    assert not torch.equal(rows[0, 0][0], rows[1, 0][0])
    assert not torch.equal(rows[0, 0][1], rows[0, 1][1])


def test_changes_to_the_callers_lists_do_not_reach_the_chunks(pipe):
    prompts = ["a", "b"]
    batches = RolloutEngine(pipe).generate(prompts, 2, ODE, seed=0, decode=False, **SIZE)
    prompts[0] = "c"
    assert [b.prompts for b in batches] == [["a", "b"], ["a", "b"]]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"true_cfg": 4.0}, r"no such sampling argument; got true_cfg; choose among .*height"),
        ({"num_images_per_prompt": 2}, "no such sampling argument; got num_images_per_prompt"),
        ({"prompts": []}, r"needs a list of prompts; got \(\)"),
        ({"prompts": "a"}, "needs a list of prompts; got 'a'"),
        ({"group_size": 0}, "group_size must be >= 1; got 0"),
        ({"chunk_size": 0}, "chunk_size must be >= 1; got 0"),
        ({"metadata": [{}]}, "one metadata entry a prompt; got 1 for 2 prompts"),
        ({"prompt_ids": [1]}, "one prompt_ids entry a prompt; got 1 for 2 prompts"),
        ({"prompt_ids": [1, 1]}, r"prompt_ids tell groups apart; got repeats in \[1, 1\]"),
        ({"seed": True}, "seed must be an int; got True"),
        ({"prompt_ids": [0, True]}, "a prompt id must be an int; got True"),
    ],
)
def test_mistakes_are_refused_where_generate_is_called(pipe, kwargs, message):
    how = {"prompts": PROMPTS, "group_size": 1, "seed": 0} | kwargs
    unchecked = getattr(RolloutEngine.generate, "__wrapped__", RolloutEngine.generate)
    with pytest.raises(RolloutParamsError, match=message):
        unchecked(RolloutEngine(pipe), how.pop("prompts"), how.pop("group_size"), ODE, **how)


def test_a_pipeline_without_an_adapter_rolls_out_and_refuses_the_rest(pipe):
    with rollout(pipe, DEBUG, SEEDS, adapter=GenericAdapter()) as session:
        call(pipe)
    assert torch.equal(session.trajectory.log_probs, run(pipe)[0].log_probs)
    engine = RolloutEngine(pipe, adapter=GenericAdapter())
    for refused in (
        lambda: engine.replay(session.trajectory, 1),
        lambda: engine.encode(["a"]),
        lambda: engine.decode({}),
        lambda: list(engine.generate(["a"], 1, ODE, seed=0)),
    ):
        with pytest.raises(RolloutParamsError, match="this pipeline has no adapter"):
            refused()
