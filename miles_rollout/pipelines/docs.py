"""``docs/models.md`` from the adapters: ``python -m miles_rollout.pipelines.docs``.

Prints the page. What a family has and refuses is read from its adapter, which also checks requests
with it, so the page says what the code does; a test compares the two. What is said of diffusers'
features is what ``tests/miles_rollout/test_diffusers_features.py`` tries, by the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from miles_rollout.families import RELEASED, class_name_of
from miles_rollout.loading import TINY_PIPELINES
from miles_rollout.pipelines import ADAPTERS, REFUSED, PipelineAdapter, adapter_named

INTRODUCTION = """\
# Models

Written by `python -m miles_rollout.pipelines.docs > docs/models.md`. Do not edit it by hand: a test
compares it with the adapters.

A family is supported when rollout, replay with gradients and decoding are bitwise what its own pipeline
computes, on a tiny pipeline of its real classes. Any other pipeline whose scheduler integrates a flow can be
rolled out by `rollout(pipe, params, seeds)`, but not replayed. What cannot be rolled out is refused by
name before the denoiser runs: no argument is dropped or corrected in silence.
"""

EVERYWHERE = """\
For every model these are refused as well: a call without `generator=` or `latents=`, a second call in one
scope, a height, width or frame count that the pipeline would round (MiniMax H3 warns of frames), dropout
in training mode, a latent that a callback changes next to a stochastic step, and the caches below.
"""


class Feature(NamedTuple):
    """Something that diffusers can do to a pipeline, and what becomes of it in a rollout."""

    name: str
    how: str
    allowed: bool
    trains: bool
    """A LoRA gets its gradient through a replay."""
    note: str = ""


_CACHE = "a block's output depends on earlier steps, so that no step could be replayed by itself"
FEATURES = (
    Feature("model CPU offload", "pipe.enable_model_cpu_offload", True, True),
    Feature(
        "sequential CPU offload",
        "accelerate.cpu_offload(transformer)",
        True,
        False,
        "a replay with gradients is refused: weights that leave the device get none",
    ),
    Feature("group offload, blocks", "transformer.enable_group_offload", True, True),
    Feature("group offload, leaves", "pipe.enable_group_offload", True, True),
    Feature(
        "layerwise casting",
        "transformer.enable_layerwise_casting",
        True,
        True,
        "float8 storage; the LoRA is attached first",
    ),
    Feature("fused QKV", "transformer.fuse_qkv_projections", True, True),
    Feature("compiled denoiser", "transformer.compile", True, True, "backend aot_eager, float32"),
    Feature(
        "compiled blocks",
        "transformer.compile_repeated_blocks",
        True,
        True,
        "backend eager, float32",
    ),
    Feature(
        "compiled copy",
        "pipe.transformer = torch.compile(..)",
        True,
        True,
        "backend eager, float32",
    ),
    Feature(
        "torchao base",
        "torchao.quantization.quantize_",
        True,
        True,
        "int8 weights; skipped where torchao is not installed",
    ),
    Feature(
        "quanto base",
        "optimum.quanto.quantize",
        True,
        True,
        "int8 weights; skipped where optimum-quanto is not installed",
    ),
    Feature(
        "bitsandbytes base",
        "bitsandbytes.nn.Linear4bit",
        True,
        True,
        "4-bit blocks; skipped where bitsandbytes is not installed",
    ),
    Feature("attention slicing", "pipe.enable_attention_slicing", True, True),
    Feature(
        "attention backend",
        "transformer.set_attention_backend",
        True,
        True,
        "_native_math; diffusers keeps it for the process",
    ),
    Feature("VAE tiling and slicing", "vae.enable_tiling", True, True, "decoded by tiles as stock"),
    Feature("gradient checkpointing", "transformer.enable_gradient_checkpointing", True, True),
    Feature("channels last", "transformer.to(memory_format=..)", True, True),
    Feature(
        "fused LoRA",
        "transformer.fuse_lora",
        True,
        False,
        "it is a part of the base, and not trained",
    ),
    Feature("FirstBlockCache", "transformer.enable_cache", False, False, _CACHE),
    Feature("TaylorSeer", "transformer.enable_cache", False, False, _CACHE),
    Feature("MagCache", "transformer.enable_cache", False, False, _CACHE),
    Feature("SeaCache", "transformer.enable_cache", False, False, _CACHE),
    Feature("TextKVCache", "transformer.enable_cache", False, False, _CACHE),
    Feature("FasterCache", "transformer.enable_cache", False, False, _CACHE),
    Feature("PyramidAttentionBroadcast", "transformer.enable_cache", False, False, _CACHE),
    Feature(
        "a cache applied by hand", "apply_first_block_cache(transformer)", False, False, _CACHE
    ),
)

AFTERWARDS = """\
Offload is tried with the CPU as the device that weights return to, and sequential offload on the denoiser
alone: the stock call of the whole tiny pipeline fails under it, in accelerate. Not tried: loading 4-bit and 8-bit
weights by bitsandbytes, which needs a GPU; attention packages (flash, sage, xformers); context and
tensor parallelism inside of a denoiser. Switch a feature on before the rollout and leave it on for the
replay: what it changes in the last bits is then in both. Inductor, the default backend of
`torch.compile`, replayed bitwise on the tiny Qwen-Image, with gradients too; it may fuse a graph with
gradients otherwise than one without, so look at `train/ratio_abs_minus_1` on a model of yours.
"""


def render() -> str:
    """The page."""
    sections = [INTRODUCTION, _overview(), "## Model by model\n", EVERYWHERE]
    sections += [_family(name) for name in ADAPTERS]
    sections += ["## Pipelines that are refused\n", _refused_pipelines()]
    sections += ["## diffusers features inside a rollout\n", _features(), AFTERWARDS]
    return "\n".join(sections)


def _overview() -> str:
    rows = []
    for name in ADAPTERS:
        adapter = adapter_named(name)
        rows.append(
            (
                f"`{name}`",
                _listed(hub for hub, held in RELEASED.items() if held == name),
                _listed(tiny for tiny in sorted(TINY_PIPELINES) if class_name_of(tiny) == name),
                ", ".join(adapter.streams),
                _listed(adapter.denoisers),
                "one" if adapter.one_sample or adapter.packed else "any",
                _guidance(adapter),
                _listed(sorted(adapter.inputs)),
            )
        )
    heads = (
        "pipeline",
        "by hub name",
        "tiny",
        "streams",
        "denoisers",
        "samples a call",
        "guidance",
        "a prompt's inputs",
    )
    return "## What there is\n\n" + _table(heads, rows)


def _guidance(adapter: PipelineAdapter) -> str:
    if adapter.scale_argument is None:
        return "none: it is distilled, or a component of the pipeline"
    scales = " or ".join(f"`{n}`" for n in (adapter.scale_argument, *adapter.more_scale_arguments))
    on = f"{scales} > {adapter.scale_off:g}"
    if adapter.implied_negative is None:
        return f"{on} and a negative prompt"
    return f"{on}; the negative prompt is {adapter.implied_negative!r} if there is none"


def _family(name: str) -> str:
    adapter = adapter_named(name)
    lines = [f"### {name}\n", f"Sampling arguments: {_listed(sorted(adapter.sampling))}.\n"]
    if adapter.fixed:
        fixed = _listed(f"{key}={value!r}" for key, value in adapter.fixed.items())
        lines.append(f"Every call needs {fixed}; the engine gives it.\n")
    if adapter.base_sigmas(2) is not None:
        lines.append("Its schedule can be cut after the window: `rollout.steps_after_window`.\n")
    rows = [(f"`{argument}`", why) for argument, why in adapter.refused.items()]
    if rows:
        lines.append(_table(("refused", "why"), rows))
    return "\n".join(lines)


def _refused_pipelines() -> str:
    return _table(("pipeline", "why"), [(f"`{name}`", why) for name, why in REFUSED.items()])


def _features() -> str:
    """Each is tried by a test on the tiny Qwen-Image, in float32 and bfloat16, with guidance."""
    rows = [(f.name, f"`{f.how}`", _promise(f), f.note) for f in FEATURES]
    text = (
        "On the tiny Qwen-Image with guidance and a LoRA, in float32 and bfloat16. Allowed means: with the\n"
        "feature on, a rollout without stochastic steps is bitwise the stock call, and a replay bitwise the\n"
        "rollout.\n\n"
    )
    return text + _table(("feature", "by", "in a rollout", ""), rows)


def _promise(feature: Feature) -> str:
    if not feature.allowed:
        return "refused"
    return "allowed, trains" if feature.trains else "allowed, does not train"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def lines() -> Iterator[str]:
        yield "| " + " | ".join(heads) + " |"
        yield "|" + "---|" * len(heads)
        for row in rows:
            yield "| " + " | ".join(row) + " |"

    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    print(render(), end="")
