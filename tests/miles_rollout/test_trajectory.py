"""A trajectory says what it holds; it survives joining, cutting, moving and the disk."""

import dataclasses
import json
from dataclasses import replace

import pytest
import torch

from miles_rollout import (
    RolloutParams,
    RolloutParamsError,
    RolloutStateError,
    RolloutTrajectory,
    StreamTrajectory,
)
from miles_rollout.conditions import map_calls
from tests.miles_rollout.tiny import run

WINDOW = RolloutParams(sde_step_indices=[1, 3], return_step_indices=[1, 2, 3, 4])


def tensors(trajectory):
    found = []

    def visit(tensor):
        found.append(tensor)
        return tensor

    for stream in trajectory.streams.values():
        stream.map(visit, visit)
    for conditions in trajectory.conditions:
        conditions.map(visit)
    return found


def assert_same(a, b):
    assert a.params == b.params
    assert a.guidance == b.guidance
    assert a.request == b.request
    assert list(a.streams) == list(b.streams)
    assert [c.num_samples for c in a.conditions] == [c.num_samples for c in b.conditions]
    for x, y in zip(tensors(a), tensors(b), strict=True):
        assert torch.equal(x, y)
        assert (x.dtype, x.stride()) == (y.dtype, y.stride())


def joint(weights="element", video=-1.0, audio=-3.0):
    """One step; video has 6 elements and audio 2."""

    def stream(value, elements):
        return StreamTrajectory(
            latents=torch.zeros(1, 2, elements),
            latent_step_indices=torch.tensor([0, 1]),
            timesteps=torch.tensor([1000.0, 0.0]),
            sigmas=torch.tensor([1.0, 0.0]),
            log_probs=torch.tensor([[value]]),
            sde_step_indices=(0,),
            num_elements=torch.tensor([elements]),
        )

    return RolloutTrajectory(
        streams={"video": stream(video, 6), "audio": stream(audio, 2)},
        params=RolloutParams(stream_weights=weights),
    )


def test_pairs_are_found_by_provenance(pipe):
    sigmas = [1.0 - i / 10 for i in range(10)]
    how = {"sigmas": sigmas, "num_inference_steps": 10}
    asked = RolloutParams(sde_step_indices=[7, 2], return_step_indices=[8, 2, 3, 7])
    window, _ = run(pipe, asked, **how)
    whole, _ = run(pipe, RolloutParams(sde_step_indices=[2, 7]), **how)
    stream, full = window.streams["image"], whole.streams["image"]
    assert stream.latent_step_indices.tolist() == [2, 3, 7, 8]
    assert len(stream.sigmas) == len(stream.timesteps) == 11
    assert torch.equal(stream.sigmas, full.sigmas)
    assert torch.equal(window.log_probs, whole.log_probs)
    assert window.replayable_steps == (2, 7)
    for step in (2, 7):
        pair, reference = window.pair("image", step), whole.pair("image", step)
        for at, x, y in zip((step, step + 1), pair, reference, strict=True):
            assert x.is_contiguous()
            assert torch.equal(x, y)
            assert torch.equal(x, full.latents[:, at])
    assert stream.latents.nbytes * 11 == full.latents.nbytes * 4


@pytest.mark.parametrize(
    ("stream", "step", "message"),
    [
        ("image", 2, r"step 2 of stream 'image' was not stochastic .* sde_step_indices \[1, 3\]"),
        ("audio", 1, "no such stream; got 'audio'; choose among"),
        ("image", 3, "boundary 4 was not kept; got return_step_indices"),
        ("image", -1, "step -1 of stream 'image' was not stochastic"),
    ],
)
def test_pairs_that_are_not_there_are_refused(pipe, stream, step, message):
    params = RolloutParams(sde_step_indices=[1, 3], return_step_indices=[1, 2, 3])
    trajectory, _ = run(pipe, params)
    assert trajectory.replayable_steps == (1,)
    with pytest.raises(RolloutParamsError, match=message):
        trajectory.pair(stream, step)


def test_snapshots_own_their_storage(pipe):
    noise = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    seen = [noise]

    def keep(pipe, _, __, tensors):
        seen.extend([*tensors.values(), pipe.scheduler.sigmas, pipe.scheduler.timesteps])
        return {}

    how = {"callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    trajectory, _ = run(pipe, latents=noise, generator=None, callback_on_step_end=keep, **how)
    before = [t.clone() for t in tensors(trajectory)]
    for tensor in seen:
        tensor.fill_(7)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(trajectory), strict=True))
    assert trajectory.streams["image"].latents.is_contiguous()
    assert not any(t.requires_grad or t.grad_fn for t in tensors(trajectory))


def test_a_prompt_is_stored_once_and_states_are_not_stored_twice(pipe):
    near, _ = run(pipe, RolloutParams(sde_step_indices=[1], return_step_indices=[1, 2]))
    far, _ = run(pipe, RolloutParams(sde_step_indices=[1, 3], return_step_indices=[1, 2, 3, 4]))
    state = far.streams["image"].latents[:, 0].nbytes
    timestep = 2 * 4
    # Two boundaries with their indices, and one timestep: nothing of the prompt.
    assert far.nbytes - near.nbytes == 2 * (state + 8) + timestep


def test_nbytes_counts_tensors_once(pipe):
    trajectory, _ = run(pipe)
    distinct = {id(t): t.nbytes for t in tensors(trajectory)}
    assert trajectory.nbytes == sum(distinct.values())


def test_select_takes_rows_in_the_order_given(pipe):
    trajectory, _ = run(pipe, scale=3.0)
    for rows in ([1], [1, 0], torch.tensor([1, 0])):
        part = trajectory.select(rows)
        order = torch.as_tensor(rows)
        assert torch.equal(part.log_probs, trajectory.log_probs[order])
        whole, cut = trajectory.streams["image"], part.streams["image"]
        assert torch.equal(cut.latents, whole.latents[order])
        assert part.num_samples == sum(c.num_samples for c in part.conditions) == len(order)
        for step, calls in part.conditions[0].steps.items():
            originals = trajectory.conditions[0].steps[step]
            for mine, original in zip(calls, originals, strict=True):
                for name in ("encoder_hidden_states", "timestep"):
                    assert torch.equal(mine.kwargs[name], original.kwargs[name][order])
                assert len(mine.kwargs["img_shapes"]) == len(order)


def test_select_everything_and_twice(pipe):
    trajectory, _ = run(pipe)
    assert_same(trajectory, trajectory.select([0, 1]))
    assert_same(trajectory.select([1, 0]).select([1, 0]), trajectory)


@pytest.mark.parametrize("rows", [[2], [-1], [], torch.tensor([True, False])])
def test_select_refuses_what_is_no_row(pipe, rows):
    with pytest.raises(RolloutParamsError, match=r"trajectory: no samples?"):
        run(pipe)[0].select(rows)


def test_cat_joins_what_select_takes_apart(pipe):
    trajectory, _ = run(pipe, WINDOW)
    joined = RolloutTrajectory.cat([trajectory.select([0]), trajectory.select([1])])
    assert torch.equal(joined.log_probs, trajectory.log_probs)
    assert torch.equal(joined.streams["image"].latents, trajectory.streams["image"].latents)
    assert [c.num_samples for c in joined.conditions] == [1, 1]
    assert joined.num_samples == 2


def test_parts_follow_the_rollouts(pipe):
    prompts = [["a", "b c"], ["some longer prompt", "d"]]
    chunks = [run(pipe, prompts=p, seeds=[i, i + 9])[0] for i, p in enumerate(prompts)]
    joined = RolloutTrajectory.cat(chunks)
    part = joined.select([3, 2, 0, 1, 3])
    assert [c.num_samples for c in part.conditions] == [2, 2, 1]
    assert torch.equal(part.log_probs, joined.log_probs[[3, 2, 0, 1, 3]])


def test_cat_refuses_rollouts_that_differ_in_more_than_rows(pipe):
    base = run(pipe)[0]
    others = {
        "params": run(pipe, RolloutParams(noise_level=0.6))[0],
        "guidance": run(pipe, scale=3.0)[0],
        "image.sigmas": run(pipe, sigmas=[1.0, 0.9, 0.5, 0.3])[0],
        "request": replace(base, request=dict(base.request) | {"height": 64, "width": 16}),
    }
    for what, other in others.items():
        with pytest.raises(RolloutParamsError, match=f"got different .*{what}"):
            RolloutTrajectory.cat([base, other])
    with pytest.raises(RolloutParamsError, match="nothing to join"):
        RolloutTrajectory.cat([])


def test_to_moves_every_tensor(pipe):
    moved = run(pipe)[0].to("meta")
    assert all(t.is_meta for t in tensors(moved))


# -- the joint log-prob ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("element", -1.5),
        ({"video": 0.5, "audio": 0.5}, -2.0),
        ({"video": 0.0, "audio": 1.0}, -3.0),
        ({"video": 1.0, "audio": 0.0}, -1.0),
        ({"audio": 1.0}, -3.0),
        ({"video": 1.0, "audio": 2}, -7.0),
    ],
)
def test_joint_log_prob_weights(weights, expected):
    trajectory = joint(weights)
    assert trajectory.log_probs.tolist() == [[expected]]
    assert trajectory.streams["audio"].log_probs.tolist() == [[-3.0]]


def test_a_deterministic_stream_does_not_dilute_the_joint_log_prob():
    trajectory = joint()
    video = replace(trajectory.streams["video"], sde_step_indices=())
    trajectory = replace(trajectory, streams=dict(trajectory.streams) | {"video": video})
    assert trajectory.log_probs.tolist() == [[-3.0]]


# -- on disk --------------------------------------------------------------------------------------


def test_save_and_load_give_it_back_bitwise(any_pipe, tmp_path):
    params = RolloutParams(sde_step_indices=[1, 2], stream_weights={"image": 1.0}, debug=True)
    trajectory, _ = run(any_pipe, params, scale=3.0, attention_kwargs={"scale": 1.0})
    trajectory.save(tmp_path / "a")
    loaded = RolloutTrajectory.load(tmp_path / "a")
    assert_same(trajectory, loaded)
    assert loaded.nbytes == trajectory.nbytes
    assert loaded.conditions[0].steps == map_calls(lambda _, x: x, loaded.conditions[0].steps)
    calls = zip(trajectory.conditions[0].steps[1], loaded.conditions[0].steps[1], strict=True)
    for a, b in calls:
        assert (a.module, a.autocast) == (b.module, b.autocast)
        assert a.kwargs["img_shapes"] == b.kwargs["img_shapes"]
        assert type(b.kwargs["img_shapes"][0][0]) is tuple
        assert a.kwargs["hidden_states"] == b.kwargs["hidden_states"]
        assert list(a.kwargs) == list(b.kwargs)


def test_strides_survive_the_disk(pipe, tmp_path):
    noise = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))[..., ::2]
    trajectory, _ = run(pipe, latents=noise, generator=None)
    first = trajectory.conditions[0].steps[0][0].kwargs["hidden_states"]
    assert first.stride() == noise.stride()
    trajectory.save(tmp_path)
    assert_same(trajectory, RolloutTrajectory.load(tmp_path))


def test_the_layout_of_a_state_survives_the_disk(pipe, tmp_path):
    noise = torch.randn(16, 2, 16, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    trajectory, _ = run(pipe, latents=noise, generator=None)
    assert trajectory.conditions[0].axis_orders == {0: {"image": (1, 0, 2)}}
    trajectory.save(tmp_path)
    loaded = RolloutTrajectory.load(tmp_path)
    assert_same(trajectory, loaded)
    assert loaded.conditions[0].axis_orders == trajectory.conditions[0].axis_orders


def test_half_a_trajectory_is_refused(pipe, tmp_path):
    run(pipe)[0].save(tmp_path)
    (tmp_path / "trajectory.safetensors").unlink()
    with pytest.raises(RolloutStateError, match=r"trajectory.safetensors is missing"):
        RolloutTrajectory.load(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"schema": 999}', "[]", "{", '{"schema": 1}'])
def test_another_schema_is_refused(pipe, tmp_path, text):
    run(pipe)[0].save(tmp_path)
    (tmp_path / "trajectory.json").write_text(text)
    with pytest.raises(RolloutStateError, match=r"trajectory: .*(schema|damaged)"):
        RolloutTrajectory.load(tmp_path)


def test_a_cut_file_is_refused(pipe, tmp_path):
    run(pipe)[0].save(tmp_path)
    file = tmp_path / "trajectory.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RolloutStateError, match="damaged"):
        RolloutTrajectory.load(tmp_path)


def test_a_save_that_fails_does_not_leave_an_older_document_behind(pipe, tmp_path, monkeypatch):
    run(pipe)[0].save(tmp_path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("miles_rollout.trajectory_io.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        run(pipe, seeds=[1, 2])[0].save(tmp_path)
    with pytest.raises(RolloutStateError, match=r"trajectory.json is missing"):
        RolloutTrajectory.load(tmp_path)


def test_the_document_is_plain_json(pipe, tmp_path):
    run(pipe)[0].save(tmp_path)
    assert json.loads((tmp_path / "trajectory.json").read_text())["schema"] == 2
    assert {f.name for f in tmp_path.iterdir()} == {"trajectory.json", "trajectory.safetensors"}


def test_trajectories_are_frozen(pipe):
    with pytest.raises(dataclasses.FrozenInstanceError):
        run(pipe)[0].params = RolloutParams()
