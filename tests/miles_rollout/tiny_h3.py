"""What the tests of MiniMax H3 share."""

import torch

from miles_rollout import RolloutParams, rollout

PROMPT = "a red circle on a blue background"
POINTS = 4
"""Grid points: three evaluations."""
NAMES = ["latents", "audio_latents", "videos", "audio"]
STREAMS = ("video", "audio")


def call(pipe, **kwargs):
    """The stock call of the whole pipeline at a test's size: latents and media of both streams."""
    kwargs.setdefault("generator", torch.Generator().manual_seed(0))
    kwargs.setdefault("output", NAMES)
    given = {
        "prompt": PROMPT, "height": 32, "width": 32, "num_frames": 124,
        "num_inference_steps": POINTS, "output_type": "pt",
    }  # fmt: skip
    return pipe(**given | kwargs)


def run(pipe, params=None, seeds=(11,), **kwargs):
    """One rollout of `call`: its trajectory and its output."""
    with rollout(pipe, params or RolloutParams(), list(seeds)) as session:
        output = call(pipe, **kwargs)
    return session.trajectory, output
