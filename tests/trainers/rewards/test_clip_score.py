"""CLIPScore's formula on a tiny model."""

import pytest
import torch
from transformers import CLIPModel

from tests.trainers.rewards.test_clip_features import picture_features, text_features
from tests.trainers.rewards.tiny_clip import random_image, samples, save_clip
from trainers.config_loader import ConfigError
from trainers.rewards import build_reward


@torch.no_grad()
def test_the_score_is_the_logit_over_30_or_the_cosine(tmp_path):
    folder = str(save_clip(tmp_path))
    kwargs = {"model": folder, "processor": folder, "device": "cpu"}
    model = CLIPModel.from_pretrained(folder)
    cosines = [
        (picture_features(model, random_image(seed)) @ text_features(model, "red", "dog")).item()
        for seed in (0, 1)
    ]
    scale = model.logit_scale.exp().item()

    def score(**more):
        reward = build_reward("clip_score", {**kwargs, **more})
        return reward(samples(0, 1), ["red dog"] * 2, [{}] * 2).tolist()

    assert score() == pytest.approx([c * scale / 30 for c in cosines], abs=1e-5)
    assert score(divisor=None) == pytest.approx(cosines, abs=1e-5)
    assert abs(cosines[0] - cosines[1]) > 0.01


def test_a_divisor_of_nothing_is_told():
    with pytest.raises(
        ConfigError, match=r"'clip_score': divisor: must be positive; got 0\.0; set 30"
    ):
        build_reward("clip_score", {"divisor": 0.0})
