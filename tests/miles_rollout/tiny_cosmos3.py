"""What the tests of Cosmos3 share: its kinds of requests, and one call for both pipelines."""

import torch
from diffusers import ModularPipeline
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import CosmosActionCondition

from miles_rollout import RolloutParams, rollout

PROMPT = "a red circle on a blue background"
STEPS = 4
SIZE = {"height": 64, "width": 64, "num_frames": 5}
GUIDED = {"negative_prompt": "blurry", "guidance_scale": 3.0}
ACTION_WIDTH = 9
"""Of the embodiment below; the denoiser's actions are wider."""


def frames(count, seed=1):
    """[count, 3, 48, 64] in 0..1."""
    return torch.rand(count, 3, 48, 64, generator=torch.Generator().manual_seed(seed))


def action(mode, **given):
    return CosmosActionCondition(
        mode=mode, chunk_size=4, domain_name="av", resolution_tier=256, **given
    )


def conditions():
    """Name of a kind of request -> its arguments, new objects each time."""
    return {
        "t2i": {**SIZE, "num_frames": 1},
        "t2v": SIZE,
        "t2va": {**SIZE, "enable_sound": True},
        "i2v": {**SIZE, "num_frames": 9, "image": frames(1)},
        "v2v": {
            **SIZE, "num_frames": 9, "video": frames(5), "condition_frame_indexes_vision": [0, 1],
        },
        "policy": {"action": action("policy", image=frames(1))},
        "policy_sound": {"action": action("policy", image=frames(1)), "enable_sound": True},
        "inverse_dynamics": {"action": action("inverse_dynamics", video=frames(5))},
        "forward_dynamics": {
            "action": action("forward_dynamics", image=frames(1), raw_actions=frames(3)[0, 0, :3, :9])
        },
    }  # fmt: skip


STREAMS = {
    "t2i": ("video",),
    "t2v": ("video",),
    "t2va": ("video", "audio"),
    "i2v": ("video",),
    "v2v": ("video",),
    "policy": ("video", "action"),
    "policy_sound": ("video", "audio", "action"),
    "inverse_dynamics": ("action",),
    "forward_dynamics": ("video",),
}
"""The streams of each kind: what is wholly conditioned is none."""


def call(pipe, output_type="latent", **kwargs):
    """The stock call: latents or media of every modality that it makes.

    Latents of sound are what the stock call hands to its decoder. An argument of None is left out.
    """
    kwargs.setdefault("generator", torch.Generator().manual_seed(0))
    given = {"prompt": PROMPT, "num_inference_steps": STEPS, **GUIDED, **kwargs}
    given = {name: value for name, value in given.items() if value is not None}
    if output_type == "latent":
        pipe.decode_sound = lambda latent: latent
    try:
        made = pipe(**given, output_type=output_type)
    finally:
        vars(pipe).pop("decode_sound", None)
    if isinstance(pipe, ModularPipeline):
        video, sound, actions = (made.get(name) for name in ("videos", "sound", "action"))
    else:
        video, sound, actions = made.video, made.sound, made.action
    found = {"video": video, "audio": sound, "action": actions and actions[0]}
    return {name: value for name, value in found.items() if value is not None}


def run(pipe, params=None, seeds=(11,), **kwargs):
    """One rollout of `call`: its trajectory and its output."""
    with rollout(pipe, params or RolloutParams(debug=True), list(seeds)) as session:
        output = call(pipe, **kwargs)
    return session.trajectory, output
