"""The table of model families: what differs between them for the tests that all of them pass."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from miles_rollout import RolloutParams, RolloutParamsError, rollout
from miles_rollout.loading import load_pipeline
from tests.miles_rollout import tiny_cosmos3, tiny_h3
from tests.miles_rollout.tiny import PROMPTS, SEEDS, generators, rows_of

STEPS = 4
NEGATIVE = ["blurry", "a green dot"]


@functools.cache
def picture(width, height, seed):
    """A reference image: noise, in its own colour."""
    random = np.random.default_rng(seed)
    pixels = random.uniform(0, 96, (height, width, 3)) + random.uniform(0, 160, 3)
    return Image.fromarray(pixels.astype(np.uint8))


def images(pipe, output_type, **arguments):
    """An image pipeline's call."""
    return {"image": pipe(**arguments, output_type=output_type).images}


def videos(pipe, output_type, **arguments):
    """A video pipeline's call."""
    return {"video": pipe(**arguments, output_type=output_type).frames}


def guided_videos(pipe, output_type, guidance_scale, **arguments):
    """A video pipeline's call where the scale is that of a component."""
    held = pipe.guider
    vars(pipe)["guider"] = held.new(guidance_scale=guidance_scale)
    try:
        return videos(pipe, output_type, **arguments)
    finally:
        vars(pipe)["guider"] = held


def minimax_h3(pipe, output_type, prompt, generator, **arguments):
    """All of it at once: the latents are a list of streams, the media of rows."""
    (prompt,), (generator,) = prompt, generator
    names = {"latent": ["latents", "audio_latents"], "pt": ["videos", "audio"]}[output_type]
    made = pipe(prompt=prompt, generator=generator, output=names, output_type="pt", **arguments)
    video, audio = (made[name] for name in names)
    return {"video": video, "audio": audio[None] if output_type == "latent" else audio}


def cosmos3(pipe, output_type, prompt, generator, negative_prompt=(None,), **arguments):
    """One sample: the latents of sound and actions have no batch axis."""
    (prompt,), (generator,), (negative,) = prompt, generator, negative_prompt
    made = tiny_cosmos3.call(
        pipe, output_type, prompt=prompt, generator=generator, negative_prompt=negative, **arguments
    )
    if output_type == "pt":
        return made
    return {name: z if name == "video" else z[None] for name, z in made.items()}


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
    """One family, or one kind of request of it. Row counts are those of the ``module`` calls of one
    step of all prompts."""

    pipeline: str | None = None
    """The tiny pipeline's name, if the case has another one."""
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
    rows_of: Callable[[Any], int] = rows_of
    """From the arguments of a denoiser call."""
    plain_rows: tuple[int, ...] = (2,)
    guided: Mapping[str, Any] | None = None
    """Arguments of the pipeline and the engine that turn guidance on; None: there is none."""
    guided_rows: tuple[int, ...] = ()
    negative: bool = True
    """Guidance takes a negative prompt."""
    stock_only: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the pipeline that the engine passes by itself."""
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
        how = {**self.engine_arguments(cfg), **self.stock_only, **inputs, **arguments}
        how.setdefault("generator", generators(self.num_prompts))
        how.setdefault("prompt", list(self.prompts))
        return self.call(pipe, output_type, **how)

    def roll(self, pipe, cfg, params=None, seeds=None, **arguments):
        """A rollout of that call: trajectory and output."""
        params = RolloutParams(debug=True) if params is None else params
        with rollout(pipe, params, self.seeds if seeds is None else seeds) as session:
            output = self.stock(pipe, cfg, **arguments)
        return session.trajectory, output


VIDEO_SIZE = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 48}


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
    "tiny-qwen-image-2-1": Model(
        # Replay needs the cache off; the engine sees to it itself.
        size={"height": 64, "width": 64},
        stock_only={"use_kv_cache": False},
        guided={"true_cfg_scale": 3.0},
        guided_rows=(2, 2),
    ),
    "tiny-qwen-image-edit-plus": Model(
        size={"height": 256, "width": 384},
        inputs=lambda: {"image": [picture(96, 64, seed=1)]},
        prompts=(PROMPTS[1],),
        plain_rows=(1,),
        guided={"true_cfg_scale": 3.0},
        guided_rows=(1, 1),
    ),
    "tiny-sd3": Model(
        guided={"guidance_scale": 3.0}, guided_rows=(4,), plain={"guidance_scale": 1.0}
    ),
    "tiny-flux": Model(guided={"true_cfg_scale": 3.0}, guided_rows=(2, 2)),
    "tiny-cosmos3": Model(
        call=cosmos3,
        size={**tiny_cosmos3.SIZE, "enable_sound": True},
        streams=("video", "audio"),
        prompts=(PROMPTS[1],),
        plain={"guidance_scale": 1.0},
        guided={"guidance_scale": 3.0},
        rows_of=lambda _: 1,  # the packed sequence has no batch axis
        plain_rows=(1,),
        guided_rows=(1, 1),
    ),
    "tiny-cosmos3-modular": Model(
        call=cosmos3,
        size=tiny_cosmos3.SIZE,
        streams=("video",),
        prompts=(PROMPTS[1],),
        inputs=lambda: {"image": tiny_cosmos3.frames(1)},
        plain={"guidance_scale": 1.0},
        guided={"guidance_scale": 3.0},
        rows_of=lambda _: 1,
        plain_rows=(1,),
        guided_rows=(1, 1),
    ),
    "tiny-wan": Model(
        call=videos,
        size=VIDEO_SIZE,
        streams=("video",),
        plain={"guidance_scale": 1.0},
        guided={"guidance_scale": 3.0},
        guided_rows=(2, 2),
    ),
    "tiny-wan2-2": Model(
        call=videos,
        size=VIDEO_SIZE,
        streams=("video",),
        plain={"guidance_scale": 1.0},
        guided={"guidance_scale": 3.0, "guidance_scale_2": 4.0},
        guided_rows=(2, 2),
    ),
    "tiny-hunyuan-video-1-5": Model(
        call=guided_videos,
        size={"height": 32, "width": 32, "num_frames": 5},
        streams=("video",),
        plain={"guidance_scale": 1.0},
        guided={"guidance_scale": 3.0},
        guided_rows=(2, 2),
    ),
    "tiny-sana": Model(
        size={
            "height": 32,
            "width": 32,
            "max_sequence_length": 48,
            "use_resolution_binning": False,
        },
        plain={"guidance_scale": 1.0},
        guided={"guidance_scale": 3.0},
        guided_rows=(4,),
    ),
    "tiny-z-image": Model(
        plain={"guidance_scale": 0.0}, guided={"guidance_scale": 3.0}, guided_rows=(4,)
    ),
    "tiny-flux-2-klein": Model(
        plain={"guidance_scale": 1.0},
        guided={"guidance_scale": 3.0},
        guided_rows=(2, 2),
        negative=False,
    ),
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
for case, inputs in (("keyframes", tiny_h3.keyframes), ("references", tiny_h3.references)):
    MODELS[f"tiny-minimax-h3-{case}"] = replace(
        MODELS["tiny-minimax-h3"], pipeline="tiny-minimax-h3", inputs=inputs
    )
# One worker a pipeline, so that each is built once.
CASES = [
    pytest.param(
        (name, cfg),
        id=f"{name}-{'cfg' if cfg else 'plain'}",
        marks=pytest.mark.xdist_group(model.pipeline or name),
    )
    for name, model in MODELS.items()
    for cfg in ([False] if model.guided is None else [False, True])
]


def small_references(monkeypatch):
    """Qwen-Image-Edit-Plus scales references to 384 x 384 pixels for its VAE, not 1024 x 1024.

    They cost a seventh, and are 6 to 9 tokens in place of 54 to 64; the tests of the family itself
    keep the size of the pipeline.
    """
    try:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as module
    except ImportError:  # diffusers is too old, and the family's own cases are skipped
        return
    monkeypatch.setattr(module, "VAE_IMAGE_SIZE", 384 * 384)


def load(name, dtype=torch.float32):
    """The tiny pipeline of a case, built once; a test is skipped where diffusers is too old."""
    return _load(MODELS[name].pipeline or name, dtype)


@functools.cache
def _load(name, dtype):
    try:
        return load_pipeline(name, dtype)
    except RolloutParamsError as error:
        pytest.skip(str(error))
