"""The reward tells true films from wrong ones, in both media, and grades what lies between."""

import math

import pytest
import torch
from torch import Tensor

from miles_rollout import Media
from miles_rollout.testing import films, tiny_minimax_h3
from trainers.rewards.colour_and_loudness import colour_and_loudness
from trainers.rewards.scoring import RewardConfig, Scorer

PROMPTS = [*films.TRAIN_PROMPTS, *films.HELD_OUT_PROMPTS]
RED_LOUD = "a red picture with loud sound"
RATE = 8000
SECONDS = 5


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def film(prompt: str) -> Media:
    return shown(films.named(films.parse_prompt(prompt), generator()))


def shown(what: films.Film, *, size: int = 8, rate: int = RATE) -> Media:
    return Media(
        video=films.draw_video(what, frames=12, size=size),
        audio=films.draw_audio(what, samples=SECONDS * rate, sampling_rate=rate),
        fps=24,
        sampling_rate=rate,
    )


def sounding(wave: Tensor, rate: int = RATE) -> Media:
    return Media(video=film(RED_LOUD).video, audio=wave, fps=24, sampling_rate=rate)


def tone(rms: float) -> Tensor:
    wave = torch.sin(2 * math.pi * 400 / RATE * torch.arange(SECONDS * RATE))
    return (math.sqrt(2) * rms * wave).expand(2, -1)


def scores(media: list[Media], prompts: list[str]) -> dict[str, Tensor]:
    found = colour_and_loudness(media, prompts, [{}] * len(prompts))
    return {name: torch.tensor(values) for name, values in found.items()}


@pytest.mark.parametrize(("size", "rate"), [(8, 8000), (32, 32000), (9, 11025)])
def test_true_films_score_high(size, rate):
    media = [
        shown(films.named(films.parse_prompt(p), generator()), size=size, rate=rate)
        for p in PROMPTS[::3]
    ]
    found = scores(media, PROMPTS[::3])
    for name in ("video", "audio", "total"):
        assert found[name].min() > 0.9
        assert found[name].max() <= 1


def test_every_other_theme_scores_lower_in_what_differs():
    media = [film(p) for p in PROMPTS]
    for asked in PROMPTS[::4]:
        found = scores(media, [asked] * len(media))
        theme = films.parse_prompt(asked)
        for i, text in enumerate(PROMPTS):
            other = films.parse_prompt(text)
            assert (found["video"][i] > 0.9) == (other.color == theme.color)
            assert (found["audio"][i] > 0.9) == (other.sound == theme.sound)
            if other.color != theme.color:
                assert found["video"][i] < 0.1
            if other.sound != theme.sound:
                assert found["audio"][i] < 0.6


def test_the_total_is_the_mean_of_both():
    found = scores([film(p) for p in PROMPTS], [RED_LOUD] * len(PROMPTS))
    assert torch.allclose(found["total"], (found["video"] + found["audio"]) / 2)
    assert len(set(found["total"].tolist())) > 5


def test_silence_is_right_only_where_it_is_asked_for():
    silent = sounding(torch.zeros(2, SECONDS * RATE))
    asked = [f"a red picture with {sound} sound" for sound in films.SOUNDS]
    found = dict(zip(films.SOUNDS, scores([silent] * 5, asked)["audio"].tolist(), strict=True))
    assert found["no"] == 1
    assert found["loud"] < 1e-6
    assert found["soft"] < 0.01
    assert found["rising"] == pytest.approx(found["fading"])
    assert 0.05 < found["rising"] < 0.3


def test_clipped_sound_is_too_loud():
    clipped = sounding((100 * tone(1.0)).clamp(-1, 1))
    asked = [f"a red picture with {sound} sound" for sound in films.SOUNDS]
    assert scores([clipped] * 5, asked)["audio"].max() < 0.01


def test_both_scores_fall_smoothly_with_the_distance():
    steps = torch.linspace(0, 1, 6).tolist()
    louder = [sounding(tone(films.LOUD_RMS * 10 ** (-s))) for s in steps]
    greener = [
        Media(video=torch.lerp(film(RED_LOUD).video, film(RED_LOUD).video.flip(1), s), fps=24,
              audio=louder[0].audio, sampling_rate=RATE)
        for s in steps
    ]  # fmt: skip
    for media, name in ((louder, "audio"), (greener, "video")):
        found = scores(media, [RED_LOUD] * 6)[name].tolist()
        assert found == sorted(found, reverse=True)
        assert len(set(found)) == 6


def test_loudness_is_that_of_the_power_of_all_channels():
    left = tone(films.LOUD_RMS * math.sqrt(2)) * torch.tensor([[1.0], [0.0]])
    assert scores([sounding(left)], [RED_LOUD])["audio"] > 0.99
    assert scores([sounding(tone(films.LOUD_RMS)[:1])], [RED_LOUD])["audio"] > 0.99


def test_a_rise_is_no_fade_and_time_goes_by_the_sampling_rate():
    rising, fading = "a red picture with rising sound", "a red picture with fading sound"
    found = scores([film(rising), film(fading)], [fading, rising])["audio"]
    assert found.max() < 0.4
    # Of half the rate the same samples last twice as long: as many windows again, no other score.
    slow = sounding(film(rising).audio, RATE // 2)
    assert scores([slow], [rising])["audio"] > 0.9


@pytest.mark.parametrize(
    ("media", "prompt", "message"),
    [
        (
            Media(image=torch.zeros(3, 8, 8)),
            RED_LOUD,
            "looks at videos with sound; got an image; set another reward",
        ),
        (
            Media(video=torch.zeros(2, 3, 8, 8), fps=24),
            RED_LOUD,
            "got a video without sound; set another reward",
        ),
        (
            Media(
                video=torch.zeros(2, 3, 8, 8), fps=24, audio=torch.zeros(2, 99), sampling_rate=8000
            ),
            RED_LOUD,
            r"shorter than one window; got 99 samples at 8000 Hz; pass 0.25 s or more",
        ),
        (film(RED_LOUD), "a cat", "names no film; got 'a cat'; write 'a COLOR picture with"),
    ],
)
def test_what_cannot_be_scored_says_why(media, prompt, message):
    with pytest.raises(ValueError, match=message):
        colour_and_loudness([media], [prompt], [{}])


def test_by_name_a_film_without_sound_is_masked_and_the_others_are_scored():
    scorer = Scorer(
        [RewardConfig(name="colour_and_loudness")], timeout_s=60.0, max_masked_fraction=0.5
    )
    mute = Media(video=torch.zeros(2, 3, 8, 8), fps=24)
    found = scorer.score([film(RED_LOUD), mute], [RED_LOUD] * 2, [{}] * 2)
    assert found.masked.tolist() == [False, True]
    assert found.total[0] > 0.9
    assert found.components["colour_and_loudness/audio"][0] > 0.9


def film_of(pipeline, prompt: str, seed: int) -> Media:
    made = pipeline(
        prompt=prompt, height=32, width=32, num_frames=124, num_inference_steps=8,
        generator=torch.Generator().manual_seed(seed), output_type="pt",
        output=["videos", "audio", "sampling_rate"],
    )  # fmt: skip
    return Media(
        video=made["videos"][0],
        audio=made["audio"][0],
        fps=pipeline.fps,
        sampling_rate=made["sampling_rate"],
    )


def test_the_pretrained_form_scores_well_above_the_random_one_and_not_perfectly():
    """Fixed noise: only another build of torch could change the scores."""
    prompts = [prompt for prompt in PROMPTS[::5] for _ in range(2)]
    means = {}
    for form in (False, True):
        pipeline = tiny_minimax_h3(pretrained=form)
        media = [film_of(pipeline, prompt, seed) for seed, prompt in enumerate(prompts)]
        means[form] = {name: s.mean().item() for name, s in scores(media, prompts).items()}
    for name in ("video", "audio"):
        assert 0.35 < means[True][name] < 0.85
    assert means[True]["total"] > means[False]["total"] + 0.25
