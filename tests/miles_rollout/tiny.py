"""What the tests of the session, the trajectory and the engine share."""

import torch

from miles_rollout import RolloutParams, rollout

PROMPTS = ["a red circle", "a blue square on a green background"]
SEEDS = [11, 12]
STEPS = 4
ODE = RolloutParams(sde_type="ode")


def generators(count=2, seed=0):
    return [torch.Generator().manual_seed(seed + i) for i in range(count)]


def call(pipe, prompts=PROMPTS, **kwargs):
    """The stock call at a test's size, with images out; ``scale`` above 1 turns CFG on."""
    scale = kwargs.pop("scale", 1.0)
    kwargs.setdefault("generator", generators(len(prompts)))
    kwargs.setdefault("num_inference_steps", STEPS)
    kwargs.setdefault("output_type", "latent")
    return pipe(
        prompts,
        negative_prompt=[" "] * len(prompts) if scale > 1 else None,
        true_cfg_scale=scale,
        height=32,
        width=32,
        **kwargs,
    ).images


def run(pipe, params=None, seeds=SEEDS, **kwargs):
    """One rollout of `call`: its trajectory and its output."""
    with rollout(pipe, params or RolloutParams(), seeds) as session:
        output = call(pipe, **kwargs)
    return session.trajectory, output


class Calls:
    """Counts the calls of a module, and the rows of each."""

    def __init__(self, module):
        self.rows = []
        self._handle = module.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _, args, kwargs):
        first = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        self.rows.append(len(first))

    def __len__(self):
        return len(self.rows)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._handle.remove()
