"""The table of model families: what differs between them for the tests that all of them pass."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from miles_rollout import RolloutParams, RolloutParamsError, rollout
from miles_rollout.loading import load_pipeline
from tests.miles_rollout.tiny import PROMPTS, SEEDS, generators

STEPS = 4
NEGATIVE = ["blurry", "a green dot"]


def images(pipe, output_type, **arguments):
    """An image pipeline's call."""
    return {"image": pipe(**arguments, output_type=output_type).images}


def videos(pipe, output_type, **arguments):
    """A video pipeline's call."""
    return {"video": pipe(**arguments, output_type=output_type).frames}


def minimax_h3(pipe, output_type, prompt, generator, **arguments):
    """All of it at once: the latents are a list of streams, the media of rows."""
    (prompt,), (generator,) = prompt, generator
    names = {"latent": ["latents", "audio_latents"], "pt": ["videos", "audio"]}[output_type]
    made = pipe(prompt=prompt, generator=generator, output=names, output_type="pt", **arguments)
    video, audio = (made[name] for name in names)
    return {"video": video, "audio": audio[None] if output_type == "latent" else audio}


def ltx2(pipe, output_type, **arguments):
    """Latents: the video's final state, which alone decodes to the same bits, and the sound's."""
    final = {}

    def keep(_, __, ___, tensors):
        final.update(tensors)
        return {}

    made = pipe(**arguments, output_type=output_type, callback_on_step_end=keep)
    return {
        "video": final["latents"] if output_type == "latent" else made.frames,
        "audio": made.audio,
    }


@dataclass(frozen=True, kw_only=True)
class Model:
    """One family. Row counts are those of the ``module`` calls of one step of all prompts."""

    call: Callable[..., Mapping[str, Any]] = images
    """(pipe, output_type, prompt=, generator=, ...) -> stream -> latents or media."""
    size: Mapping[str, Any] = field(
        default_factory=lambda: {"height": 32, "width": 32, "max_sequence_length": 48}
    )
    """Of the pipeline and of the engine."""
    steps: int = STEPS
    """What ``num_inference_steps`` is; H3 counts grid points."""
    streams: tuple[str, ...] = ("image",)
    prompts: tuple[str, ...] = tuple(PROMPTS)
    """One where the pipeline takes one sample a call."""
    plain: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the pipeline and the engine that turn guidance off."""
    plain_rows: tuple[int, ...] = (2,)
    guided: Mapping[str, Any] | None = None
    """Arguments of the pipeline and the engine that turn guidance on; None: there is none."""
    guided_rows: tuple[int, ...] = ()
    negative: bool = True
    """Guidance takes a negative prompt."""
    inputs: Callable[[], Mapping[str, Any]] | None = None
    """What each prompt comes with."""
    text_tolerance: float = 1e-3
    """float32: prompts encoded alone against prompts encoded together."""

    @property
    def num_prompts(self):
        return len(self.prompts)

    @property
    def seeds(self):
        return SEEDS[: self.num_prompts]

    @property
    def evaluations(self):
        return self.steps - 1 if self.call is minimax_h3 else self.steps

    def engine_arguments(self, cfg):
        """Of `RolloutEngine.generate`."""
        negative = {}
        if cfg and self.negative:
            negative = {"negative_prompt": NEGATIVE[: self.num_prompts]}
        given = self.guided if cfg else self.plain
        return {**self.size, **given, **negative, "num_inference_steps": self.steps}

    def stock(self, pipe, cfg, output_type="latent", **arguments):
        """The pipeline's own call."""
        inputs = self.inputs() if self.inputs else {}
        how = {**self.engine_arguments(cfg), **inputs, **arguments}
        how.setdefault("generator", generators(self.num_prompts))
        return self.call(pipe, output_type, prompt=list(self.prompts), **how)

    def roll(self, pipe, cfg, params=None, seeds=None, **arguments):
        """A rollout of that call: trajectory and output."""
        params = RolloutParams(debug=True) if params is None else params
        with rollout(pipe, params, self.seeds if seeds is None else seeds) as session:
            output = self.stock(pipe, cfg, **arguments)
        return session.trajectory, output


LTX2 = Model(
    call=ltx2,
    size={
        "height": 32, "width": 32, "num_frames": 9, "frame_rate": 24.0, "max_sequence_length": 48,
        "spatio_temporal_guidance_blocks": [1],
    },
    streams=("video", "audio"),
    plain={
        **{"guidance_scale": 1.0, "stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0},
        **{"audio_guidance_scale": 1.0, "audio_stg_scale": None, "audio_modality_scale": None},
        "audio_guidance_rescale": None,
    },
    guided={"guidance_scale": 3.0, "stg_scale": 1.0, "modality_scale": 3.0},
    guided_rows=(4, 2, 2),
)  # fmt: skip
MODELS = {
    "tiny-qwen-image": Model(guided={"true_cfg_scale": 3.0}, guided_rows=(2, 2)),
    "tiny-sd3": Model(
        guided={"guidance_scale": 3.0}, guided_rows=(4,), plain={"guidance_scale": 1.0}
    ),
    "tiny-flux": Model(guided={"true_cfg_scale": 3.0}, guided_rows=(2, 2)),
    "tiny-ltx2": LTX2,
    "tiny-ltx2-3": replace(LTX2, plain=LTX2.guided, plain_rows=LTX2.guided_rows, guided=None),
    "tiny-minimax-h3": Model(
        call=minimax_h3,
        size={"height": 32, "width": 32, "num_frames": 124},
        streams=("video", "audio"),
        prompts=(PROMPTS[1],),
        plain_rows=(1,),
    ),
}
CASES = [
    pytest.param((name, cfg), id=f"{name}-{'cfg' if cfg else 'plain'}")
    for name, model in MODELS.items()
    for cfg in ([False] if model.guided is None else [False, True])
]


@functools.cache
def load(name, dtype=torch.float32):
    """The tiny pipeline, built once; a test is skipped where diffusers is too old for it."""
    try:
        return load_pipeline(name, dtype)
    except RolloutParamsError as error:
        pytest.skip(str(error))
