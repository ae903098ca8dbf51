"""FLUX.2-klein: packed latents, normalised by the VAE's batch norm; guided by an empty prompt."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from miles_rollout.media import Media
from miles_rollout.pipelines.base import DenoisingStep, Encoding
from miles_rollout.pipelines.common import check_sizes, even_sigmas, refuse
from miles_rollout.pipelines.refusals import EXPANDED
from miles_rollout.pipelines.two_calls import TwoCallAdapter

_DEFAULT_SCALE = 4.0


@final
class Flux2KleinAdapter(TwoCallAdapter):
    """``Flux2KleinPipeline``: one stream, one or two denoiser calls a step.

    A prompt may come with ``{"image": [...]}``, PIL images of at least 64 pixels a side. The
    pipeline shares them among the rows of a call, so prompts with different ones need
    ``chunk_size=1``. Final latents are those of the VAE, [rows, channels, height, width].
    """

    streams: ClassVar[tuple[str, ...]] = ("image",)
    denoisers: ClassVar[tuple[str, ...]] = ("transformer",)
    batch_axes: ClassVar[Mapping[str, int | None]] = {
        "hidden_states": 0,
        "timestep": 0,
        "guidance": 0,
        "encoder_hidden_states": 0,
        "txt_ids": 0,
        "img_ids": 0,
        "joint_attention_kwargs": None,
    }
    sampling: ClassVar[frozenset[str]] = frozenset(
        {
            "height",
            "width",
            "num_inference_steps",
            "sigmas",
            "guidance_scale",
            "attention_kwargs",
        }
    )
    scale_argument: ClassVar[str | None] = "guidance_scale"
    implied_negative: ClassVar[str | None] = ""
    refused: ClassVar[Mapping[str, str]] = {"num_images_per_prompt": EXPANDED}
    inputs: ClassVar[frozenset[str]] = frozenset({"image"})

    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse sizes that the pipeline would round."""
        check_sizes(request, pipe.vae_scale_factor * 2, "height", "width")
        scale = request.get("guidance_scale", _DEFAULT_SCALE)
        if pipe.config.is_distilled and scale > 1 and scale != _DEFAULT_SCALE:
            warnings.warn(
                "rollout: guidance_scale has no effect on a distilled model; got "
                f"{scale}; leave it out, or set 1",
                stacklevel=2,
            )

    def resolve_request(self, pipe: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        """Without guidance where the weights are distilled."""
        scale = 1.0 if pipe.config.is_distilled else request.get("guidance_scale", _DEFAULT_SCALE)
        return {**request, "guidance_scale": scale}

    def base_sigmas(self, num_inference_steps: int) -> list[float] | None:
        """Even ones."""
        return even_sigmas(num_inference_steps)

    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """CFG is on with a scale above 1, by an empty prompt if there is no negative embedding."""
        scale = float(request["guidance_scale"])
        return {"do_true_cfg": scale > 1, "guidance_scale": scale if scale > 1 else 1.0}

    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """``neg + scale (pos - neg)`` of the first tokens: those of references stand behind."""
        tokens = step.states["image"].shape[1]
        velocity, *negative = (output[0][:, :tokens] for output in step.outputs)
        if step.guidance["do_true_cfg"]:
            velocity = negative[0] + step.guidance["guidance_scale"] * (velocity - negative[0])
        return {"image": velocity}

    def check_inputs(
        self, pipe: Any, inputs: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> None:
        """Refuse reference images that the pipeline would refuse after the text encoder has run."""
        for image in _references(inputs):
            try:
                pipe.image_processor.check_image_input(image)
            except ValueError as error:
                refuse(f"a reference image does not fit: {error}", repr(image), "another image")

    def encode(
        self, pipe: Any, prompt: str, max_sequence_length: int | None, inputs: Mapping[str, Any]
    ) -> Encoding:
        """Padded to a fixed length, which the denoiser sees without a mask; references as they are."""
        embeds, _ = pipe.encode_prompt(
            prompt=prompt, max_sequence_length=max_sequence_length or 512
        )
        return {"embeds": embeds[0], "image": _references(inputs)}

    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """Every prompt has one length: only stacked. Raises for rows with different references."""
        images = [encoding["image"] for encoding in encodings]
        if len({tuple(map(id, image)) for image in images}) > 1:
            refuse(
                "the rows of a call share their reference images",
                f"{len(images)} rows with different ones",
                "chunk_size=1, or the same image objects for all prompts of a chunk",
            )
        arguments: dict[str, Any] = {
            "prompt_embeds": torch.stack([e["embeds"] for e in encodings]),
            "image": images[0] or None,
        }
        if negatives is None:
            return arguments | {"guidance_scale": 1.0}
        return arguments | {"negative_prompt_embeds": torch.stack([e["embeds"] for e in negatives])}

    def latents(self, output: Any) -> dict[str, Tensor]:
        """[B, channels, height, width], with the batch norm undone."""
        return {"image": output.images}

    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Decode, and map to 0..1; the pipeline hands out latents that need no more."""
        pixels = pipe.vae.decode(latents["image"], return_dict=False)[0]
        images = pipe.image_processor.postprocess(pixels, output_type="pt")
        return [Media(image=image.float()) for image in images]


def _references(inputs: Mapping[str, Any]) -> list[Any]:
    """One or a list of them, in their order; empty without any."""
    image = inputs.get("image")
    return image if isinstance(image, list) else [] if image is None else [image]
