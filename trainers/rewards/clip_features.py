"""Pictures and texts as a CLIP model sees them: what the rewards with such a model share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from miles_rollout import Media
from miles_rollout.shapes import Float
from trainers.devices import build_device
from trainers.rewards.pixels import mean_per_sample, pictures
from trainers.rewards.pretrained import check_settings, load, load_model


class ClipFeatures:
    """A ``transformers.CLIPModel`` with the image processor and the tokenizer of ``processor``."""

    def __init__(
        self,
        reward: str,
        *,
        model: str,
        processor: str,
        device: str,
        dtype: str,
        batch_size: int,
    ) -> None:
        check_settings(reward, dtype=dtype, batch_size=batch_size)
        where = build_device(device, f"reward {reward!r}: device")
        from transformers import AutoTokenizer, CLIPModel

        self.batch_size = batch_size
        self.processor = load(reward, "processor", processor, _pil_image_processor)
        self.tokenizer = load(reward, "processor", processor, AutoTokenizer.from_pretrained)
        self.model = load_model(reward, model, CLIPModel, dtype=dtype, device=where)
        self.max_tokens = self.model.config.text_config.max_position_embeddings

    @property
    def logit_scale(self) -> float:
        """What cosines are multiplied by to be logits."""
        return float(self.model.logit_scale.float().exp())

    def of_pictures(self, images: Sequence[np.ndarray]) -> Float[Tensor, "pictures width"]:
        """Of uint8 [height, width, 3] each; float32, of length 1."""

        def features(batch: Sequence[np.ndarray]) -> Tensor:
            inputs = self.processor([Image.fromarray(i) for i in batch], return_tensors="pt")
            pixels = inputs["pixel_values"].to(self.model.device, self.model.dtype)
            found: Tensor = self.model.get_image_features(pixel_values=pixels).pooler_output
            return found

        return self._batched(features, images)

    def of_texts(self, texts: Sequence[str]) -> Float[Tensor, "texts width"]:
        """float32, of length 1; each distinct text is encoded once, and cut where CLIP ends (77)."""
        distinct = list(dict.fromkeys(texts))

        def features(batch: Sequence[str]) -> Tensor:
            inputs = self.tokenizer(
                list(batch),
                padding=True,
                truncation=True,
                max_length=self.max_tokens,
                return_tensors="pt",
            ).to(self.model.device)
            found: Tensor = self.model.get_text_features(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
            ).pooler_output
            return found

        rows = {text: i for i, text in enumerate(distinct)}
        return self._batched(features, distinct)[[rows[text] for text in texts]]

    def _batched(self, features: Callable[[Sequence[Any]], Tensor], items: Sequence[Any]) -> Tensor:
        starts = range(0, len(items), self.batch_size)
        batches = [features(items[i : i + self.batch_size]) for i in starts]
        return F.normalize(torch.cat(batches).float(), dim=-1)


class ImageTextSimilarity:
    """Reward: the cosine of picture and prompt, times ``scale``; of a video the mean over frames."""

    def __init__(self, clip: ClipFeatures, *, scale: float | int, frames: int) -> None:
        self.clip = clip
        self.scale = scale
        self.frames = frames

    def __call__(
        self,
        media: Sequence[Media],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> Float[Tensor, " samples"]:
        """float64; ``metadata`` is not looked at."""
        images, owners = pictures(media, self.frames)
        texts = self.clip.of_texts(prompts)
        cosines = (self.clip.of_pictures(images) * texts[owners.to(texts.device)]).sum(dim=-1)
        return mean_per_sample(cosines * self.scale, owners, len(media))


def _pil_image_processor(name: str) -> Any:
    """The image processor that resizes with Pillow, whether or not torchvision is installed.

    The two resize differently by some gray levels, and a score should not depend on that.
    """
    import transformers

    plain = transformers.CLIPImageProcessor  # the one of Pillow where there is no other name for it
    return getattr(transformers, "CLIPImageProcessorPil", plain).from_pretrained(name)
