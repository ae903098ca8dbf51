"""What the tests of MiniMax H3 share."""

import numpy as np
import torch
from PIL import Image, ImageDraw

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


def picture(color="red", background="blue", size=(32, 32)):
    """A disc off the middle."""
    image = Image.new("RGB", size, background)
    ImageDraw.Draw(image).ellipse((4, 4, size[0] - 12, size[1] - 12), fill=color)
    return image


def keyframes():
    """The frames that a video starts and ends with; the second is cropped onto the canvas."""
    return {"image": picture(), "last_image": picture("white", "green", (40, 32))}


def sound(samples=8000, channels=1, seed=3):
    """[channels, samples] at the rate of the audio VAE."""
    return 0.3 * torch.randn(channels, samples, generator=torch.Generator().manual_seed(seed))


def references():
    """One of each kind: an image, a video with sound of its own, and a voice."""
    from diffusers.modular_pipelines import minimax_h3

    frames = [picture("yellow", (10 * i, 0, 90)) for i in range(14)]
    return {
        "references": [
            minimax_h3.MiniMaxH3ImageReference(picture("green", "white", (48, 32))),
            minimax_h3.MiniMaxH3VideoReference(np.stack(frames), fps=24.0, audio=sound()),
            minimax_h3.MiniMaxH3AudioReference(sound(4000, 2, seed=4)),
        ]
    }
