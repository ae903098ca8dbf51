"""`flow_step` against the stock Euler step and a draw: ``python -m benchmarks.transition``.

The subject draws its keyed noise, takes an "sde" step and scores it; the baseline is what diffusers'
scheduler does, plus ``torch.randn`` of that shape. (16, 4096, 64) float32, one thread, one process.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.pairs import paired
from miles_rollout import flow_step
from miles_rollout.noise import keyed_noise

SHAPE = (16, 4096, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=41)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator)
    v = torch.randn(SHAPE, generator=generator)
    dt = torch.tensor(-0.1)

    def euler_and_draw() -> None:
        (x.to(torch.float32) + dt * v).to(v.dtype)
        torch.randn(SHAPE, generator=generator)

    def drawn_step() -> None:
        noise = keyed_noise(range(SHAPE[0]), SHAPE[1:], "benchmark", 3)
        flow_step("sde", x, v, sigma=0.7, sigma_next=0.6, noise_level=0.7, noise=noise)

    print("Euler + randn / the same           ", paired(euler_and_draw, euler_and_draw, pairs))
    print("noise + flow_step / Euler + randn  ", paired(drawn_step, euler_and_draw, pairs))


if __name__ == "__main__":
    main()
