"""The aesthetic head on a tiny CLIP, and the files that it refuses."""

import re

import pytest
import torch
from safetensors.torch import save_file
from transformers import CLIPModel

from miles_rollout import Media
from tests.trainers.rewards.test_clip_features import picture_features
from tests.trainers.rewards.tiny_clip import WIDTH, random_image, samples, save_clip
from trainers.config_loader import ConfigError
from trainers.rewards import build_reward
from trainers.rewards.aesthetic import read_head


def head(widths=(WIDTH, 8, 4, 1), numbers=(0, 2, 10)):
    """As the published file: numbered with the layers of dropout between, so 10 comes after 2."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for number, inner, outer in zip(numbers, widths, widths[1:], strict=False):
        tensors[f"layers.{number}.weight"] = torch.randn(outer, inner, generator=generator)
        tensors[f"layers.{number}.bias"] = torch.randn(outer, generator=generator)
    return tensors


@pytest.fixture(name="kwargs", scope="module")
def _kwargs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    save_clip(folder)
    save_file(head(), folder / "head.safetensors")
    names = {"model": str(folder), "processor": str(folder), "device": "cpu"}
    return {**names, "head": str(folder / "head.safetensors")}


@torch.no_grad()
def test_the_score_is_the_heads_of_the_normalised_features(kwargs):
    model, weights = CLIPModel.from_pretrained(kwargs["model"]), head()
    wanted = []
    for seed in (0, 1, 2):
        values = picture_features(model, random_image(seed))
        for number in (0, 2, 10):
            values = weights[f"layers.{number}.weight"] @ values + weights[f"layers.{number}.bias"]
        wanted.append(values.item())
    reward = build_reward("aesthetic", kwargs)
    found = reward(samples(0, 1, 2), [""] * 3, [{}] * 3)
    assert found.tolist() == pytest.approx(wanted, abs=1e-4)
    assert found.std() > 0.01
    film = Media(video=torch.stack([random_image(seed) for seed in (0, 1, 2)]), fps=8)
    assert reward([film], [""], [{}]).tolist() == pytest.approx([sum(wanted) / 3], abs=1e-4)


def test_a_head_of_another_width_is_told(kwargs, tmp_path):
    save_file(head((768, 4, 2, 1)), tmp_path / "wide.safetensors")
    message = "head and model differ in width; got 768 in .*wide.safetensors' and 12 in"
    with pytest.raises(ConfigError, match=message):
        build_reward("aesthetic", {**kwargs, "head": str(tmp_path / "wide.safetensors")})


@pytest.mark.parametrize(
    "tensors",
    [
        head((4, 3, 2, 2)),
        {**head(), "other": torch.zeros(1)},
        {k: v for k, v in head().items() if k != "layers.2.bias"},
        {**head(), "layers.2.weight": torch.zeros(4, 9)},
        {"weight": torch.zeros(1, 1)},
        {**head(), "layers.2.weight": torch.zeros(8)},
        {"layers.0.weight": torch.zeros(1), "layers.0.bias": torch.zeros(1)},
        {**head(), "layers.2.bias": torch.zeros(1)},
    ],
)
def test_a_file_that_is_no_head_is_told(tensors, tmp_path):
    path = tmp_path / "head.safetensors"
    save_file(tensors, path)
    message = (
        "reward 'aesthetic': its head is no chain of linear layers that ends in one number; got"
    )
    with pytest.raises(ConfigError, match=message):
        read_head(path)


def test_a_file_that_cannot_be_read_is_told_before_a_model_is_loaded(tmp_path):
    path = tmp_path / "sac+logos+ava1-l14-linearMSE.pth"
    message = f"reward 'aesthetic': its head cannot be read; got '{re.escape(str(path))}'"
    with pytest.raises(ConfigError, match=message):
        build_reward("aesthetic", {"head": str(path)})
    path.write_bytes(b"PK\x03\x04 a pickle in a zip")
    with pytest.raises(ConfigError, match=message):
        build_reward("aesthetic", {"head": str(path)})
