"""PickScore's formula on a tiny model, and the frames of a video."""

import pytest
import torch
from transformers import CLIPModel

from miles_rollout import Media
from tests.tiny_run import tiny_config
from tests.trainers.rewards.test_clip_features import picture_features, text_features
from tests.trainers.rewards.tiny_clip import random_image, samples, save_clip
from trainers.build import build_trainer, read_inputs
from trainers.config_loader import ConfigError
from trainers.rewards import build_reward


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return str(save_clip(tmp_path_factory.mktemp("clip")))


def reward(folder, **kwargs):
    names = {"model": folder, "processor": folder, "device": "cpu"}
    return build_reward("pickscore", {**names, "batch_size": 2, **kwargs})


@torch.no_grad()
def score(reward, media, prompts):
    found = reward(media, prompts, [{}] * len(media))
    assert found.dtype == torch.float64
    return found.tolist()


@torch.no_grad()
def test_the_score_is_the_scaled_cosine_over_26(folder):
    model = CLIPModel.from_pretrained(folder)
    pairs = [(0, ("red", "cat")), (1, ("dog",)), (2, ("red", "cat"))]
    wanted = [
        model.logit_scale.exp()
        * (picture_features(model, random_image(seed)) @ text_features(model, *words))
        / 26
        for seed, words in pairs
    ]
    prompts = [" ".join(words) for _, words in pairs]
    found = score(reward(folder), samples(0, 1, 2), prompts)
    assert found == pytest.approx([w.item() for w in wanted], abs=1e-5)
    assert max(found) - min(found) > 0.01


def test_a_video_is_the_mean_over_evenly_spaced_frames(folder):
    frames = torch.stack([random_image(seed) for seed in range(5)])
    alone = score(reward(folder), [Media(image=frame) for frame in frames], ["cat"] * 5)
    film, still = Media(video=frames, fps=8), Media(image=frames[1])
    found = score(reward(folder, frames=3), [film, still], ["cat", "cat"])
    assert found == pytest.approx([(alone[0] + alone[2] + alone[4]) / 3, alone[1]], abs=1e-6)
    found = score(reward(folder, frames=9), [film], ["cat"])
    assert found == pytest.approx([sum(alone) / 5], abs=1e-6)


def test_wrong_frames_are_told(folder):
    with pytest.raises(ConfigError, match="reward 'pickscore': frames: must be positive; got 0"):
        reward(folder, frames=0)


def test_a_run_is_told_before_its_own_model_is_loaded(tmp_path):
    config = tiny_config(tmp_path, "rewards=[{name: pickscore, kwargs: {device: cpu}}]")
    message = "reward 'pickscore': its processor cannot be loaded; got 'laion/CLIP-ViT-H-14-laion2B"
    inputs = read_inputs(config)  # a dry run ends here, and loads none
    with pytest.raises(ConfigError, match=message):
        build_trainer(config, inputs)
