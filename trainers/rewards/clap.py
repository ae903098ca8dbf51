"""Reward: how well the sound of a video fits its prompt, by CLAP (arXiv 2211.06687)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from miles_rollout import Media
from miles_rollout.shapes import Float
from trainers.config_loader import ConfigError
from trainers.devices import build_device
from trainers.rewards.pixels import evenly_spaced, mean_per_sample
from trainers.rewards.pretrained import check_settings, load, load_model, require
from trainers.rewards.sound import mono


class Clap:
    """The cosine of sound and prompt, in -1..1.

    The model hears ``max_length_s`` of its processor, 10 s, at once, and its own processor cuts
    such a piece out at random. Here longer sound is cut into as few such windows as hold all of it, evenly
    spaced, and the score is the mean over them. ``model`` and ``processor`` are folders or hub names. Raises
    ``ConfigError`` for a model that cannot be loaded.
    """

    def __init__(
        self,
        *,
        model: str = "laion/larger_clap_general",
        processor: str = "laion/larger_clap_general",
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 16,
    ) -> None:
        check_settings("clap", dtype=dtype, batch_size=batch_size)
        where = build_device(device, "reward 'clap': device")
        self.soxr = require("clap", "clap", "soxr")
        from transformers import AutoFeatureExtractor, AutoTokenizer, ClapModel

        self.batch_size = batch_size
        extractor = AutoFeatureExtractor.from_pretrained
        self.extractor = load("clap", "processor", processor, extractor)
        self.tokenizer = load("clap", "processor", processor, AutoTokenizer.from_pretrained)
        if self.extractor.truncation == "fusion":
            raise ConfigError(
                "reward 'clap': models with fusion look at pieces drawn at random; got "
                f"{processor!r}; set a processor and model without, such as laion/larger_clap_general"
            )
        self.model = load_model("clap", model, ClapModel, dtype=dtype, device=where)
        # Positions of a RoBERTa start after its padding token's.
        text = self.model.config.text_config
        self.max_tokens = text.max_position_embeddings - text.pad_token_id - 1

    def __call__(
        self,
        media: Sequence[Media],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> Float[Tensor, " samples"]:
        """float64; ``metadata`` is not looked at."""
        windows: list[np.ndarray] = []
        owners: list[int] = []
        for i, item in enumerate(media):
            sound = mono("clap", item, self.extractor.sampling_rate, self.soxr)
            cut = _windows(sound, self.extractor.nb_max_samples)
            windows += cut
            owners += [i] * len(cut)
        heard, index = self._of_sounds(windows), torch.tensor(owners)
        said = self._of_texts(prompts)
        cosines = (heard * said[index.to(said.device)]).sum(dim=-1)
        return mean_per_sample(cosines, index, len(media))

    def _of_sounds(self, windows: Sequence[np.ndarray]) -> Float[Tensor, "windows width"]:
        found = []
        for i in range(0, len(windows), self.batch_size):
            inputs = self.extractor(
                windows[i : i + self.batch_size],
                sampling_rate=self.extractor.sampling_rate,
                return_tensors="pt",
            )
            mels = inputs["input_features"].to(self.model.device, self.model.dtype)
            found.append(self.model.get_audio_features(input_features=mels).pooler_output)
        return F.normalize(torch.cat(found).float(), dim=-1)

    def _of_texts(self, texts: Sequence[str]) -> Float[Tensor, "texts width"]:
        distinct = list(dict.fromkeys(texts))
        found = []
        for i in range(0, len(distinct), self.batch_size):
            inputs = self.tokenizer(
                distinct[i : i + self.batch_size],
                padding=True,
                truncation=True,
                max_length=self.max_tokens,
                return_tensors="pt",
            ).to(self.model.device)
            output = self.model.get_text_features(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
            )
            found.append(output.pooler_output)
        rows = {text: i for i, text in enumerate(distinct)}
        return F.normalize(torch.cat(found).float(), dim=-1)[[rows[text] for text in texts]]


def _windows(sound: np.ndarray, size: int) -> list[np.ndarray]:
    count = -(-len(sound) // size)
    last = max(len(sound) - size, 0)
    return [sound[start : start + size] for start in evenly_spaced(last + 1, count)]
