"""What CLIP sees, against the model's parts put together by hand."""

import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPModel

from tests.trainers.rewards.tiny_clip import MEAN, STD, WORDS, random_image, save_clip
from trainers.config_loader import ConfigError
from trainers.rewards.clip_features import ClipFeatures
from trainers.rewards.pixels import to_bytes


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return save_clip(tmp_path_factory.mktemp("clip"))


def load(folder, **changes):
    settings = {"device": "cpu", "dtype": "float32", "batch_size": 2}
    names = {"model": str(folder), "processor": str(folder)}
    return ClipFeatures("some", **{**names, **settings, **changes})


@pytest.fixture(name="clip", scope="module")
def _clip(folder):
    return load(folder)


def picture_features(model, image):
    """[3, height, width] in 0..1, shortest side to 32 by Pillow's bicubic, the middle of it."""
    pixels = (image * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
    height, width = pixels.shape[:2]
    scale = 32 / min(height, width)
    size = (int(width * scale), int(height * scale))
    small = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
    top, left = (size[1] - 32) // 2, (size[0] - 32) // 2
    middle = small[top : top + 32, left : left + 32].astype(np.float32) / 255
    normal = (middle - np.float32(MEAN)) / np.float32(STD)
    batch = torch.from_numpy(normal).permute(2, 0, 1)[None]
    pooled = model.vision_model(pixel_values=batch).pooler_output
    features = model.visual_projection(pooled)[0]
    return features / features.norm()


def text_features(model, *words):
    ids = torch.tensor([[1, *(WORDS.index(word) for word in words), 2]])
    pooled = model.text_model(input_ids=ids).pooler_output
    features = model.text_projection(pooled)[0]
    return features / features.norm()


@torch.no_grad()
def test_pictures_are_those_of_the_model_whatever_the_batch(clip, folder):
    model = CLIPModel.from_pretrained(folder)
    images = [random_image(0), random_image(1, 64, 32), random_image(2, 32, 32)]
    wanted = torch.stack([picture_features(model, image) for image in images])
    found = clip.of_pictures([to_bytes(image) for image in images])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert (wanted[0] - wanted[1]).abs().max() > 0.01


@torch.no_grad()
def test_colours_keep_their_places(clip):
    image = random_image(0)
    straight, swapped = clip.of_pictures([to_bytes(image), to_bytes(image.flip(0))])
    assert (straight - swapped).abs().max() > 0.01


@torch.no_grad()
def test_texts_are_those_of_the_model_whatever_the_padding(clip, folder):
    model = CLIPModel.from_pretrained(folder)
    found = clip.of_texts(["a red cat", "dog", "a red cat", "two"])
    wanted = [("a", "red", "cat"), ("dog",), ("a", "red", "cat"), ("two",)]
    wanted_features = torch.stack([text_features(model, *words) for words in wanted])
    torch.testing.assert_close(found, wanted_features, rtol=0, atol=1e-5)
    assert (found[0] - found[1]).abs().max() > 0.01


@torch.no_grad()
def test_a_long_text_is_cut_and_still_ends(clip, folder):
    model = CLIPModel.from_pretrained(folder)
    found = clip.of_texts(["a a a a a a a a dog"])[0]
    wanted = text_features(model, *["a"] * 5)  # with its start and its end seven tokens
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@torch.no_grad()
def test_each_text_is_encoded_once(clip, monkeypatch):
    rows = []
    whole = clip.model.get_text_features

    def counted(**inputs):
        rows.append(len(inputs["input_ids"]))
        return whole(**inputs)

    monkeypatch.setattr(clip.model, "get_text_features", counted)
    clip.of_texts(["cat"] * 5 + ["dog"] * 5 + ["a"])
    assert rows == [2, 1]


@torch.no_grad()
def test_half_precision_is_near_and_its_cosines_are_single(folder):
    image = [to_bytes(random_image(0))]
    half = load(folder, dtype="bfloat16").of_pictures(image)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, load(folder).of_pictures(image), rtol=0, atol=0.03)


def test_the_logit_scale_is_the_models(clip):
    assert clip.logit_scale == pytest.approx(np.exp(2.6592), rel=1e-5)


def test_a_name_that_cannot_be_loaded_is_told_with_its_key(folder, tmp_path):
    message = (
        "reward 'some': its {} cannot be loaded; got '{}' (.*); set kwargs.{} to a folder, or to"
    )
    nowhere = "someone/not-in-the-cache"
    with pytest.raises(ConfigError, match=message.format("model", nowhere, "model")):
        load(folder, model=nowhere)
    with pytest.raises(ConfigError, match=message.format("processor", nowhere, "processor")):
        load(folder, processor=nowhere)
    with pytest.raises(
        ConfigError, match=message.format("model", re.escape(str(tmp_path)), "model")
    ):
        load(folder, model=str(tmp_path))


def test_a_damaged_file_is_told(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(
        ConfigError, match=r"reward 'some': its model cannot be loaded; got '.*copy' \("
    ):
        load(folder, model=str(copy))


def test_weights_that_are_missing_are_never_random(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    message = (
        "its model lacks weights, which would be random; got .* without 1, such as visual_proj"
    )
    with pytest.raises(ConfigError, match=message):
        load(folder, model=str(copy))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"dtype": "float8"},
            "reward 'some': dtype: unknown; got 'float8'; set one of float32, bf",
        ),
        ({"batch_size": 0}, "reward 'some': batch_size: must be positive; got 0; set 1 or more"),
        ({"device": "cuda:99"}, "reward 'some': device: not available here; got 'cuda:99' ("),
    ],
)
def test_wrong_settings_are_told_before_a_model_is_loaded(change, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message[:-2])}"):
        load("someone/not-in-the-cache", **change)
