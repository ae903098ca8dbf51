"""What a MiniMax H3 prompt may come with: checked here, since the blocks fail late or read it wrongly.

Key frames are PIL images. References are diffusers' ``MiniMaxH3ImageReference``,
``MiniMaxH3VideoReference`` and ``MiniMaxH3AudioReference``, in the order the model should read them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3Reference
from PIL import Image

from miles_rollout.errors import RolloutParamsError
from miles_rollout.pipelines.minimax_h3_blocks import (
    DENOISERS,
    KEYFRAMES,
    REFERENCES,
    TEXT,
    only_workflow,
    workflow_of,
)

_KINDS = "MiniMaxH3ImageReference, MiniMaxH3VideoReference or MiniMaxH3AudioReference"
_FLOATS = ("float16", "float32", "float64")
_WANTED = {
    TEXT: "no images and no references",
    KEYFRAMES: "image= or last_image=",
    REFERENCES: "references=",
}


def check_inputs(pipe: Any, given: Mapping[str, Any]) -> None:
    """Raise ``RolloutParamsError`` for key frames or references that the pipeline cannot take."""
    workflow = workflow_of(given)
    keyframes = {n: given[n] for n in ("image", "last_image") if given.get(n) is not None}
    if workflow == REFERENCES and keyframes:
        refuse(
            "the pipeline ignores key frames beside references",
            f"references and {', '.join(keyframes)}",
            "one or the other, such as the key frame as a MiniMaxH3ImageReference",
        )
    _check_workflow(pipe, workflow)
    for name, image in keyframes.items():
        if not isinstance(image, Image.Image):
            refuse(
                f"{name} is a PIL image", _type(image), f"{name}=PIL.Image.fromarray(...) of uint8"
            )
        _check_mode(name, image)
        _check_processor(pipe, "image_processor", name)
    if workflow == REFERENCES:
        _check_references(pipe, given["references"])


def refuse(problem: str, value: object, advice: str) -> NoReturn:
    """Raise ``RolloutParamsError``."""
    raise RolloutParamsError(f"rollout: {problem}; got {value}; set {advice}")


def _check_workflow(pipe: Any, workflow: str) -> None:
    only = only_workflow(pipe._blocks)
    if only not in (None, workflow):
        refuse(
            f"this pipeline was loaded for {only} alone",
            f"a {workflow} request",
            f"{_WANTED[only]}, or load it without workflow=",
        )
    denoiser = DENOISERS[workflow]
    if getattr(pipe, denoiser, None) is None:
        refuse(
            f"{workflow} is denoised by {denoiser}",
            f"a pipeline without {denoiser}",
            f"it with pipe.load_components(names=[{denoiser!r}])",
        )


def _check_processor(pipe: Any, part: str, name: str) -> None:
    if getattr(pipe.processor, part, None) is None:
        refuse(
            f"the text encoder sees {name} through the processor's {part}",
            f"a {_type(pipe.processor)} without one",
            "the component processor to a Qwen3VLProcessor",
        )


def _check_references(pipe: Any, references: Any) -> None:
    if not isinstance(references, (list, tuple)) or not references:
        refuse("references are a list", _brief(references), f"references=[{_KINDS}, ...]")
    for index, entry in enumerate(references):
        kind, name = getattr(entry, "kind", None), f"references[{index}]"
        if not isinstance(entry, MiniMaxH3Reference) or kind not in ("image", "video", "audio"):
            refuse(f"{name} is no reference", _type(entry), f"it to a {_KINDS}")
        if kind == "image":
            _check_processor(pipe, "image_processor", name)
            _check_picture(f"{name}.image", entry.image)
        if kind == "video":
            _check_processor(pipe, "video_processor", name)
            _check_video(pipe, name, entry)
        if entry.has_audio:
            _check_sound(pipe, name, entry.audio, entry.sample_rate)
    kinds = [entry.kind for entry in references]
    if set(kinds) == {"audio"}:
        refuse(
            "a sound conditions nothing on its own",
            f"{len(kinds)} audio references",
            "an image or video reference beside it",
        )
    setup = _block(pipe, "before_encode")
    limits = {k: getattr(setup, f"max_{k}s") for k in ("image", "video", "audio")}
    for kind, limit in {**limits, "": setup.max_references}.items():
        count = kinds.count(kind) if kind else len(kinds)
        if count > limit:
            which = f"{kind} references" if kind else "references"
            refuse(f"at most {limit} {which}", count, "fewer")


def _check_picture(name: str, image: Any) -> None:
    if isinstance(image, Image.Image):
        _check_mode(name, image)
        width, height = image.size
    elif isinstance(image, (np.ndarray, torch.Tensor)):
        height, width = _check_pixels(name, image, "")
    else:
        refuse(f"{name} is a PIL image, an array or a tensor", _type(image), "it to one")
    _check_ratio(name, width, height)


def _check_video(pipe: Any, name: str, video: Any) -> None:
    """Also that it is long enough: the text encoder reads a few frames a second, in groups."""
    fps, frames, name = video.fps, video.frames, f"{name}.frames"
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
        refuse(f"the frame rate of {name} is a positive number", repr(fps), "fps=")
    if isinstance(frames, list) and frames and all(isinstance(f, Image.Image) for f in frames):
        if len({frame.size for frame in frames}) > 1:
            refuse(f"{name} have one size", sorted({f.size for f in frames}), "them to one size")
        count, (width, height) = len(frames), frames[0].size
    elif isinstance(frames, (np.ndarray, torch.Tensor)):
        height, width = _check_pixels(name, frames, "frames, ")
        count = len(frames)
    else:
        refuse(f"{name} are PIL images, an array or a tensor", _brief(frames), "them to one")
    _check_ratio(name, width, height)
    group = pipe.processor.video_processor.temporal_patch_size
    stride = pipe.fps / _block(pipe, "text_encoder").video_sample_fps
    needed = round((group - 1) * stride) + 1
    if math.floor(count * pipe.fps / fps + 0.5) < needed:
        refuse(
            f"{name} last {needed / pipe.fps:.3g} seconds at least",
            f"{count} frames at {fps:g} a second",
            "a longer video",
        )


def _check_sound(pipe: Any, name: str, audio: Any, rate: Any) -> None:
    shape = tuple(getattr(audio, "shape", ()))
    if not isinstance(audio, torch.Tensor) or not audio.is_floating_point():
        refuse(f"{name}.audio is a tensor of floats from -1 to 1", _brief(audio), "it to one")
    if len(shape) != 2 or shape[0] not in (1, 2) or not shape[1]:
        refuse(f"{name}.audio is [1 or 2 channels, samples]", list(shape), "that shape")
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, int) or rate < 1:
        refuse(f"{name}.sample_rate is a positive int", repr(rate), "sample_rate=")
    if rate != pipe.audio_sampling_rate and importlib.util.find_spec("torchaudio") is None:
        refuse(
            f"{name}.audio would be resampled by torchaudio, which is not installed",
            f"{rate} Hz",
            f"audio at {pipe.audio_sampling_rate} Hz, or install torchaudio",
        )


def _check_mode(name: str, image: Image.Image) -> None:
    if image.mode != "RGB" or 0 in image.size:
        refuse(
            f"{name} is an RGB image",
            f"mode {image.mode}, {image.width} x {image.height}",
            f"{name}=image.convert('RGB')",
        )


def _check_pixels(name: str, pixels: Any, frames: str) -> tuple[int, int]:
    """Height and width of channels-last arrays and channels-first tensors."""
    shape = tuple(pixels.shape)
    first = isinstance(pixels, torch.Tensor)
    wanted = f"[{frames}3, height, width]" if first else f"[{frames}height, width, 3]"
    if len(shape) != (4 if frames else 3) or shape[-3 if first else -1] != 3 or 0 in shape:
        refuse(f"{name} is {wanted}", list(shape), "that shape")
    dtype = str(pixels.dtype).removeprefix("torch.")
    low, high = pixels.min().item(), pixels.max().item()
    # Whatever else is scaled by 255 and cut to a byte.
    if dtype != "uint8" and not (dtype in _FLOATS and low >= 0 and high <= 1):
        refuse(
            f"{name} is uint8, or floats from 0 to 1", f"{dtype} from {low:g} to {high:g}", "those"
        )
    return shape[-2:] if first else shape[-3:-1]


def _block(pipe: Any, name: str) -> Any:
    """The block of references of this name: one of several where the pipeline takes more."""
    block = pipe._blocks.sub_blocks[name]
    return block.sub_blocks.get(REFERENCES, block)


def _check_ratio(name: str, width: int, height: int) -> None:
    if max(width, height) > 4 * min(width, height):
        refuse(f"{name} is within 1:4 and 4:1", f"{width} x {height}", "a crop of it")


def _brief(value: Any) -> str:
    """A type, and for a container its length."""
    size = f" of {len(value)}" if isinstance(value, Sequence) else ""
    dtype = f" of {value.dtype}" if isinstance(value, (np.ndarray, torch.Tensor)) else ""
    return f"{_type(value)}{size}{dtype}"


def _type(value: Any) -> str:
    return type(value).__name__
