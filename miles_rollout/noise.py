"""Keyed randomness: every draw is a function of its key, and of nothing else.

A key is a tuple such as ``("transition", row seed, "image", 3)``. It is hashed, so that no two
keys of a run meet by arithmetic (``seed + step`` does), and the whole state of the generator is
filled from the hash: ``torch.Generator.manual_seed`` keeps 32 bits of a seed, which a long run
exhausts (200,000 samples collide about five times). Draws are made one sample at a time on the
CPU: independent of accelerator, batch, micro-batch, rank and resume. The global RNG is untouched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from miles_rollout.shapes import Float

Key = int | str

_STATE_BYTES = 5056
_NUM_WORDS = 624
_WORDS_AT = 24


def derive_seed(*key: Key) -> int:
    """A seed in 0..2**63-1 from a key of ints and strings, the same in every process."""
    return int.from_bytes(_digest(key)[:8], "big") >> 1


def keyed_generator(*key: Key) -> torch.Generator:
    """A CPU generator whose whole Mersenne Twister state comes from the hash of ``key``."""
    words = np.random.SeedSequence(int.from_bytes(_digest(key), "big")).generate_state(_NUM_WORDS)
    words[0] = 0x80000000  # Matsumoto and Nishimura: the state must not be all zero
    state = np.zeros(_STATE_BYTES, dtype=np.uint8)
    state[:8] = np.frombuffer(np.uint64(derive_seed(*key)).tobytes(), dtype=np.uint8)
    state[8:16] = np.frombuffer(np.array([1, 1], dtype=np.int32).tobytes(), dtype=np.uint8)
    state[_WORDS_AT : _WORDS_AT + 8 * _NUM_WORDS] = np.frombuffer(
        words.astype(np.uint64).tobytes(), dtype=np.uint8
    )
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(state))
    return generator


def keyed_noise(
    seeds: Sequence[int], shape: Sequence[int], *key: Key, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "batch ..."]:
    """Standard normals [B, *shape] on the CPU; row i depends on ``seeds[i]`` and ``key`` alone."""
    noise = torch.empty(len(seeds), *shape, dtype=dtype)
    for row, seed in zip(noise, seeds, strict=True):
        torch.randn(row.shape, generator=keyed_generator(*key, seed), dtype=dtype, out=row)
    return noise


def _digest(key: tuple[Key, ...]) -> bytes:
    return hashlib.sha256(json.dumps(key, separators=(",", ":")).encode()).digest()
