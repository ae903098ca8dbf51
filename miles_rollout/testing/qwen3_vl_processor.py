"""A ``Qwen3VLProcessor`` for text, images and videos that does without torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, Qwen2Tokenizer

from miles_rollout.testing import qwen_vl

_PATCH, _MERGE, _FRAMES = 16, 2, 2


class TinyVideoProcessor:
    """What the video processor of Qwen3-VL does with frames that were sampled already."""

    patch_size, merge_size, temporal_patch_size = _PATCH, _MERGE, _FRAMES

    def __call__(
        self, videos: Sequence[np.ndarray], do_sample_frames: bool, return_tensors: str
    ) -> BatchFeature:
        """From videos [frames, height, width, 3] to patches of two frames each, and the grids."""
        if do_sample_frames or return_tensors != "pt":
            raise ValueError("TinyVideoProcessor: takes sampled frames and gives torch tensors")
        by_frame = qwen_vl.image_processor(_PATCH, temporal_patch_size=1)
        patches, grids = [], []
        for video in videos:
            frames = [*video] + [video[-1]] * (-len(video) % _FRAMES)
            made = by_frame(images=frames, return_tensors="pt")
            _, height, width = made["image_grid_thw"][0].tolist()
            pairs = len(frames) // _FRAMES
            # [pairs, frame, patches, channel, pixels] to [pairs, patches, channel, frame, pixels]
            parts = made["pixel_values"].view(pairs, _FRAMES, height * width, 3, -1)
            patches.append(parts.permute(0, 2, 3, 1, 4).reshape(pairs * height * width, -1))
            grids.append([pairs, height, width])
        return BatchFeature(
            {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
        )


class TinyQwen3VLProcessor(qwen_vl.ImageProcessor3):
    """With videos as well; it can be saved and loaded."""

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """The tokenizer: all else is the same for every instance."""
        self.tokenizer.save_pretrained(save_directory)

    @classmethod
    def from_pretrained(cls, name: str | Path, subfolder: str = "", **kwargs: Any) -> Any:
        """From a folder that ``save_pretrained`` wrote."""
        return processor(Qwen2Tokenizer.from_pretrained(Path(name, subfolder)))


def processor(tokenizer: Any) -> TinyQwen3VLProcessor:
    """Patches of 16 pixels, merged 2 x 2, and pairs of frames, as in Qwen3-VL."""
    return TinyQwen3VLProcessor(qwen_vl.image_processor(_PATCH), tokenizer, TinyVideoProcessor())
