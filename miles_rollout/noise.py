"""Keyed randomness: every draw is a function of its key, and of nothing else.

A key is a tuple such as ``("transition", row seed, "image", 3)``. It is hashed, so that no two
keys of a run meet by arithmetic (``seed + step`` does), and the whole state of the generator is
filled from the hash: ``torch.Generator.manual_seed`` keeps 32 bits of a seed, which a long run
exhausts (200,000 samples collide about five times). Draws are made one sample at a time on the
CPU: independent of accelerator, batch, micro-batch, rank and resume. The global RNG is untouched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from miles_rollout.errors import RolloutParamsError
from miles_rollout.shapes import Float

Key = int | str

_NUM_WORDS = 624
_WORDS_AT = 24
# torch's layout: seed, words left before the next twist, seeded, next word; then the words.
_STATE = np.zeros(5056, dtype=np.uint8)
_STATE[8:16].view(np.int32)[:] = 1


def derive_seed(*key: Key) -> int:
    """A seed in 0..2**63-1 from a key of ints and strings, the same in every process."""
    return int.from_bytes(hashlib.sha256(_encode(key)).digest()[:8], "big") >> 1


def check_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """One int a row. Raises ``RolloutParamsError``; 1, 1.0 and True are one number and three keys."""
    values = tuple(seeds)
    for seed in values:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise RolloutParamsError(
                f"rollout: seeds must be ints, one a row; got {seed!r}; pass seeds=[...]"
            )
    if not values:
        raise RolloutParamsError("rollout: no seeds; got []; pass one seed a row")
    return values


def keyed_generator(*key: Key) -> torch.Generator:
    """A CPU generator whose whole Mersenne Twister state is the (extended) hash of ``key``."""
    generator = torch.Generator("cpu")
    generator.set_state(_states([key])[0])
    return generator


def keyed_noise(
    seeds: Sequence[int], shape: Sequence[int], *key: Key, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "batch ..."]:
    """Standard normals [B, *shape] on the CPU; row i depends on ``seeds[i]`` and ``key`` alone."""
    noise = torch.empty(len(seeds), *shape, dtype=dtype, device="cpu")
    generator = torch.Generator("cpu")
    for row, state in zip(noise.unbind(0), _states([(*key, seed) for seed in seeds]), strict=True):
        generator.set_state(state)
        row.normal_(generator=generator)
    return noise


def _states(keys: Sequence[tuple[Key, ...]]) -> list[Tensor]:
    """The generator states of some keys, in the layout that torch reads."""
    words = b"".join(hashlib.shake_128(_encode(key)).digest(4 * _NUM_WORDS) for key in keys)
    states = np.tile(_STATE, (len(keys), 1))
    states[:, _WORDS_AT : _WORDS_AT + 8 * _NUM_WORDS].view(np.uint64)[:] = np.frombuffer(
        words, dtype=np.uint32
    ).reshape(len(keys), _NUM_WORDS)
    # One tensor a row: set_state crashes on a view that does not begin its storage.
    return [torch.from_numpy(state) for state in states]


def _encode(key: tuple[Key, ...]) -> bytes:
    return repr(key).encode()
