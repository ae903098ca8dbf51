"""Denoiser calls are recorded as they were, once, and refused where they cannot be."""

import pytest
import torch

from miles_rollout import RolloutParamsError, RolloutStateError
from miles_rollout.conditions import CallRecorder, StreamState, check_repeatable
from miles_rollout.replay_calls import Conditions


def record(*args, recorder=None, step=0, **kwargs):
    recorder = recorder or CallRecorder()
    recorder.record(step, "transformer", args, kwargs)
    return recorder, recorder.steps[step][-1]


def test_a_call_is_a_copy_of_its_whole_tree():
    inner = torch.ones(2)
    tree = {"a": [inner, (1, None, "x", 2.0, True, torch.bfloat16)]}
    _, call = record(inner, tree=tree)
    inner.fill_(9)
    tree["a"].append("later")
    assert call.args[0].tolist() == [1, 1]
    assert call.kwargs["tree"]["a"][0] is call.args[0]
    assert call.kwargs["tree"]["a"][1:] == [(1, None, "x", 2.0, True, torch.bfloat16)]


def test_a_plain_container_is_recorded_as_it_was_at_each_call():
    recorder, tree, prompt = CallRecorder(), {"scale": 1, "shapes": [(1, 4, 4)]}, torch.ones(1)
    steps = []
    for change in ({}, {"scale": 2}, {"scale": 2.0}, {"shapes": [(1, 4, 8)]}, {"scale": True}):
        tree.update(change)
        record(prompt, recorder=recorder, step=len(steps), tree=tree)
        steps.append(repr(tree))
    tree["shapes"].append("later")
    assert [repr(recorder.steps[i][0].kwargs["tree"]) for i in range(5)] == steps


def test_an_argument_that_cannot_be_stored_is_refused_by_name():
    message = "argument 'control' cannot be recorded for replay; got a set"
    with pytest.raises(RolloutParamsError, match=message):
        record(torch.ones(1), control={1})


def test_a_tensor_is_stored_again_only_after_it_changed():
    recorder, prompt = CallRecorder(), torch.ones(2)
    record(prompt, recorder=recorder)
    recorder.end_step()
    recorder.end_step()  # a step that was not recorded
    record(prompt, recorder=recorder, step=5)
    prompt.add_(1)
    record(prompt, recorder=recorder, step=6)
    first, again, changed = (recorder.steps[s][0].args[0] for s in (0, 5, 6))
    assert first is again
    assert (first.tolist(), changed.tolist()) == ([1, 1], [2, 2])


@pytest.mark.parametrize("inference", [False, True])
def test_the_state_is_left_to_the_trajectory_unless_it_changed(inference):
    with torch.inference_mode(inference):
        for change in (False, True):
            sample = torch.ones(2, 3)
            recorder, _ = record(sample, prompt=torch.ones(2))
            if change:
                sample.add_(1)
            recorder.resolve_state(0, "image", sample)
            left = recorder.steps[0][0].args[0]
            if change:
                assert torch.equal(left, torch.ones(2, 3))
            else:
                assert left == StreamState("image", torch.float32)


def test_one_sample_may_be_seen_in_another_shape_than_it_is_stepped():
    sample = torch.arange(6.0).view(1, 2, 3)
    recorder, _ = record([sample.view(2, 3)])
    recorder.resolve_state(0, "video", sample)
    state = recorder.steps[0][0].args[0][0]
    assert state == StreamState("video", torch.float32, (2, 3))
    assert torch.equal(state.of({"video": sample + 1}), sample[0] + 1)


def test_several_samples_in_another_shape_are_copied_since_rows_could_not_be_cut():
    sample = torch.arange(12.0).view(2, 2, 3)
    recorder, _ = record(sample.view(4, 3))
    recorder.resolve_state(0, "video", sample)
    assert torch.equal(recorder.steps[0][0].args[0], sample.view(4, 3))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.arange(3.0),
        torch.tensor(3.0),
    ],
)
def test_strides_are_kept(tensor):
    copy = record(tensor)[1].args[0]
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert copy.data_ptr() != tensor.data_ptr()


def test_rows_that_share_memory_get_their_own():
    copy = record(torch.ones(1, 3).expand(4, 3))[1].args[0]
    assert copy.is_contiguous()
    assert copy.shape == (4, 3)


def test_a_state_with_gaps_keeps_its_snapshot():
    sample = torch.arange(24.0).view(3, 8)[:, ::2]
    recorder, call = record(sample)
    recorder.resolve_state(0, "image", sample)
    assert recorder.steps[0][0].args[0] is call.args[0]
    assert not recorder.axis_orders


def test_a_transposed_state_is_filled_in_with_the_layout_it_had():
    sample = torch.arange(24.0).view(2, 3, 4).transpose(1, 2)
    recorder, _ = record(sample)
    recorder.resolve_state(0, "image", sample)
    recorder.resolve_state(1, "image", sample.contiguous())
    assert recorder.axis_orders == {0: {"image": (0, 2, 1)}}
    held = Conditions(
        num_samples=2, steps=recorder.steps, batch_axes={}, axis_orders=recorder.axis_orders
    )
    states = held.states(0, {"image": sample.contiguous()})
    assert torch.equal(states["image"], sample)
    assert states["image"].stride() == sample.stride()
    assert held.calls(0, states)[0].args[0] is states["image"]
    assert held.states(1, {"image": sample})["image"].is_contiguous()


def test_nothing_carries_a_graph():
    assert not record(torch.ones(2, requires_grad=True) * 2)[1].args[0].requires_grad


def conditions(axes, **kwargs):
    recorder, _ = record(**kwargs)
    return Conditions(num_samples=2, steps=recorder.steps, batch_axes=axes)


def test_rows_are_cut_along_the_declared_axes():
    whole = conditions(
        {"x": 0, "t": 1, "shared": None, "shapes": 0, "one": 0},
        x=torch.arange(2),
        t=torch.arange(6).view(3, 2),
        shared=torch.arange(2),
        shapes=["a", "b"],
        one=torch.ones(1, 3),
    )
    cut = whole.select([1]).steps[0][0].kwargs
    assert cut["x"].tolist() == [1]
    assert cut["t"].tolist() == [[1], [3], [5]]
    assert cut["shared"].tolist() == [0, 1]
    assert cut["shapes"] == ["b"]
    assert cut["one"].shape == (1, 3)  # broadcast to all rows


def test_an_undeclared_axis_is_refused_and_never_guessed():
    whole = conditions({"x": 0}, x=torch.ones(2), y=torch.ones(2))
    with pytest.raises(RolloutParamsError, match=r"batch axis .* 'y'; got declared \['x'\]"):
        whole.select([1])
    assert whole.select([0, 1]) is whole


def test_dropout_in_training_mode_is_refused():
    module = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Dropout(0.0))
    with pytest.raises(RolloutStateError, match=r"transformer draws dropout masks.* got p=0.1"):
        check_repeatable("transformer", module)
    check_repeatable("transformer", module.eval())
    check_repeatable("transformer", torch.nn.Dropout(0.0))


def test_a_row_is_cut_out_of_every_declared_block():
    recorder, _ = record(x=torch.arange(4), t=torch.arange(8).view(2, 4), one=torch.ones(1))
    whole = Conditions(
        num_samples=2,
        steps=recorder.steps,
        batch_axes={"x": 0, "t": 1, "one": 0},
        blocks={"x": 2, "t": 2, "one": 2},
    )
    cut = whole.select([1]).steps[0][0].kwargs
    assert cut["x"].tolist() == [1, 3]
    assert cut["t"].tolist() == [[1, 3], [5, 7]]
    assert cut["one"].shape == (1,)
    assert whole.select([1, 0]).select([1]).steps[0][0].kwargs["x"].tolist() == [0, 2]


def test_blocks_that_nobody_declared_are_refused_and_never_guessed():
    whole = conditions({"x": 0}, x=torch.ones(4))
    with pytest.raises(RolloutParamsError, match=r"'x' should hold 1 x 2 rows; got 4; declare"):
        whole.select([1])


def test_a_list_with_an_entry_a_row_is_cut_as_a_list_whatever_the_entries_are():
    rows = [torch.arange(3.0) + row for row in range(4)]
    recorder, _ = record([row.view(1, 3) for row in rows], texts=rows, names=["a", "b"])
    whole = Conditions(
        num_samples=2,
        steps=recorder.steps,
        batch_axes={"0": 0, "texts": 0, "names": 0},
        blocks={"0": 2, "texts": 2},
    )
    cut = whole.select([1]).steps[0][0]
    assert [row[0, 0].item() for row in cut.args[0]] == [1, 3]
    assert [row.tolist() for row in cut.kwargs["texts"]] == [[1, 2, 3], [3, 4, 5]]
    assert cut.kwargs["names"] == ["b"]


def test_a_step_may_hold_fewer_blocks_than_declared_and_no_part_of_one():
    for size, chosen in ((2, [1]), (4, [1, 3])):
        recorder, _ = record(x=torch.arange(size), rows=list(range(size)))
        axes, blocks = {"x": 0, "rows": 0}, {"x": 2, "rows": 2}
        whole = Conditions(num_samples=2, steps=recorder.steps, batch_axes=axes, blocks=blocks)
        cut = whole.select([1]).steps[0][0].kwargs
        assert cut["x"].tolist() == cut["rows"] == chosen
    for value in (torch.arange(3), list(range(6)), []):
        recorder, _ = record(x=value)
        whole = Conditions(num_samples=2, steps=recorder.steps, batch_axes=axes, blocks=blocks)
        with pytest.raises(RolloutParamsError, match=f"hold 2 x 2 rows; got {len(value)}; declare"):
            whole.select([1])


def test_what_stands_before_a_state_is_kept_once_and_the_state_not_at_all():
    recorder, rows = CallRecorder(), torch.arange(10.0).view(5, 2)
    for step in range(3):
        record(recorder=recorder, step=step, x=rows[None])
        recorder.resolve_state(step, "video", rows[2:][None])
        recorder.end_step()
        rows[2:] += 1
    stands = [recorder.steps[step][0].kwargs["x"] for step in range(3)]
    assert stands == [StreamState("video", torch.float32)] * 3
    assert all(stand.front is stands[0].front for stand in stands)
    assert stands[0].front.untyped_storage().nbytes() == 4 * 4
    states = {"video": torch.full((1, 3, 2), 7.0)}
    filled = stands[1].of(states)
    assert filled[0].tolist() == [[0, 1], [2, 3], [7, 7], [7, 7], [7, 7]]
    assert filled.is_contiguous()


def test_what_stands_before_a_state_may_change_from_step_to_step():
    recorder, rows = CallRecorder(), torch.arange(10.0).view(5, 2)
    for step in range(2):
        record(recorder=recorder, step=step, x=rows[None])
        recorder.resolve_state(step, "video", rows[2:][None])
        recorder.end_step()
        rows += 1
    fronts = [recorder.steps[step][0].kwargs["x"].front for step in range(2)]
    assert [front[0, 0].tolist() for front in fronts] == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    "sample_of",
    [
        lambda rows: rows[2:].clone()[None],
        lambda rows: rows[1:4][None],
        lambda rows: rows[:, 1:][None],
        lambda rows: rows[2:].view(1, 2, 3),
        lambda rows: rows[2:],
        lambda rows: rows[3:].view(torch.int32)[None],
    ],
)
def test_what_is_not_the_end_of_an_argument_is_no_state(sample_of):
    recorder, rows = CallRecorder(), torch.arange(10.0).view(5, 2)
    record(recorder=recorder, x=rows[None])
    recorder.resolve_state(0, "video", sample_of(rows))
    assert torch.equal(recorder.steps[0][0].kwargs["x"], rows[None])


def test_a_state_that_was_changed_after_the_call_is_none():
    recorder, rows = CallRecorder(), torch.arange(10.0).view(5, 2)
    record(recorder=recorder, x=rows[None])
    rows[4] = 0
    recorder.resolve_state(0, "video", rows[2:][None])
    assert recorder.steps[0][0].kwargs["x"][0, 4].tolist() == [8, 9]


def test_states_of_inference_tensors_are_told_by_their_values():
    with torch.inference_mode():
        recorder, rows = CallRecorder(), torch.arange(10.0).view(5, 2)
        record(recorder=recorder, x=rows[None])
        recorder.resolve_state(0, "video", rows[2:][None])
        record(recorder=recorder, step=1, x=rows[None])
        rows[4] = 0
        recorder.resolve_state(1, "video", rows[2:][None])
    front = recorder.steps[0][0].kwargs["x"].front
    assert front[0].tolist() == [[0, 1], [2, 3]]
    assert not front.is_inference()
    assert recorder.steps[1][0].kwargs["x"][0, 4].tolist() == [8, 9]
