"""What `RolloutEngine.generate` is asked for: checked where it is called, then cut into chunks."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from miles_rollout.errors import RolloutParamsError
from miles_rollout.noise import derive_seed, keyed_generator
from miles_rollout.shared_prefix import SharedPrefix


class Row(NamedTuple):
    """One sample: the position of its prompt, and its number in its group."""

    prompt: int
    sample: int


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """``group_size`` samples of every prompt. Raises ``RolloutParamsError`` for what cannot be."""

    prompts: Sequence[str]
    prompt_ids: Sequence[int]
    metadata: Sequence[Mapping[str, Any]]
    group_size: int
    chunk_size: int
    seed: int
    iteration: int
    same_noise: bool
    share_prefix: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.prompts, str) or not self.prompts:
            _refuse("needs a list of prompts", repr(self.prompts), "pass [..]")
        for name in ("group_size", "chunk_size"):
            size = getattr(self, name)
            if isinstance(size, bool) or size < 1:
                _refuse(f"{name} must be >= 1", size, f"set {name}")
        for name in ("metadata", "prompt_ids"):
            if len(getattr(self, name)) != len(self.prompts):
                _refuse(
                    f"one {name} entry a prompt",
                    f"{len(getattr(self, name))} for {len(self.prompts)} prompts",
                    "pass as many",
                )
        if self.share_prefix and not self.same_noise:
            _refuse(
                "share_prefix needs samples that start from one noise",
                "same_noise=False",
                "set same_noise=True, or share_prefix=False",
            )
        if self.share_prefix and len(self.prompts) % self.chunk_size:
            _refuse(
                "share_prefix needs chunks of the same prompts",
                f"chunk_size {self.chunk_size} for {len(self.prompts)} prompts",
                "set a chunk_size that divides the number of prompts",
            )
        ids = list(self.prompt_ids)
        if len(set(ids)) != len(ids):
            _refuse("prompt_ids tell groups apart", f"repeats in {ids}", "pass distinct ids")
        # 1, 1.0 and True are one number and three keys.
        keys = [("seed", self.seed), ("iteration", self.iteration)]
        for name, key in keys + [("a prompt id", i) for i in ids]:
            if isinstance(key, bool) or not isinstance(key, int):
                _refuse(f"{name} must be an int", repr(key), "pass an int")

    def chunks(self) -> Iterator[list[Row]]:
        """Sample 0 of every prompt, then sample 1, in runs of ``chunk_size`` rows."""
        prompts = range(len(self.prompts))
        rows = [Row(p, g) for g in range(self.group_size) for p in prompts]
        for start in range(0, len(rows), self.chunk_size):
            yield rows[start : start + self.chunk_size]

    def prefixes(self) -> Iterator[SharedPrefix | None]:
        """What each chunk shares with the chunks of the same prompts; let go after the last one."""
        held: dict[tuple[int, ...], SharedPrefix] = {}
        chunks = [tuple(row.prompt for row in rows) for rows in self.chunks()]
        for i, prompts in enumerate(chunks):
            if not self.share_prefix:
                yield None
                continue
            prefix = held.setdefault(prompts, SharedPrefix())
            if prompts not in chunks[i + 1 :]:
                del held[prompts]
            yield prefix

    def seeds(self, rows: Sequence[Row]) -> list[int]:
        """The seed of each row's transitions."""
        return [derive_seed("sample", *self._key(p, g)) for p, g in rows]

    def generators(self, rows: Sequence[Row]) -> list[torch.Generator]:
        """The generator of each row's initial noise."""
        samples = [(p, 0 if self.same_noise else g) for p, g in rows]
        return [keyed_generator("initial_noise", *self._key(p, g)) for p, g in samples]

    def _key(self, prompt: int, sample: int) -> tuple[int, int, int, int]:
        return self.seed, self.iteration, self.prompt_ids[prompt], sample


def check_sampling(sampling: Collection[str], known: Collection[str]) -> None:
    """Refuse pipeline arguments that the adapter does not know, by name."""
    unknown = sorted(set(sampling) - set(known))
    if unknown:
        _refuse(
            "no such sampling argument",
            ", ".join(unknown),
            f"choose among {', '.join(sorted(known))}",
        )


def check_inputs(
    inputs: Sequence[Mapping[str, Any]] | None, count: int, known: Collection[str]
) -> None:
    """Refuse inputs that are not one mapping a prompt, or that the adapter does not know."""
    if inputs is None:
        return
    if len(inputs) != count:
        _refuse(
            "one entry of inputs a prompt", f"{len(inputs)} for {count} prompts", "pass as many"
        )
    for name in {name for given in inputs for name in given}:
        if name not in known:
            advice = f"choose among {', '.join(sorted(known))}" if known else "leave inputs out"
            _refuse("this pipeline has no such input", repr(name), advice)


def negative_prompts(
    negative: str | Sequence[str] | None,
    count: int,
    *,
    argument: str,
    scale: float | int | None,
    default: float | int | None,
    implied: str | None,
    off: float | int = 1,
) -> list[str] | None:
    """One negative prompt a prompt; warns where guidance is asked for and cannot be on.

    ``argument`` names the scale, ``scale`` is what was given, ``default`` the pipeline's own where
    none was, ``implied`` the negative prompt of a pipeline whose guidance does without one, ``off``
    the largest scale without guidance.
    """
    if negative is None:
        if scale is None or scale <= off:
            return None
        if implied is None:
            _warn(
                f"{argument} has no effect without a negative prompt; got {scale}; set "
                "negative_prompt=' ' to turn guidance on"
            )
            return None
        negative = implied
    scale = max((s for s in (scale, default) if s is not None), default=None)
    if scale is not None and scale <= off:
        _warn(
            f"negative_prompt has no effect at {argument} {scale}; got {negative!r}; set "
            f"{argument} > {off:g}"
        )
    values = [negative] * count if isinstance(negative, str) else list(negative)
    if len(values) != count:
        _refuse(
            "one negative prompt, or one a prompt",
            f"{len(values)} for {count} prompts",
            "pass a string",
        )
    return values


def _warn(message: str) -> None:
    warnings.warn(f"RolloutEngine.generate: {message}", stacklevel=4)


def _refuse(problem: str, value: object, advice: str) -> NoReturn:
    raise RolloutParamsError(f"RolloutEngine.generate: {problem}; got {value}; {advice}")
