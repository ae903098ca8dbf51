"""What a rollout of video with sound costs: ``python -m benchmarks.streams tiny-ltx2``.

Latents only, one thread, pairs in turn. LTX-2: two samples of 32 x 32 pixels and 9 frames, 8 steps,
with all three guidances (three denoiser calls a step) or with none. MiniMax H3: one sample of 5 s at
32 x 32 pixels, 9 grid points. ``--cpu`` takes this process's own time instead of the wall clock's.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import torch

from benchmarks.pairs import Clock, paired
from miles_rollout import RolloutEngine, RolloutParams, rollout
from miles_rollout.loading import load_pipeline
from miles_rollout.noise import keyed_generator

STEPS = 8
PROMPTS = ["a red circle on a blue background", "a cat"]
SIZES: dict[str, dict[str, Any]] = {
    "tiny-ltx2": {
        "height": 32, "width": 32, "num_frames": 9, "num_inference_steps": STEPS,
        "max_sequence_length": 48, "spatio_temporal_guidance_blocks": [1],
    },
    "tiny-minimax-h3": {
        "height": 32, "width": 32, "num_frames": 124, "num_inference_steps": STEPS + 1,
    },
}  # fmt: skip
SIZES["tiny-ltx2-3"] = SIZES["tiny-ltx2"]
GUIDED = {"guidance_scale": 3.0, "stg_scale": 1.0, "modality_scale": 3.0}
PARAMS = {
    "no stochastic step, final kept": RolloutParams(sde_type="ode", return_step_indices=(STEPS,)),
    "no stochastic step, all kept": RolloutParams(sde_type="ode"),
    "all steps sde, all kept": RolloutParams(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(SIZES))
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--cpu", action="store_true", help="this process's time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if arguments.cpu else time.perf_counter
    engine = RolloutEngine(load_pipeline(arguments.model))
    for guided in (False, True) if engine.adapter.scale_argument else (False,):
        print("guided" if guided else "unguided", flush=True)
        compare(_Subjects(engine, arguments.model, guided), arguments.pairs, clock)


def compare(subjects: _Subjects, pairs: int, clock: Clock) -> None:
    """Print what each kind of rollout takes, as a multiple of the stock call."""
    control = paired(subjects.stock, subjects.stock, pairs, clock)
    print(f"  {'stock / stock':32}{control}", flush=True)
    for name, params in PARAMS.items():
        rolled = functools.partial(subjects.rolled, params)
        print(f"  {name:32}{paired(rolled, subjects.stock, pairs, clock)}", flush=True)


class _Subjects:
    """The stock call, and the same under rollout."""

    def __init__(self, engine: RolloutEngine, model: str, guided: bool) -> None:
        self._adapter = engine.adapter
        self._part = engine.adapter.denoising_part(engine.pipe)
        size = dict(SIZES[model])
        prompts = PROMPTS[:1] if engine.adapter.one_sample else PROMPTS
        longest = size.get("max_sequence_length")
        encoded = engine.encode(prompts, max_sequence_length=longest)
        negatives = None
        if guided:
            negatives = engine.encode([""] * len(prompts), max_sequence_length=longest)
            size |= GUIDED
        self._call = self._adapter.collate(encoded, negatives) | size
        self._seeds = list(range(len(prompts)))

    def stock(self) -> None:
        generators = [keyed_generator("benchmark", seed) for seed in self._seeds]
        self._adapter.denoise(self._part, self._call, generators)

    def rolled(self, params: RolloutParams) -> None:
        with rollout(self._part, params, self._seeds, adapter=self._adapter) as session:
            self._adapter.denoise(self._part, self._call, session.generators)


if __name__ == "__main__":
    main()
