"""Qwen-Image-Edit-Plus (2509, 2511): reference images behind the picture's tokens, one sample a call."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

from PIL import Image
from torch import Tensor

from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding
from miles_rollout.pipelines.common import check_sizes, even_sigmas, refuse
from miles_rollout.pipelines.qwen_image import decoded, guided
from miles_rollout.pipelines.refusals import EXPANDED
from miles_rollout.pipelines.two_calls import TwoCallAdapter, pad, true_cfg


@final
class QwenImageEditPlusAdapter(TwoCallAdapter):
    """``QwenImageEditPlusPipeline``: one stream, one or two denoiser calls a step.

    A prompt comes with ``{"image": [...]}``, one or more PIL images in the order in which the prompt
    counts them. The text encoder reads them as well, so each prompt is encoded with its own.
    """

    sees_state: ClassVar[bool] = False
    streams: ClassVar[tuple[str, ...]] = ("image",)
    cuts_prompts: ClassVar[bool] = False
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    batch_axes: ClassVar[Mapping[str, int | None]] = {
        "hidden_states": 0,
        "timestep": 0,
        "guidance": 0,
        "encoder_hidden_states": 0,
        "encoder_hidden_states_mask": 0,
        "img_shapes": 0,
        "attention_kwargs": None,
    }
    sampling: ClassVar[frozenset[str]] = frozenset(
        {
            "height",
            "width",
            "num_inference_steps",
            "sigmas",
            "true_cfg_scale",
            "guidance_scale",
            "attention_kwargs",
        }
    )
    scale_argument: ClassVar[str | None] = "true_cfg_scale"
    implied_negative: ClassVar[str | None] = None
    refused: ClassVar[Mapping[str, str]] = {"num_images_per_prompt": EXPANDED}
    one_sample: ClassVar[bool] = True
    inputs: ClassVar[frozenset[str]] = frozenset({"image"})

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse a call without references, with several samples, or of a size that is rounded."""
        _references(request.get("image"))
        check_sizes(request, pipe.vae_scale_factor * 2, "height", "width")
        prompt, embeds = request.get("prompt"), request.get("prompt_embeds")
        rows = len(prompt) if isinstance(prompt, list) else 1 if embeds is None else len(embeds)
        if rows != 1:
            refuse("this pipeline takes one sample a call", f"{rows} prompts", "one at a time")
        longest = request.get("max_sequence_length", 512)
        if longest != 512:
            warnings.warn(
                "rollout: max_sequence_length has no effect, prompts are never cut; got "
                f"{longest}; leave it out",
                stacklevel=2,
            )

    def resolve_request(self, pipe: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        """With a size: a million pixels in the shape of the last reference, rounded down."""
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

        last = _references(request.get("image"))[-1]
        sides = calculate_dimensions(1024 * 1024, last.size[0] / last.size[1])
        multiple = pipe.vae_scale_factor * 2
        width, height = (side // multiple * multiple for side in sides)
        height, width = request.get("height") or height, request.get("width") or width
        return {**request, "height": height, "width": width}

    def base_sigmas(self, num_inference_steps: int) -> list[float] | None:
        """Even ones."""
        return even_sigmas(num_inference_steps)

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """CFG is on with a scale above 1 and a negative prompt, and off without either."""
        return true_cfg(request, default=4.0)

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """Qwen-Image's guidance of the first tokens: those of the references stand behind."""
        tokens = step.states["image"].shape[1]
        positive, *negative = (output[0][:, :tokens] for output in step.outputs)
        if not step.guidance["do_true_cfg"]:
            return {"image": positive}
        return {"image": guided(positive, negative[0], step.guidance["true_cfg_scale"])}

    def check_inputs(
        self, pipe: Any, inputs: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> None:
        """Refuse a prompt without references."""
        _references(inputs.get("image"))

    def prepare(
        self, pipe: Any, inputs: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The references, also in the size in which the pipeline shows them to the text encoder."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as module

        images, shown = _references(inputs.get("image")), []
        for image in images:
            ratio = image.size[0] / image.size[1]
            width, height = module.calculate_dimensions(module.CONDITION_IMAGE_SIZE, ratio)
            shown.append(pipe.image_processor.resize(image, height, width))
        return {"image": images, "shown": shown}

    def encode(
        self, pipe: Any, prompt: str, max_sequence_length: int | None, inputs: Mapping[str, Any]
    ) -> Encoding:
        """The prompt with its references."""
        if max_sequence_length is not None:
            refuse("prompts are never cut", max_sequence_length, "max_sequence_length=None")
        embeds, _ = pipe.encode_prompt(prompt=prompt, image=inputs["shown"])
        return {"embeds": embeds[0], "image": inputs["image"]}

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """One prompt's arguments."""
        embeds, mask = pad(encodings)
        arguments = {
            "image": encodings[0]["image"],
            "prompt_embeds": embeds,
            "prompt_embeds_mask": mask,
        }
        if negatives is None:
            return arguments | {"true_cfg_scale": 1.0}
        embeds, mask = pad(negatives)
        return arguments | {"negative_prompt_embeds": embeds, "negative_prompt_embeds_mask": mask}

    def small_request(self, pipe: Any) -> dict[str, Any]:
        """4 x 4 tokens: the references are what costs."""
        side = pipe.vae_scale_factor * 8
        return {"height": side, "width": side}

    def sample_inputs(self, pipe: Any) -> Mapping[str, Any]:
        """Two references of different shapes."""
        wide = Image.linear_gradient("L").convert("RGB").resize((96, 64))
        return {"image": [wide, Image.radial_gradient("L").convert("RGB")]}

    def latents(self, output: Any) -> dict[str, Tensor]:
        """Packed [1, tokens, channels]."""
        return {"image": output.images}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Unpack, undo the latent statistics, decode, and map to 0..1."""
        return decoded(pipe, latents["image"], request["height"], request["width"])


def _references(value: Any) -> list[Image.Image]:
    """As the pipeline takes them: PIL images, one or a list."""
    images = value if isinstance(value, list) else [value]
    if not images or not all(isinstance(image, Image.Image) for image in images):
        names = [type(image).__name__ for image in images]
        refuse(
            "this pipeline edits reference images, which are PIL images",
            f"image of {', '.join(names) or 'nothing'}",
            'image=, or inputs=[{"image": [...]}] of the engine, one entry a prompt',
        )
    return images
