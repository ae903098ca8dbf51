"""A denoising loop of one's own that the tests of the hooks share: no model, one stream."""

from dataclasses import fields

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from miles_rollout import RolloutParams
from miles_rollout.hooks import (
    accept_transition,
    prepare_rollout_if_enabled,
    rollout_step_kwargs,
)

SEEDS = [3, 4]
PARAMS = RolloutParams()


def stock(num_steps=4, **config):
    made = FlowMatchEulerDiscreteScheduler(**config)
    made.set_timesteps(num_steps)
    return made


def scheduler(num_steps=4, **config):
    return accept_transition(stock(num_steps, **config))


def noise(seed=0, *shape):
    return torch.randn(*(shape or (2, 6)), generator=torch.Generator().manual_seed(seed))


def steps(request, drive, x, stream="image"):
    """One step of a loop each time it is asked."""
    for t in drive.timesteps:
        kwargs = rollout_step_kwargs(request, stream=stream)
        x = drive.step(x.sin(), t, x, return_dict=False, **kwargs)[0]
        yield x


def prepared(request=None, params=PARAMS, **kwargs):
    request = {} if request is None else request
    kwargs = kwargs or {"schedulers": {"image": scheduler()}}
    prepare_rollout_if_enabled(request, params, SEEDS, **kwargs)
    return request


def assert_same_stream(a, b):
    for field in fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, y), field.name
            assert (x.dtype, x.shape) == (y.dtype, y.shape), field.name
        elif field.name == "debug":
            assert list(x) == list(y)
            assert all(torch.equal(x[n], y[n]) and x[n].shape == y[n].shape for n in x)
        else:
            assert x == y, field.name
