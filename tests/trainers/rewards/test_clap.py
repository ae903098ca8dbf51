"""CLAP on a tiny random model, against the model's parts put together by hand."""

import json
import re

import numpy as np
import pytest
import soxr
import torch
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel

from miles_rollout import Media
from miles_rollout.errors import RolloutParamsError
from tests.trainers.rewards.tiny_clip import WORDS, save_tokenizer
from trainers.config_loader import ConfigError
from trainers.rewards import build_reward

RATE = 48000


def save_clap(folder):
    """Model, tokenizer and feature extractor (1 s at 48 kHz) in one folder."""
    text = {
        "vocab_size": len(WORDS),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 8,
        "pad_token_id": 0,
        "projection_dim": 12,
    }
    audio = {
        "hidden_size": 32,
        "patch_embeds_hidden_size": 8,
        "depths": [1, 1],
        "num_attention_heads": [2, 2],
        "spec_size": 64,
        "num_mel_bins": 16,
        "window_size": 4,
        "num_classes": 2,
        "enable_fusion": False,
        "projection_dim": 12,
    }
    audio["hidden_size"] = audio["patch_embeds_hidden_size"] * 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=12))
        for parameter in model.parameters():  # the initial weights make all sounds alike
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder, max_length=512)
    ClapFeatureExtractor(
        feature_size=16, max_length_s=1, sampling_rate=RATE, truncation="rand_trunc"
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return save_clap(tmp_path_factory.mktemp("clap"))


def reward(folder, **kwargs):
    names = {"model": folder, "processor": folder, "device": "cpu"}
    return build_reward("clap", {**names, "batch_size": 2, **kwargs})


def tone(hertz, seconds=1.0, rate=RATE):
    """Sweeps up by an octave in a second, so that its parts differ."""
    t = torch.arange(int(seconds * rate), dtype=torch.float64) / rate
    return (0.5 * torch.sin(2 * torch.pi * hertz * (t + t * t / 2))).float()


def film(sound, rate=RATE):
    sound = sound if sound.ndim == 2 else sound[None]
    return Media(video=torch.zeros(1, 3, 4, 4), fps=8, audio=sound, sampling_rate=rate)


@torch.no_grad()
def by_hand(folder, sound, *words):
    """The cosine for one second at most of sound at 48 kHz."""
    model = ClapModel.from_pretrained(folder)
    extractor = ClapFeatureExtractor.from_pretrained(folder)
    mels = extractor(np.asarray(sound), sampling_rate=RATE, return_tensors="pt")["input_features"]
    heard = model.audio_projection(model.audio_model(input_features=mels).pooler_output)[0]
    ids = torch.tensor([[1, *(WORDS.index(word) for word in words), 2]])
    said = model.text_projection(model.text_model(input_ids=ids).pooler_output)[0]
    return (heard @ said / heard.norm() / said.norm()).item()


@torch.no_grad()
def score(reward, media, *prompts):
    return reward(media, list(prompts), [{}] * len(media)).tolist()


def test_the_score_is_the_cosine_of_sound_and_text(folder):
    sounds = [tone(200), tone(3000), tone(900, seconds=0.3)]
    texts = [("red", "cat"), ("dog",), ("a", "blue", "dog")]
    wanted = [by_hand(folder, s, *t) for s, t in zip(sounds, texts, strict=True)]
    found = score(reward(folder), [film(s) for s in sounds], *map(" ".join, texts))
    assert found == pytest.approx(wanted, abs=1e-5)
    same = score(reward(folder), [film(s) for s in sounds], "cat", "cat", "cat")
    assert max(same) - min(same) > 1e-3


def test_channels_are_averaged_and_the_rate_is_the_models(folder):
    left, right = tone(200), tone(3000)
    wanted = by_hand(folder, (left + right) / 2, "cat")
    assert score(reward(folder), [film(torch.stack([left, right]))], "cat") == [
        pytest.approx(wanted, abs=1e-5)
    ]
    low = tone(200, rate=16000)
    resampled = soxr.resample(low.numpy(), 16000, RATE)
    assert len(resampled) == RATE
    found = score(reward(folder), [film(low, 16000)], "cat")
    assert found == pytest.approx([by_hand(folder, resampled, "cat")], abs=1e-5)


def test_long_sound_is_heard_whole_in_windows_and_the_same_each_time(folder):
    sound = tone(200, seconds=2.5)
    starts = (0, int(0.75 * RATE), int(1.5 * RATE))
    parts = [by_hand(folder, sound[s : s + RATE], "cat") for s in starts]
    state = json.dumps(np.random.get_state()[1].tolist())
    found = score(reward(folder), [film(sound), film(tone(900))], "cat", "dog")
    assert json.dumps(np.random.get_state()[1].tolist()) == state
    assert found == pytest.approx([sum(parts) / 3, by_hand(folder, tone(900), "dog")], abs=1e-5)
    assert max(parts) - min(parts) > 1e-3


def test_a_long_text_is_cut(folder):
    # Eight positions, of which RoBERTa does not use the first one.
    found = score(reward(folder), [film(tone(200))], "a a a a a a a a a dog")
    assert found == pytest.approx([by_hand(folder, tone(200), *["a"] * 5)], abs=1e-5)


@pytest.mark.parametrize(
    ("media", "message"),
    [
        (Media(image=torch.zeros(3, 4, 4)), "clap: listens to the sound of a video; got an image"),
        (Media(video=torch.zeros(1, 3, 4, 4), fps=8), "got a video without sound; set another"),
        (film(torch.zeros(0)), "clap: the sound is empty or holds NaN or infinity"),
        (film(torch.tensor([0.0, torch.inf])), "clap: the sound is empty or holds NaN"),
        (
            film(torch.tensor([0.1]), rate=192_000),
            "the sound is shorter than one sample at 48000 a second; got 1 at 192000",
        ),
    ],
)
def test_what_cannot_be_heard_has_no_score(folder, media, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        score(reward(folder), [media], "cat")
    assert ("set another" in str(raised.value)) == isinstance(raised.value, RolloutParamsError)


def test_a_model_that_draws_at_random_is_refused(folder, tmp_path):
    save_clap(tmp_path)
    ClapFeatureExtractor(feature_size=16, truncation="fusion").save_pretrained(tmp_path)
    message = (
        "reward 'clap': models with fusion look at pieces drawn at random; got '.*'; set a proc"
    )
    with pytest.raises(ConfigError, match=message):
        reward(folder, processor=str(tmp_path))


def test_a_name_that_cannot_be_loaded_is_told():
    with pytest.raises(
        ConfigError, match="reward 'clap': its processor cannot be loaded; got 'laion"
    ):
        build_reward("clap", {"device": "cpu"})
