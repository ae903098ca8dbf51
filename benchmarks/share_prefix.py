"""What a shared prefix saves of a rollout: ``python -m benchmarks.share_prefix [MODEL ...]``.

P = 2 prompts of G = 8 samples from one noise a prompt, T = 10 evaluations, the window at w = 5 and 2
steps long, latents only, one thread; shared against unshared, in turn. The denoiser's rows are
counted: P w + P G (T - w) of P G T, 90 of 160, so 0.5625 is the least that can be.
``--cpu`` takes this process's own time instead of the wall clock's.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import torch

from benchmarks.pairs import paired
from miles_rollout import RolloutEngine, RolloutParams
from miles_rollout.loading import load_pipeline

P, G, T, W = 2, 8, 10, 5
PROMPTS = ["a red circle on a blue background", "a cat"]
PARAMS = RolloutParams(sde_step_indices=(W, W + 1), return_step_indices=(W, W + 1, W + 2, T))
IDEAL = P * W + P * G * (T - W)
SIZES: dict[str, dict[str, Any]] = {
    "tiny-qwen-image-pretrained": {"height": 128, "width": 128},
    "tiny-sd3": {},
    "tiny-wan": {"height": 128, "width": 128},
    "tiny-ltx2": {
        "height": 64, "width": 64, "frame_rate": 24.0, "stg_scale": 0.0, "modality_scale": 1.0,
    },
    "tiny-cosmos3": {"height": 96, "width": 96},
    "tiny-minimax-h3-pretrained": {},
}  # fmt: skip
"""Beyond the adapter's small request: so large that the denoiser outweighs the Python around it."""
UNGUIDED = {"tiny-sd3": 1.0, "tiny-wan": 1.0, "tiny-ltx2": 1.0, "tiny-cosmos3": 1.0}


class Subject:
    """A rollout of all samples of a model, shared or not, and the rows its denoiser sees."""

    def __init__(self, model: str) -> None:
        self.engine = RolloutEngine(load_pipeline(model))
        adapter, pipe = self.engine.adapter, self.engine.pipe
        points = T + 1 if adapter.num_steps(T) == T - 1 else T
        self._sampling = adapter.small_request(pipe) | SIZES[model]
        self._sampling |= {"num_inference_steps": points}
        if model in UNGUIDED:
            self._sampling["guidance_scale"] = UNGUIDED[model]
        self._modules = [m for n in adapter.denoisers if (m := getattr(pipe, n, None)) is not None]
        self.rows = 0

    def __call__(self, share: bool) -> None:
        for _ in self.engine.generate(
            PROMPTS, G, PARAMS, seed=0, same_noise=True, share_prefix=share, decode=False,
            **self._sampling,
        ):  # fmt: skip
            pass

    def counted(self, share: bool) -> int:
        """Rows that reach a denoiser; a pipeline of one sample a call has one a call."""
        rows: list[int] = []
        one = self.engine.adapter.one_sample

        def count(_: Any, args: Any, kwargs: Any) -> None:
            rows.append(1 if one else kwargs.get("hidden_states", *args[:1]).shape[0])

        hooks = [m.register_forward_pre_hook(count, with_kwargs=True) for m in self._modules]
        self(share)
        for hook in hooks:
            hook.remove()
        return sum(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SIZES), metavar="MODEL")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--control", action="store_true", help="unshared against itself as well")
    parser.add_argument("--cpu", action="store_true", help="this process's time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if arguments.cpu else time.perf_counter
    for model in arguments.models:
        subject = Subject(model)
        rows = [subject.counted(share) for share in (True, False)]
        if rows != [IDEAL, P * G * T]:
            raise SystemExit(f"{model}: {rows} rows, not {[IDEAL, P * G * T]}")
        print(f"{model:28} {rows[0]} of {rows[1]} rows = {rows[0] / rows[1]:.4f}", flush=True)
        shared, unshared = (functools.partial(subject, share) for share in (True, False))
        ratio = paired(shared, unshared, arguments.pairs, clock)
        print(f"  shared / unshared            {ratio}", flush=True)
        if arguments.control:
            control = paired(unshared, unshared, arguments.pairs, clock)
            print(f"  unshared / unshared          {control}", flush=True)


if __name__ == "__main__":
    main()
