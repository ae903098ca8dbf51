"""What a rollout cannot do is refused by name, before the denoiser computes."""

import copy

import pytest
import torch
from diffusers import QwenImagePipeline

from miles_rollout import RolloutParams, RolloutParamsError, RolloutStateError, rollout
from tests.miles_rollout.tiny import ODE, PROMPTS, SEEDS, Calls, call, generators, run

NOISY = RolloutParams()


def test_a_second_rollout_of_the_pipeline_is_refused(pipe):
    with rollout(pipe, NOISY, SEEDS):
        with (
            pytest.raises(RolloutStateError, match="the pipeline is already in a rollout"),
            rollout(pipe, NOISY, SEEDS),
        ):
            raise AssertionError
        call(pipe)


def test_a_pipeline_that_shares_the_denoiser_is_refused(pipe):
    sharing = QwenImagePipeline(**pipe.components)
    with rollout(pipe, NOISY, SEEDS):
        with (
            pytest.raises(RolloutStateError, match="transformer is already in a rollout"),
            rollout(sharing, NOISY, SEEDS),
        ):
            raise AssertionError
        call(pipe)
    sharing.set_progress_bar_config(disable=True)
    run(sharing)


def test_a_second_call_in_one_scope_is_refused(pipe):
    with rollout(pipe, NOISY, SEEDS):
        call(pipe)
        with pytest.raises(RolloutStateError, match="called twice in one scope"):
            call(pipe)


def test_a_scope_without_a_call_is_refused(pipe):
    message = "no denoising step was taken in the scope; got no pipeline call"
    with pytest.raises(RolloutStateError, match=message), rollout(pipe, NOISY, SEEDS):
        pass


def test_an_interrupted_loop_is_refused(pipe):
    def interrupt(pipe, step, _, __):
        pipe._interrupt = step == 1
        return {}

    message = r"stream 'image' was interrupted after 2 of 4 steps; .* run the whole loop"
    with pytest.raises(RolloutStateError, match=message):
        run(pipe, callback_on_step_end=interrupt)


@pytest.mark.parametrize("in_place", [False, True])
def test_changing_a_latent_next_to_a_stochastic_step_is_refused(pipe, in_place):
    def change(_, step, __, tensors):
        if step != 1:
            return {}
        return {"latents": tensors["latents"].add_(1) if in_place else tensors["latents"] + 1}

    message = "stream 'image' was changed between steps 1 and 2, next to a stochastic step"
    for steps in ([1], [2]):
        with pytest.raises(RolloutStateError, match=message):
            run(pipe, RolloutParams(sde_step_indices=steps), callback_on_step_end=change)
    run(pipe, RolloutParams(sde_step_indices=[0, 3]), callback_on_step_end=change)


def test_handing_on_an_equal_latent_is_fine(pipe):
    plain = run(pipe)[0]
    handed = run(pipe, callback_on_step_end=lambda _, __, ___, t: {"latents": t["latents"].clone()})
    assert torch.equal(plain.log_probs, handed[0].log_probs)


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ([1], "got 1 seeds for 2 rows; pass 2 seeds"),
        ([1, 2, 3], "got 3 seeds for 2 rows; pass 2 seeds"),
        ([], "no seeds"),
        ([True, 2], "seeds must be ints, one a row; got True"),
    ],
)
def test_wrong_seeds_are_refused_before_the_denoiser_computes(pipe, seeds, message):
    computed = []
    handle = pipe.transformer.img_in.register_forward_hook(lambda *_: computed.append(1))
    with pytest.raises((RolloutParamsError, TypeError), match=message):
        run(pipe, seeds=seeds)
    handle.remove()
    assert not computed


@pytest.mark.parametrize(
    "params",
    [{"sde_step_indices": [4]}, {"return_step_indices": [5]}, {"sde_type": "cps", "sde_step_indices": [3]}],
)  # fmt: skip
def test_wrong_indices_are_refused_before_the_denoiser_is_called(pipe, params):
    with (
        Calls(pipe.transformer) as calls,
        pytest.raises(RolloutParamsError, match=r"of 4|has [45]"),
    ):
        run(pipe, RolloutParams(**params))
    assert len(calls) == 0


@pytest.mark.parametrize("field", ["sde_streams", "stream_weights"])
def test_an_unknown_stream_is_refused_before_anything_runs(pipe, field):
    value = ["vidoe"] if field == "sde_streams" else {"vidoe": 1.0}
    message = f"RolloutParams.{field}: no such stream; got 'vidoe'; choose among image"
    with Calls(pipe.text_encoder) as calls, pytest.raises(RolloutParamsError, match=message):
        run(pipe, RolloutParams(**{field: value}))
    assert len(calls) == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"generator": None}, "the initial noise would come from the global RNG"),
        ({"num_images_per_prompt": 2}, "num_images_per_prompt pairs prompts with other prompts'"),
        ({"height": 36}, "height must be divisible by 8, or the pipeline rounds it; got 36"),
        ({"width": 31}, "width must be divisible by 8"),
    ],
)
def test_requests_that_would_go_wrong_are_refused(pipe, kwargs, message):
    how = {"height": 32, "width": 32, "generator": generators()} | kwargs
    with Calls(pipe.text_encoder) as calls:
        with pytest.raises(RolloutParamsError, match=message), rollout(pipe, NOISY, SEEDS):
            pipe(PROMPTS, num_inference_steps=4, **how)
        assert len(calls) == 0


def test_a_denoiser_with_a_cache_is_refused(pipe):
    from diffusers import FirstBlockCacheConfig

    cached = copy.deepcopy(pipe)
    cached.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(RolloutParamsError, match=r"call transformer.disable_cache\(\) first"):
        run(cached)


def test_other_objects_are_refused():
    with (
        pytest.raises(RolloutParamsError, match="needs a diffusers pipeline; got dict"),
        rollout({}, NOISY, [1]),
    ):
        raise AssertionError


def test_a_velocity_that_is_not_finite_stops_the_rollout(pipe):
    """Two guidance branches that cancel have norm 0, and the rescale divides by it."""

    def poison(_, __, output):
        bad = output[0].clone()
        bad[1, 0] = float("nan")
        return (bad,)

    handle = pipe.transformer.register_forward_hook(poison)
    for params, where in ((NOISY, "log-prob of step 0"), (ODE, "final latent")):
        with pytest.raises(RolloutStateError, match=f"sample 1 .* not finite; .* {where}"):
            run(pipe, params)
    handle.remove()
