"""Pretrains the tiny H3 on drawn films: ``python -m miles_rollout.testing.pretrain_minimax_h3``.

The latents are chosen, not learned: colours at the middle of each latent's pixels, loudness and
timbre. The transformer learns to denoise them by flow matching, and the decoders of both VAEs to
draw films from them; the encoders keep their random weights. One thread and a passed
generators: the same machine writes the same file, in under half an hour. The films show
their prompts loosely, so that reinforcement learning has something to improve.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3SetTimestepsStep,
    patchify_video_latents,
)
from safetensors.torch import save_file
from torch import Tensor, nn

from miles_rollout.shapes import Float
from miles_rollout.testing import films, minimax_h3
from miles_rollout.testing.film_score import color_score, loudness_score

SIZE = 32
FRAMES = 124
NUM_FILMS = 6400
BLUR = 0.1  # of the latents that the decoders are trained on, in standard deviations
VIDEO_STEPS, VIDEO_BATCH, VIDEO_LR = 800, 16, 5e-3
AUDIO_STEPS, AUDIO_BATCH, AUDIO_LR = 800, 12, 5e-3
AUDIO_LATENTS = 12  # of a training excerpt
LR = 2e-3
STAGES = ((2400, 16, 1, 1), (700, 64, 26, 2), (300, 24, 5, 3), (400, 8, 1, 3))
"""Of the transformer: steps, batch, one in how many audio rows, how crowded near noise level 1.

Among all rows of sound the few of the prompt are hardly seen; among few they are.
"""
AVERAGE = 0.995  # decay of the averaged weights, which are the ones that are kept
POINTS = 8


def main() -> None:
    """Writes the weights, then says how good they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=minimax_h3.WEIGHTS)
    out: Path = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    generator, for_video, for_audio, *later = (
        torch.Generator().manual_seed(seed) for seed in range(2 + len(STAGES))
    )

    prompts, shown = draw_films(generator)
    video = torch.stack([films.video_latents(film) for film in shown])
    audio = torch.stack([films.audio_latents(film) for film in shown])
    statistics = [
        (latents.mean(axes), latents.std(axes))
        for latents, axes in ((video, (0, 2, 3, 4)), (audio, (0, 1, 3)))
    ]
    as_lists = [(mean.tolist(), std.tolist()) for mean, std in statistics]
    pipeline = minimax_h3.build(minimax_h3.PRETRAINED, *as_lists, seed=0, dtype=torch.float32)
    rows = normalised(video, audio, statistics)
    for stage, draws in zip(STAGES, (generator, *later), strict=True):
        train_transformer(pipeline, prompts, *rows, draws, *stage)
    train_video_decoder(pipeline, shown, video, statistics[0][1], for_video)
    train_audio_decoder(pipeline, shown, audio, statistics[1][1], for_audio)
    save(pipeline, statistics, out)
    report(minimax_h3.load(out))


def draw_films(generator: torch.Generator) -> tuple[list[int], list[films.Film]]:
    """Films, and for each the index of its prompt in ``TRAIN_PROMPTS``."""
    prompts = [i % len(films.TRAIN_PROMPTS) for i in range(NUM_FILMS)]
    themes = [films.parse_prompt(text) for text in films.TRAIN_PROMPTS]
    return prompts, [films.loose(themes[i], generator) for i in prompts]


def normalised(
    video: Float[Tensor, "films 3 37 2 2"],
    audio: Float[Tensor, "films 2 2 207"],
    statistics: list[tuple[Tensor, Tensor]],
) -> tuple[Float[Tensor, "films 37 12"], Float[Tensor, "films 414 2"]]:
    """Both latents as the packed rows that the transformer sees."""
    (video_mean, video_std), (audio_mean, audio_std) = statistics
    video = (video - video_mean.view(-1, 1, 1, 1)) / video_std.view(-1, 1, 1, 1)
    audio = (audio - audio_mean.view(-1, 1)) / audio_std.view(-1, 1)
    video_rows = patchify_video_latents(video, (1, 2, 2)).view(len(video), 37, 12)
    return video_rows, audio.transpose(2, 3).reshape(len(audio), 414, 2)


def train_video_decoder(
    pipeline: Any,
    shown: list[films.Film],
    latents: Float[Tensor, "films 3 37 2 2"],
    std: Float[Tensor, " 3"],
    generator: torch.Generator,
) -> None:
    """Squared error of the decoded pictures, in the units in which the VAE decodes."""
    vae = pipeline.vae
    mean, scale = (
        torch.tensor(values).view(3, 1, 1, 1)
        for values in (pipeline.pixel_mean, pipeline.pixel_std)
    )

    halves = (torch.arange(SIZE) + 0.5) / SIZE * 2 - 1
    frames = (torch.arange(FRAMES) + 0.5) / FRAMES

    def loss_of(batch: Tensor) -> Tensor:
        # 7 latents are what the VAE decodes at a time: 22 frames, of which the last 5 overlap.
        clip = int(torch.randint(7, (), generator=generator))
        given = latents[batch, :, 5 * clip : 5 * clip + 7]
        times = frames[17 * clip : 17 * clip + 22]
        drawn = [films.colors(shown[i], times, halves, halves) for i in batch.tolist()]
        wanted = (torch.stack(drawn).transpose(1, 2) - mean) / scale
        return F.mse_loss(vae.decode(blurred(given, std, generator)).sample, wanted)

    modules = [vae.post_quant_conv, vae.decoder]
    fit("video decoder", modules, loss_of, VIDEO_LR, VIDEO_STEPS, VIDEO_BATCH, generator)


def train_audio_decoder(
    pipeline: Any,
    shown: list[films.Film],
    latents: Float[Tensor, "films 2 2 207"],
    std: Float[Tensor, " 2"],
    generator: torch.Generator,
) -> None:
    """Squared error of the decoded tone plus that of its loudness, on excerpts.

    The loudness error is what makes silence silent: a faint tone's squared error is next to none.
    """
    vae = pipeline.audio_vae
    rate = vae.config.sampling_rate
    hop = vae.hop_length

    def loss_of(batch: Tensor) -> Tensor:
        start = int(torch.randint(207 - AUDIO_LATENTS + 1, (), generator=generator))
        given = latents[batch, 0, :, start : start + AUDIO_LATENTS]
        excerpt = torch.arange(start * hop, (start + AUDIO_LATENTS) * hop)
        wanted = torch.stack(
            [films.tone(shown[i], excerpt, 207 * hop, rate) for i in batch.tolist()]
        ).unsqueeze(1)
        decoded = vae.decode(blurred(given, std, generator)).sample
        levels = [levels_of(wave, hop) for wave in (decoded, wanted)]
        return 20 * F.mse_loss(decoded, wanted) + F.mse_loss(*levels)

    modules = [vae.dec_in_proj, vae.decoder]
    fit("audio decoder", modules, loss_of, AUDIO_LR, AUDIO_STEPS, AUDIO_BATCH, generator)


def levels_of(wave: Float[Tensor, "batch 1 samples"], hop: int) -> Float[Tensor, "batch latents"]:
    """Loudness of the part that each latent decodes to, with a bounded gradient at silence."""
    power = wave.unflatten(-1, (-1, hop)).square().mean((1, 3))
    return ((power + 1e-6) / films.LOUD_RMS**2) ** (films.LOUDNESS_EXPONENT / 2)


def blurred(latents: Tensor, std: Tensor, generator: torch.Generator) -> Tensor:
    """With a little noise, as the last denoising step leaves it."""
    noise = torch.randn(latents.shape, generator=generator)
    return latents + BLUR * std.view(1, -1, *[1] * (latents.dim() - 2)) * noise


def train_transformer(
    pipeline: Any,
    prompts: list[int],
    video: Float[Tensor, "films 37 12"],
    audio: Float[Tensor, "films 414 2"],
    generator: torch.Generator,
    steps: int,
    batch_size: int,
    one_in: int,
    crowded: int,
) -> None:
    """Flow matching: from ``(1 - s) * rows + s * noise`` and ``1 - s`` to ``rows - noise``.

    A batch shares one pair of noise levels: a step's video and audio levels belong together, and
    the packed sequence has one timestep a row but not a batch item. ``crowded`` above 1 trains
    more where the noise is strong and the prompt alone tells what is to come.
    """
    layout, embeds = recorded(pipeline)
    one_frame_in = math.ceil(one_in / 6)
    layout = thinned(layout, one_frame_in, one_in)
    video, audio = video[:, ::one_frame_in], audio[:, ::one_in]
    prompt_of = torch.tensor(prompts)
    transformer = pipeline.transformer
    place = 0.0

    def loss_of(batch: Tensor) -> Tensor:
        nonlocal place
        place = (place + (math.sqrt(5) - 1) / 2) % 1  # evenly spread, whatever the number of steps
        base = place ** (1 / crowded)
        levels = [
            shift * base / (1 + (shift - 1) * base)
            for shift in (pipeline.scheduler.shift, pipeline.audio_scheduler.shift)
        ]
        timesteps, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            layout["video_indices"], layout["audio_indices"], 0, 0,
            len(layout["text_indices"]), 1 - levels[0], 1 - levels[1], 1.0, 1.0,
        )  # fmt: skip
        clean = video[batch], audio[batch]
        noise = [torch.randn(rows.shape, generator=generator) for rows in clean]
        noisy = [torch.lerp(rows, n, s) for rows, n, s in zip(clean, noise, levels, strict=True)]
        velocities = transformer(
            hidden_states=noisy[0],
            audio_hidden_states=noisy[1],
            encoder_hidden_states=embeds[prompt_of[batch]],
            timestep=timesteps,
            timestep_indices=indices,
            return_dict=False,
            **layout,
        )
        errors = [
            F.mse_loss(v, rows - n) for v, rows, n in zip(velocities, clean, noise, strict=True)
        ]
        return errors[0] + errors[1]

    average = [p.detach().clone() for p in transformer.parameters()]

    def after(step: int) -> None:
        decay = min(AVERAGE, (1 + step) / (10 + step))
        for kept, now in zip(average, transformer.parameters(), strict=True):
            kept.lerp_(now.detach(), 1 - decay)

    fit("transformer", [transformer], loss_of, LR, steps, batch_size, generator, after)
    for kept, now in zip(average, transformer.parameters(), strict=True):
        now.data.copy_(kept.half())  # as it is saved


def recorded(pipeline: Any) -> tuple[dict[str, Tensor], Float[Tensor, "prompts tokens features"]]:
    """The layout of the packed sequence and every prompt's embeddings, from stock calls."""
    calls: list[dict[str, Any]] = []
    hook = pipeline.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    for text in films.TRAIN_PROMPTS:
        pipeline(
            prompt=text, height=SIZE, width=SIZE, num_frames=FRAMES, num_inference_steps=2,
            generator=torch.Generator().manual_seed(0), output="latents", output_type="pt",
        )  # fmt: skip
    hook.remove()
    names = ("token_tags", "position_ids", "video_indices", "audio_indices", "text_indices")
    embeds = torch.cat([call["encoder_hidden_states"] for call in calls])
    return {name: calls[0][name] for name in names}, embeds


def thinned(layout: dict[str, Tensor], one_frame_in: int, one_in: int) -> dict[str, Tensor]:
    """The packed sequence with one row in so many of each stream, at their places in time."""
    parts = {
        "text_indices": layout["text_indices"],
        "audio_indices": layout["audio_indices"][::one_in],
        "video_indices": layout["video_indices"][::one_frame_in],
    }
    kept = torch.cat(list(parts.values()))
    rows = torch.arange(len(kept)).split([len(part) for part in parts.values()])
    return {
        "token_tags": layout["token_tags"][kept],
        "position_ids": layout["position_ids"][kept],
        **dict(zip(parts, rows, strict=True)),
    }


def fit(
    name: str,
    modules: list[nn.Module],
    loss_of: Callable[[Tensor], Tensor],
    lr: float,
    steps: int,
    batch: int,
    generator: torch.Generator,
    after: Callable[[int], None] = lambda step: None,
) -> None:
    """AdamW on ``loss_of`` random film indices; warms up over 50 steps and ends at a rate of 0."""
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.01)
    for step in range(steps):
        rate = lr * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(torch.randint(NUM_FILMS, (batch,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        after(step)
        if step % 50 == 0:
            print(f"{name} {step}/{steps}: loss {loss.item():.4f}", flush=True)


def save(pipeline: Any, statistics: list[tuple[Tensor, Tensor]], file: Path) -> None:
    """Every trained weight in half precision, and the latents' statistics in single."""
    tensors = {
        f"{name}.latents_{part}": value
        for name, pair in zip(("vae", "audio_vae"), statistics, strict=True)
        for part, value in zip(("mean", "std"), pair, strict=True)
    }
    for name, module in minimax_h3.trained_modules(pipeline).items():
        for key, value in module.named_parameters():
            tensors[f"{name}.{key}"] = value.detach().half().contiguous()
    save_file(tensors, file)
    print(f"wrote {file}: {file.stat().st_size / 2**20:.2f} MiB", flush=True)


def report(pipeline: Any, films_per_prompt: int = 4) -> None:
    """Prints how well prompts are shown: those trained on, and those held out."""
    for name, prompts in ("train", films.TRAIN_PROMPTS[::2]), ("held-out", films.HELD_OUT_PROMPTS):
        scores = torch.tensor(
            [[film_scores(pipeline, p, seed) for seed in range(films_per_prompt)] for p in prompts]
        )
        color, sound = scores.mean((0, 1)).tolist()
        print(
            f"{name} prompts: mean score of the colour {color:.3f}, of the loudness {sound:.3f}; "
            f"deviation within a prompt {scores.std(1).mean(0).tolist()}, of their mean "
            f"{scores.mean(2).std(1).mean():.3f}",
            flush=True,
        )


def film_scores(pipeline: Any, prompt: str, seed: int) -> tuple[float, float]:
    """Of one film from fixed noise."""
    made = pipeline(
        prompt=prompt, height=SIZE, width=SIZE, num_frames=FRAMES, num_inference_steps=POINTS,
        generator=torch.Generator().manual_seed(seed), output_type="pt",
        output=["videos", "audio", "sampling_rate"],
    )  # fmt: skip
    theme = films.parse_prompt(prompt)
    return (
        color_score(made["videos"][0], theme),
        loudness_score(made["audio"][0], made["sampling_rate"], theme),
    )


if __name__ == "__main__":
    main()
