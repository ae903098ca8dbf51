"""The world of films: its prompts, its drawings, its latents, its lists."""

import math
from pathlib import Path

import pytest
import torch

from miles_rollout.testing import films, tiny_minimax_h3
from miles_rollout.testing.film_score import color_score, loudness_score, window_loudness
from miles_rollout.testing.shapes import PALETTE

PROMPT_FILES = Path(__file__).parents[2] / "configs" / "prompts"


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_parse_prompt_is_the_inverse_of_prompt():
    for text in (*films.TRAIN_PROMPTS, *films.HELD_OUT_PROMPTS):
        assert films.prompt(*films.parse_prompt(text)) == text


@pytest.mark.parametrize(
    "text", ["a photo of a cat", "a red picture", "a red picture with pink sound"]
)
def test_a_prompt_that_names_no_film_says_what_to_write(text):
    with pytest.raises(ValueError, match=r"names no film; got .*; write 'a COLOR picture with"):
        films.parse_prompt(text)


def test_the_lists_are_disjoint_and_cover_every_theme():
    every = {*films.TRAIN_PROMPTS, *films.HELD_OUT_PROMPTS}
    assert len(every) == len(films.TRAIN_PROMPTS) + len(films.HELD_OUT_PROMPTS)
    assert len(every) == len(PALETTE) * len(films.SOUNDS)
    assert len(films.HELD_OUT_PROMPTS) == len(PALETTE)


def test_training_shows_every_word_of_a_held_out_theme():
    for names, part in ((PALETTE, 0), (films.SOUNDS, 1)):
        seen = {films.parse_prompt(text)[part] for text in films.TRAIN_PROMPTS}
        assert seen == set(names)


@pytest.mark.parametrize(
    ("name", "prompts"), [("train", films.TRAIN_PROMPTS), ("eval", films.HELD_OUT_PROMPTS)]
)
def test_the_prompt_files_hold_the_lists(name, prompts):
    lines = (PROMPT_FILES / f"films_{name}.txt").read_text(encoding="ascii").splitlines()
    assert tuple(lines) == prompts


def test_a_film_depends_on_its_generator_alone():
    theme = films.parse_prompt(films.TRAIN_PROMPTS[0])
    for make in (films.named, films.loose):
        assert make(theme, generator()) == make(theme, generator())
        assert make(theme, generator()) != make(theme, generator(1))


def test_a_loose_film_is_half_right():
    scores = []
    for text in films.TRAIN_PROMPTS:
        theme, random = films.parse_prompt(text), generator()
        for _ in range(4):
            film = films.loose(theme, random)
            video = films.draw_video(film, frames=2, size=4)
            audio = films.draw_audio(film, samples=40000, sampling_rate=8000)
            scores.append([color_score(video, theme), loudness_score(audio, 8000, theme)])
    color, sound = torch.tensor(scores).unbind(1)
    for score in (color, sound):
        assert 0.4 < score.mean() < 0.8
        assert score.std() > 0.2


def test_the_tone_has_the_loudness_that_is_meant():
    film = films.Film(color=(0.5, 0.5, 0.5), light=0.0, loudness=(1.0, 0.5), timbre=0.2)
    audio = films.draw_audio(film, samples=40000, sampling_rate=8000)
    heard = window_loudness(audio, 8000)
    assert torch.allclose(heard, torch.linspace(0.9875, 0.5125, 20), atol=0.01)
    # Half of the loudness is 10 dB less, but for the exponent's rounding.
    quieter = audio[:, -800:].square().mean() / audio[:, :800].square().mean()
    assert 10 * math.log10(quieter) == pytest.approx(-10, abs=0.3)


def test_an_excerpt_is_a_part_of_the_tone():
    film = films.Film(color=(0.5, 0.5, 0.5), light=0.0, loudness=(0.0, 1.0), timbre=-0.4)
    whole = films.draw_audio(film, samples=800, sampling_rate=8000)
    part = films.tone(film, torch.arange(200, 500), 800, 8000)
    # A sine's last bit depends on how the processor's vectors divide the tensor.
    assert torch.allclose(whole[0, 200:500], part, atol=1e-6)


def test_the_latents_are_the_film_where_the_latents_lie():
    film = films.Film(color=(0.3, 0.5, 0.7), light=1.0, loudness=(0.2, 0.8), timbre=0.5)
    video, audio = films.video_latents(film), films.audio_latents(film)
    drawn = films.draw_video(film, frames=124, size=32)
    # From frame 102 on, a chunk of 17 frames is 5 latents: one frame, then four times four.
    spans = [(102, 103), (103, 107), (107, 111), (111, 115), (115, 119)]
    for latent, (start, stop) in enumerate(spans, 30):
        quarters = drawn[start:stop].mean(0).unflatten(2, (2, 16)).unflatten(1, (2, 16))
        assert torch.allclose(video[:, latent], quarters.mean((2, 4)), atol=1e-3)
    assert torch.allclose(audio[0, 0, [0, 103, 206]], torch.tensor([0.2, 0.5, 0.8]), atol=2e-3)
    assert (audio[:, 1] == 0.5).all()


def test_the_latents_have_the_shape_that_the_pipeline_denoises():
    film = films.named(films.parse_prompt(films.TRAIN_PROMPTS[0]), generator())
    pipeline = tiny_minimax_h3(pretrained=True)
    made = pipeline(
        prompt=films.TRAIN_PROMPTS[0], height=32, width=32, num_frames=124,
        num_inference_steps=2, generator=generator(), output_type="pt",
        output=["latents", "audio_latents"],
    )  # fmt: skip
    assert made["latents"][0].shape == films.video_latents(film).shape
    assert made["audio_latents"].shape == films.audio_latents(film).shape
