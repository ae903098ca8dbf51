"""What a config and its model family must agree on.

An adapter says which arguments a pipeline takes, how many steps it makes of them, and which streams
it has. So this is checked as soon as the family is known: by the pipeline's name, before a weight is
read, or else when it has been loaded and before a prompt is encoded.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from miles_rollout import RolloutEngine
from miles_rollout.call_signature import call_defaults
from miles_rollout.pipelines import GenericAdapter, PipelineAdapter
from trainers.config_loader import ConfigError
from trainers.rollout_config import OWN_KEYS, EvalConfig, RolloutConfig
from trainers.short_schedule import check_schedule

_OF_THE_ENGINE = frozenset({"max_sequence_length"})
"""Arguments that the engine takes for every family."""


def resolve_chunks(
    rollout: RolloutConfig, evaluation: EvalConfig, adapter: PipelineAdapter
) -> tuple[RolloutConfig, EvalConfig]:
    """Both with chunks of one row where nothing else is possible. Raises for any other size."""
    if not adapter.one_sample:
        return rollout, evaluation
    for where, config in (("rollout", rollout), ("eval", evaluation)):
        if config.chunk_size not in (None, 1):
            raise ConfigError(
                f"{where}.chunk_size: this pipeline takes one sample a call; got "
                f"{config.chunk_size}; set 1 or null"
            )
    return replace(rollout, chunk_size=1), replace(evaluation, chunk_size=1)


def check_family(
    name: str,
    denoisers: Sequence[str],
    rollout: RolloutConfig,
    evaluation: EvalConfig,
    adapter: PipelineAdapter,
) -> None:
    """Raise ``ConfigError`` for what this family does not take, or would take without effect.

    ``name`` is the pipeline's, and ``denoisers`` those that are to be trained, if they are named.
    """
    if isinstance(adapter, GenericAdapter):
        raise ConfigError(
            f"model.pipeline: this pipeline class has no adapter, so it cannot be trained; got "
            f"{name!r}; add one to miles_rollout/pipelines"
        )
    for denoiser in denoisers:
        if denoiser not in adapter.denoisers:
            raise ConfigError(
                f"model.denoisers: this pipeline has no such denoiser; got {denoiser}; choose among "
                f"{', '.join(adapter.denoisers)}"
            )
    _check_arguments(rollout, adapter)
    for where, points in (
        ("rollout", rollout.num_inference_steps),
        ("eval", evaluation.num_inference_steps),
    ):
        try:
            adapter.check_sampling(rollout.arguments(points))
        except ValueError as error:
            raise ConfigError(f"{where}: {str(error).removeprefix('rollout: ')}") from error
    _check_guidance(rollout, adapter)
    try:
        rollout.check_window(adapter.num_steps(rollout.num_inference_steps))
    except ValueError as error:
        raise ConfigError(f"rollout: {error}") from error
    after = rollout.steps_after_window
    if after is not None and adapter.base_sigmas(rollout.num_inference_steps) is None:
        _refuse(
            "steps_after_window",
            "the schedule of this pipeline is its scheduler's, and a call cannot cut it",
            after,
            "set null",
        )
    _check_streams(rollout, adapter)


def check_inputs(key: str, inputs: Sequence[Mapping[str, Any]], adapter: PipelineAdapter) -> None:
    """Raise ``ConfigError`` for what the prompts of ``key`` come with and the family does not take."""
    unknown = sorted({name for given in inputs for name in given} - adapter.inputs)
    if unknown:
        raise ConfigError(
            f"{key}: this pipeline takes no such input; got {', '.join(unknown)}; it takes "
            f"{', '.join(sorted(adapter.inputs)) or 'none'}"
        )


def check_request(
    rollout: RolloutConfig,
    evaluation: EvalConfig,
    engine: RolloutEngine,
    inputs: Sequence[Mapping[str, Any]],
) -> None:
    """What only a loaded pipeline can refuse, such as a size, before a prompt is encoded.

    ``inputs``: what prompts come with; the first entry stands for all.
    """
    pipe, adapter = engine.pipe, engine.adapter
    defaults = call_defaults(type(pipe))
    call = {"prompt": ["a prompt"], "generator": torch.Generator(), **inputs[0]}
    base = {**defaults, **adapter.fixed, **_unguided(rollout, adapter), **call}
    for key, points in (
        ("rollout", rollout.num_inference_steps),
        ("eval", evaluation.num_inference_steps),
    ):
        try:
            adapter.check_request(pipe, base | rollout.arguments(points))
        except ValueError as error:
            raise ConfigError(f"{key}: {str(error).removeprefix('rollout: ')}") from error
    if rollout.steps_after_window is not None:
        check_schedule(pipe, rollout.steps_after_window)


def makes_video(rollout: RolloutConfig, adapter: PipelineAdapter) -> bool:
    """Whether the samples are videos and not pictures."""
    return "num_frames" in adapter.sampling and rollout.num_frames != 1


def _check_arguments(rollout: RolloutConfig, adapter: PipelineAdapter) -> None:
    known = adapter.sampling | _OF_THE_ENGINE
    for name, value in rollout.arguments().items():
        if name in known:
            continue
        key = name if name in OWN_KEYS else f"sampling.{name}"
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "leave it out"
        if name == "true_cfg_scale":
            by = adapter.scale_argument
            hint = f"guidance goes by {by} here" if by else "the model is never guided"
        _refuse(key, "this pipeline takes no such argument", value, f"{hint}; {_listed(known)}")


def _unguided(rollout: RolloutConfig, adapter: PipelineAdapter) -> dict[str, Any]:
    """What the engine gives where no guidance is asked for, whatever the pipeline's defaults are."""
    argument = adapter.scale_argument
    asked = (
        largest_scale(rollout, adapter) > adapter.scale_off and adapter.implied_negative is not None
    )
    if argument is None or asked or rollout.negative_prompt is not None:
        return {}
    return {argument: adapter.scale_off, **dict.fromkeys(adapter.more_scale_arguments)}


def largest_scale(rollout: RolloutConfig, adapter: PipelineAdapter) -> float:
    """The largest scale of guidance that is asked for, by the arguments that guide this family."""
    given = rollout.arguments()
    names = (adapter.scale_argument or "", *adapter.more_scale_arguments)
    scales = [value for n in names if (value := given.get(n)) is not None]
    return max(scales, default=adapter.scale_off)


def _check_guidance(rollout: RolloutConfig, adapter: PipelineAdapter) -> None:
    argument = adapter.scale_argument
    if argument is None:
        if rollout.negative_prompt is not None:
            _refuse(
                "negative_prompt",
                "the model is never guided",
                repr(rollout.negative_prompt),
                "set it null",
            )
        return
    given = rollout.arguments()
    if argument not in adapter.sampling and argument not in given:
        return  # guided by a component of the pipeline
    off = adapter.scale_off
    scale = largest_scale(rollout, adapter)
    if scale <= off and rollout.negative_prompt is not None:
        _refuse(
            "negative_prompt",
            f"has no effect at {argument} {scale}",
            repr(rollout.negative_prompt),
            f"set {argument} above {off:g} or negative_prompt null",
        )
    if scale > off and rollout.negative_prompt is None and adapter.implied_negative is None:
        _refuse(
            argument,
            "has no effect without a negative prompt",
            scale,
            f'set negative_prompt " " or {argument} {off:g}',
        )


def _check_streams(rollout: RolloutConfig, adapter: PipelineAdapter) -> None:
    weights = {} if isinstance(rollout.stream_weights, str) else rollout.stream_weights
    streams = adapter.request_streams(rollout.arguments())
    for key, names in (("sde_streams", rollout.sde_streams or ()), ("stream_weights", weights)):
        for name in names:
            if name not in streams:
                _refuse(key, "no such stream", name, f"choose among {', '.join(streams)}")
    if not weights:
        return
    stochastic = rollout.sde_streams or streams
    for name in stochastic:
        if name not in weights:
            _refuse(
                "stream_weights",
                f"no weight for the stochastic stream {name}",
                dict(weights),
                "add it, with 0 to leave it out, or name the others in rollout.sde_streams",
            )
    for name in weights:
        if name not in stochastic:
            _refuse(
                "stream_weights",
                f"has no effect on {name}, which is not stochastic",
                dict(weights),
                f"leave it out, or add {name} to rollout.sde_streams",
            )


def _listed(known: frozenset[str]) -> str:
    return f"it takes {', '.join(sorted(known))}"


def _refuse(key: str, problem: str, value: Any, advice: str) -> NoReturn:
    raise ConfigError(f"rollout.{key}: {problem}; got {value}; {advice}")
