"""docs/models.md is what its generator prints, and what it calls refused is refused."""

import inspect
from pathlib import Path

import diffusers
import pytest

from miles_rollout import RolloutParamsError, rollout
from miles_rollout.families import class_name_of
from miles_rollout.loading import TINY_PIPELINES
from miles_rollout.pipelines import ADAPTERS, adapter_named
from miles_rollout.pipelines.docs import render
from tests.miles_rollout.models import MODELS, load
from tests.miles_rollout.tiny import ODE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def adapter_of(name):
    try:
        return adapter_named(name)
    except (ImportError, RolloutParamsError) as error:
        pytest.skip(f"diffusers {diffusers.__version__} is too old for {name}: {error}")


def signature_of(name):
    pipe_class = getattr(diffusers, name, None)
    if pipe_class is None:
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    return inspect.signature(pipe_class.__call__).parameters


def test_the_models_page_is_what_its_generator_prints():
    for name in ADAPTERS:
        adapter_of(name)
    message = "run: python -m miles_rollout.pipelines.docs > docs/models.md"
    assert PAGE.read_text() == render(), message


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_is_refused_is_an_argument_of_the_pipeline_that_the_engine_does_not_offer(name):
    adapter = adapter_of(name)
    assert not set(adapter.refused) & (adapter.sampling | set(adapter.fixed) | adapter.inputs)
    parameters = signature_of(name)
    for argument in adapter.refused:
        assert argument in parameters, argument


def other_than(default):
    if isinstance(default, bool):
        return not default
    return 2 if isinstance(default, int) else [0]


@pytest.mark.parametrize("tiny", sorted(MODELS.keys() & TINY_PIPELINES.keys()))
def test_what_the_page_calls_refused_is_refused_by_its_words_before_anything_runs(tiny):
    name = class_name_of(tiny)
    adapter, parameters = adapter_of(name), signature_of(name)
    pipe = load(tiny)
    handles = [
        module.register_forward_pre_hook(lambda *_: pytest.fail("ran"))
        for module in pipe.components.values()
        if hasattr(module, "register_forward_pre_hook")
    ]
    try:
        for argument, reason in adapter.refused.items():
            default = parameters[argument].default
            value = other_than(default)
            with pytest.raises(RolloutParamsError) as found, rollout(pipe, ODE, [1]) as session:
                pipe(prompt="a cat", generator=session.generators, **{argument: value})
            why, _, advice = reason.partition("; ")
            advice = advice or f"set it to {default}"
            assert str(found.value) == f"rollout: {why}; got {argument} {value}; {advice}"
    finally:
        for handle in handles:
            handle.remove()


def test_an_argument_at_its_default_is_no_refusal():
    pipe = load("tiny-flux")
    for argument in adapter_named("FluxPipeline").refused:
        default = signature_of("FluxPipeline")[argument].default
        with rollout(pipe, ODE, [1]) as session:
            pipe(
                "a cat",
                height=32,
                width=32,
                num_inference_steps=1,
                generator=session.generators,
                output_type="latent",
                **{argument: default},
            )
        assert session.trajectory.num_samples == 1
