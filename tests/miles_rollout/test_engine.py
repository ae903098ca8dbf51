"""Generate is the stock call; prompts, masks and noise have one law."""

import copy

import pytest
import torch

from miles_rollout import (
    RolloutEngine,
    RolloutParamsError,
    rollout,
)
from miles_rollout.noise import derive_seed, keyed_generator
from miles_rollout.pipelines import GenericAdapter
from miles_rollout.pipelines.base import DenoisingStep
from miles_rollout.pipelines.qwen_image import QwenImageAdapter
from tests.miles_rollout.tiny import (
    CFG,
    DEBUG,
    ODE,
    PROMPTS,
    SEEDS,
    SIZE,
    STEPS,
    Calls,
    assert_replays,
    call,
    generate,
    run,
)


def combine(positive, negative, scale=4.0):
    step = DenoisingStep(
        index=0,
        calls=[],
        outputs=[(torch.tensor(positive),), (torch.tensor(negative),)],
        states={},
        sigmas={},
        timesteps={},
        guidance={"do_true_cfg": True, "true_cfg_scale": scale},
    )
    return QwenImageAdapter().combine(step)["image"]


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


def test_inputs_are_refused_where_a_pipeline_has_none(pipe):
    with pytest.raises(RolloutParamsError, match="has no such input; got 'image'; leave inputs"):
        generate(pipe, inputs=[{"image": 1}, {}])
    with pytest.raises(RolloutParamsError, match="one entry of inputs a prompt; got 1 for 2 pro"):
        generate(pipe, inputs=[{}])


def test_a_prompt_with_other_inputs_is_another_prompt(pipe, monkeypatch):
    seen = []

    def encode(self, pipe, prompt, max_sequence_length, inputs):
        seen.append((prompt, inputs))
        return {"embeds": torch.zeros(1)}

    monkeypatch.setattr(QwenImageAdapter, "encode", encode)
    monkeypatch.setattr(QwenImageAdapter, "inputs", frozenset({"image"}))
    engine = RolloutEngine(pipe)
    one, two = object(), object()
    for _ in range(2):
        engine.encode(["a", "a", "a"], inputs=[{"image": one}, {"image": two}, {}])
    assert seen == [("a", {"image": one}), ("a", {"image": two}), ("a", {})]
