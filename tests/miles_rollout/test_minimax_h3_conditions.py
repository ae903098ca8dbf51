"""MiniMax H3 with key frames and references: what is encoded once, and what is never stepped."""

import copy
from dataclasses import replace

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3LoopSchedulerStep

from miles_rollout import RolloutEngine, RolloutParams, RolloutParamsError, RolloutTrajectory
from miles_rollout.conditions import StreamState
from miles_rollout.testing import tiny_minimax_h3
from tests.miles_rollout.tiny import assert_replays
from tests.miles_rollout.tiny_h3 import STREAMS, call, keyframes, picture, references, run

SIZE = {"height": 32, "width": 32, "num_frames": 124, "num_inference_steps": 4}
NOISY, ODE = RolloutParams(debug=True), RolloutParams(sde_type="ode")
FORMS = pytest.mark.parametrize("form", [keyframes, references])


@pytest.fixture(name="pipe", scope="module")
def _pipe():
    return tiny_minimax_h3()


@pytest.fixture(name="engine", scope="module")
def _engine(pipe):
    return RolloutEngine(pipe)


def generate(engine, inputs, params=NOISY, prompts=None, group_size=1, **kwargs):
    """One batch a sample; ``inputs`` of one prompt, or of each."""
    inputs = inputs if isinstance(inputs, list) else [inputs]
    prompts = prompts or ["a cat"] * len(inputs)
    how = {"seed": 5, "decode": False, **SIZE, **kwargs}
    return list(engine.generate(prompts, group_size, params, inputs=inputs, **how))


class Counts:
    """How often a pipeline's models are called."""

    def __init__(self, pipe):
        modules = {
            "text": pipe.text_encoder.model,
            "vae": pipe.vae.encoder,
            "audio_vae": pipe.audio_vae.encoder,
            "transformer": pipe.transformer,
            "transformer_ref": pipe.transformer_ref,
        }
        self.made = dict.fromkeys(modules, 0)
        self._handles = [
            module.register_forward_pre_hook(lambda *_, n=name: self._count(n))
            for name, module in modules.items()
        ]

    def _count(self, name):
        self.made[name] += 1

    def __enter__(self):
        return self.made

    def __exit__(self, *_):
        for handle in self._handles:
            handle.remove()


# -- what conditions are to a rollout -------------------------------------------------------------


@FORMS
def test_conditions_are_neither_stepped_nor_scored_nor_noised(engine, form):
    shown = []
    name = {keyframes: "transformer", references: "transformer_ref"}[form]
    handle = getattr(engine.pipe, name).register_forward_pre_hook(
        lambda _, __, kwargs: shown.append(
            [kwargs[n].clone() for n in ("hidden_states", "audio_hidden_states")]
        ),
        with_kwargs=True,
    )
    (batch,) = generate(engine, form())
    handle.remove()
    trajectory = batch.trajectory
    assert trajectory.streams["video"].latents.shape == (1, 4, 37, 16)
    assert trajectory.streams["audio"].latents.shape == (1, 4, 414, 4)
    # Two key frames of one row; an image of six, a video of two; sounds of ten and five a channel.
    counts = {keyframes: (2, 0), references: (6 + 2, 20 + 10)}[form]
    for axis, (stream, count) in enumerate(zip(STREAMS, counts, strict=True)):
        held = trajectory.streams[stream]
        assert held.num_elements.item() == held.latents[0, 0].numel()
        assert held.debug["noise"].shape[2:] == held.latents.shape[2:]
        for step in range(3):
            assert shown[step][axis].shape[1] == count + held.latents.shape[2]
            assert torch.equal(shown[step][axis][:, :count], shown[0][axis][:, :count])
            assert torch.equal(shown[step][axis][:, count:], held.latent(step))
            (made,) = trajectory.conditions[0].steps[step]
            argument = made.kwargs["hidden_states" if axis == 0 else "audio_hidden_states"]
            assert isinstance(argument, StreamState)
            assert (0 if argument.front is None else argument.front.shape[1]) == count
    fronts = [made[0].kwargs["hidden_states"].front for made in _calls(trajectory)]
    assert all(front is fronts[0] for front in fronts)


def _calls(trajectory):
    return list(trajectory.conditions[0].steps.values())


def test_each_modality_keeps_its_clock_and_conditions_theirs(engine):
    (batch,) = generate(engine, references())
    for step, (made,) in batch.trajectory.conditions[0].steps.items():
        video, audio = (s.timesteps[step].item() for s in batch.trajectory.streams.values())
        expected = sorted({video, audio, torch.tensor(0.999).item(), 1.0})
        assert made.kwargs["timestep"].tolist() == expected
    shifts = [s.sigmas[1].item() for s in batch.trajectory.streams.values()]
    assert shifts == pytest.approx([0.96, 0.857143], abs=1e-6)
    assert all(s.velocity_sign == -1 for s in batch.trajectory.streams.values())


def test_references_have_a_denoiser_of_their_own(engine):
    with Counts(engine.pipe) as made:
        (batch,) = generate(engine, references())
        assert (made["transformer"], made["transformer_ref"]) == (0, 3)
        replay = engine.replay(batch.trajectory, 1)
        assert (made["transformer"], made["transformer_ref"]) == (0, 4)
    assert {c.module for (c,) in _calls(batch.trajectory)} == {"transformer_ref"}
    weights = [
        next(getattr(engine.pipe, n).parameters()) for n in ("transformer_ref", "transformer")
    ]
    used, unused = torch.autograd.grad(replay.log_prob.sum(), weights, allow_unused=True)
    assert used.abs().sum() > 0
    assert unused is None


@FORMS
def test_replay_follows_the_states_of_both_streams(engine, form):
    (batch,) = generate(engine, form())
    trajectory = batch.trajectory
    before = engine.replay(trajectory, 1)
    for changed, seen in (STREAMS, STREAMS[::-1]):
        stream = trajectory.streams[changed]
        other = replace(stream, latents=stream.latents.flip(2).contiguous())
        moved = replace(trajectory, streams={**trajectory.streams, changed: other})
        now = engine.replay(moved, 1).streams[seen].velocity
        assert not torch.equal(now, before.streams[seen].velocity)


def test_forms_join_and_come_back_from_disk(engine, tmp_path):
    batches = generate(engine, [{}, keyframes(), references()], prompts=["a", "a cat", "a dog"])
    joined = RolloutTrajectory.cat([b.trajectory for b in batches])
    joined.save(tmp_path)
    loaded = RolloutTrajectory.load(tmp_path)
    for trajectory in (joined, loaded):
        assert_replays(engine, trajectory)
        assert_replays(engine, trajectory, [2])
    assert loaded.nbytes == joined.nbytes


@FORMS
def test_a_step_of_a_modified_block_runs(pipe, form):
    seen = []

    class Marked(MiniMaxH3LoopSchedulerStep):
        def __call__(self, components, block_state, i, t):
            seen.append((i, block_state.num_condition_video_rows))
            return super().__call__(components, block_state, i, t)

    marked = copy.copy(pipe)
    marked._blocks = pipe.blocks
    workflow = {keyframes: "fl2va", references: "ref2va"}[form]
    loop = marked._blocks.sub_blocks["denoise"].sub_blocks[workflow].sub_blocks["denoise"]
    loop.sub_blocks["update"] = Marked()
    rows = {keyframes: 2, references: 8}[form]
    (theirs,) = generate(RolloutEngine(marked), form())
    (ours,) = generate(RolloutEngine(pipe), form())
    assert seen == [(i, rows) for i in range(3)]
    assert torch.equal(theirs.latents["video"], ours.latents["video"])
    seen.clear()
    run(marked, output=["latents"], **form())
    assert seen == [(i, rows) for i in range(3)]


def test_the_sound_of_a_conditioned_sample_reaches_the_reward(engine):
    (batch,) = generate(engine, references(), ODE, decode=True)
    (media,) = batch.media
    assert media.video.shape == (124, 3, 32, 32)
    assert media.audio.shape == (2, 165600)
    assert (media.fps, media.sampling_rate) == (24, 32000)


# -- each prompt with its own, in its own order -----------------------------------------------------


def test_samples_are_conditioned_by_what_came_with_their_prompt(engine):
    inputs = [{"image": picture("red")}, {"image": picture("white")}, references()]
    together = generate(engine, inputs, group_size=2)
    assert torch.cat([b.group_ids for b in together]).tolist() == [0, 1, 2] * 2
    for index, given in enumerate(inputs):
        alone = generate(engine, given, group_size=2, prompt_ids=[index])
        for sample in range(2):
            ours = together[3 * sample + index]
            for name in STREAMS:
                assert torch.equal(ours.latents[name], alone[sample].latents[name])


def test_what_is_shown_and_in_which_order_decides_the_sample(engine):
    first, second = picture("red", "blue"), picture("white", "green")
    reference = references()["references"]
    pairs = [
        ({"image": first}, {"image": second}),
        ({"image": first}, {"last_image": first}),
        ({"image": first, "last_image": second}, {"image": second, "last_image": first}),
        ({"references": reference}, {"references": reference[::-1]}),
        ({"references": reference}, {"references": reference[:2]}),
        ({"image": first}, {}),
    ]
    for ours, theirs in pairs:
        a, b = (generate(engine, given, ODE)[0].latents for given in (ours, theirs))
        for name in STREAMS:
            assert (a[name] - b[name]).abs().max() > 1e-3


@pytest.mark.parametrize("given", [{"last_image": picture()}, {"image": picture(size=(64, 32))}])
def test_one_key_frame_is_enough_and_gives_the_canvas(engine, given):
    canvas = {"height": None, "width": None}
    (batch,) = generate(engine, given, ODE, **canvas)
    sizes = [batch.trajectory.request[name] for name in ("height", "width")]
    assert sizes[::-1] == list(next(iter(given.values())).size)
    stock = call(engine.pipe, prompt="a cat", generator=_generator(), **given, **canvas)
    assert torch.equal(batch.latents["video"], stock["latents"])
    assert torch.equal(engine.decode(batch.latents)[0].video, stock["videos"][0])


def _generator():
    """The one that the engine gave its only row."""
    from miles_rollout.sample_request import Row, SampleRequest

    request = SampleRequest(
        prompts=("a cat",), prompt_ids=(0,), metadata=({},), group_size=1, chunk_size=1, seed=5,
        iteration=0, same_noise=False,
    )  # fmt: skip
    return request.generators([Row(0, 0)])[0]


# -- encoded once -----------------------------------------------------------------------------------


def test_inputs_are_encoded_once_for_all_samples_and_prompts(pipe):
    engine, frames, given = RolloutEngine(pipe), keyframes(), references()
    state = torch.get_rng_state()
    with Counts(pipe) as made:
        for _ in range(2):
            prompts = ["a cat", "a dog", "a cat"]
            generate(engine, [frames, frames, given], ODE, prompts, group_size=2)
        # Two key frames; an image, and a video of one chunk; the sounds of the video and the voice.
        assert (made["text"], made["vae"], made["audio_vae"]) == (3, 2 + 1 + 1, 2)
        generate(engine, frames, ODE, width=64)
        assert (made["text"], made["vae"]) == (4, 6)
        generate(engine, dict(frames), ODE, num_inference_steps=3)
        assert (made["text"], made["vae"]) == (4, 6)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_list_that_grew_is_encoded_again(engine):
    given = {"references": references()["references"][:1]}
    (one,) = generate(engine, given, ODE)
    given["references"].append(references()["references"][1])
    (two,) = generate(engine, given, ODE)
    assert not torch.equal(one.latents["video"], two.latents["video"])


def test_a_rounded_frame_count_is_said_once_and_kept(engine):
    with pytest.warns(UserWarning, match="got num_frames=125, taken as 141") as warned:
        (rounded,) = generate(engine, references(), ODE, num_frames=125)
    assert len(warned) == 1
    (asked,) = generate(engine, references(), ODE, num_frames=141)
    assert torch.equal(rounded.latents["video"], asked.latents["video"])
    assert rounded.trajectory.request["num_frames"] == 141


def test_conditions_are_not_used_for_another_size(engine):
    (encoded,) = engine.encode(["a cat"], inputs=[keyframes()], **SIZE)
    part = engine.adapter.denoising_part(engine.pipe)
    arguments = {**engine.adapter.collate([encoded], None), **SIZE, "width": 64}
    with pytest.raises(RolloutParamsError, match="conditions were encoded for another size; got"):
        engine.adapter.denoise(part, arguments, [_generator()])


@FORMS
def test_a_group_shares_the_steps_before_the_first_stochastic_one(engine, form):
    params, given = RolloutParams(sde_step_indices=[1, 2]), form()
    plain = generate(engine, given, params, group_size=3, same_noise=True)
    with Counts(engine.pipe) as made:
        shared = generate(engine, given, params, group_size=3, same_noise=True, share_prefix=True)
    assert made["transformer"] + made["transformer_ref"] == 3 * 3 - 2
    for ours, theirs in zip(shared, plain, strict=True):
        assert torch.equal(ours.trajectory.log_probs, theirs.trajectory.log_probs)
        for name in STREAMS:
            assert torch.equal(ours.latents[name], theirs.latents[name])
        assert_replays(engine, ours.trajectory)
