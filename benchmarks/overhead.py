"""What a rollout costs over the stock pipeline call: ``python -m benchmarks.overhead``.

Tiny Qwen-Image, batch 16, 10 steps, CFG 4, 64x64 pixels, latents only (decoding would hide the
difference), one thread, pairs in turn. The pretrained form has 1.4 M parameters in its denoiser; the
random form (``--random``) has 0.09 M, so that a call of it is 9 ms and what a rollout costs is a matter
of single Python calls.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.pairs import paired
from miles_rollout import RolloutEngine, RolloutParams, rollout
from miles_rollout.noise import keyed_generator
from miles_rollout.testing import tiny_qwen_image

BATCH, STEPS, SIDE, SCALE = 16, 10, 64, 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--random", action="store_true", help="the smaller form")
    arguments = parser.parse_args()
    pairs = arguments.pairs
    torch.set_num_threads(1)
    pipe = tiny_qwen_image(pretrained=not arguments.random)
    engine = RolloutEngine(pipe)
    prompts = ["a red circle on a blue background", "a cat"] * (BATCH // 2)
    call = engine.adapter.collate(engine.encode(prompts), engine.encode([" "] * BATCH)) | {
        "true_cfg_scale": SCALE,
        "num_inference_steps": STEPS,
        "height": SIDE,
        "width": SIDE,
        "output_type": "latent",
    }
    seeds = list(range(BATCH))

    def stock() -> None:
        pipe(**call, generator=[keyed_generator("benchmark", seed) for seed in seeds])

    def rolled(params: RolloutParams) -> None:
        with rollout(pipe, params, seeds) as session:
            pipe(**call, generator=session.generators)

    print("stock / stock                  ", paired(stock, stock, pairs))
    for name, params in (
        (
            "no stochastic step, final kept ",
            RolloutParams(sde_type="ode", return_step_indices=(STEPS,)),
        ),
        ("no stochastic step, all kept   ", RolloutParams(sde_type="ode")),
        ("all steps sde, all kept        ", RolloutParams()),
    ):
        print(f"{name}", paired(lambda params=params: rolled(params), stock, pairs), flush=True)


if __name__ == "__main__":
    main()
