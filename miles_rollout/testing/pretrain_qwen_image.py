"""Pretrains the tiny Qwen-Image on drawings: ``python -m miles_rollout.testing.pretrain_qwen_image``.

First the VAE, then the transformer by flow matching in the VAE's latents; the text encoder keeps
its random weights, which tell the few words apart. One thread and passed generators: the same
machine writes the same file, in a quarter of an hour. The number of steps leaves the pictures
recognisable but often inexact, so that reinforcement learning has something to improve.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import QwenImagePipeline
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from safetensors.torch import save_file
from torch import Tensor, nn

from miles_rollout.shapes import Float
from miles_rollout.testing import qwen_image, shapes, vocabulary
from miles_rollout.testing.shape_score import score

SIZE = 32
NUM_IMAGES = 6000
VAE_STEPS, VAE_BATCH, VAE_LR = 2000, 16, 2e-3
KL_WEIGHT = 1e-3
STEPS, BATCH, LR = 3000, 64, 2e-3
PROMPT_DROPOUT = 0.1
NO_PROMPT = " "  # what callers pass as the negative prompt
RIGHT = 0.8  # a picture with this score or more shows its prompt


def main() -> None:
    """Writes the vocabulary and the weights, then says how good they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=qwen_image.WEIGHTS.parent)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    (out / vocabulary.FILE.name).write_text(json.dumps(vocabulary.build()), encoding="ascii")
    prompts, images = draw_images(generator)
    sizes = qwen_image.PRETRAINED
    unknown = [0.0] * sizes.latent_channels
    pipeline = qwen_image.build(sizes, unknown, unknown, seed=0)
    with flat_convolutions():
        train_vae(pipeline.vae, images, generator)
    latents = encode(pipeline.vae, images)
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    latents = (latents - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    packed = QwenImagePipeline._pack_latents(latents, *latents.shape)
    train_transformer(pipeline, prompts, packed, generator)

    save(pipeline, mean, std, out / qwen_image.WEIGHTS.name)
    report(qwen_image.load(out / qwen_image.WEIGHTS.name))


def draw_images(
    generator: torch.Generator,
) -> tuple[list[int], Float[Tensor, "images 3 height width"]]:
    """Pictures in -1..1, and for each the index of its prompt in ``TRAIN_PROMPTS``."""
    prompts = [i % len(shapes.TRAIN_PROMPTS) for i in range(NUM_IMAGES)]
    scenes = [shapes.parse_prompt(text) for text in shapes.TRAIN_PROMPTS]
    images = [shapes.draw(*scenes[i], size=SIZE, generator=generator) for i in prompts]
    return prompts, torch.stack(images) * 2 - 1


@contextmanager
def flat_convolutions() -> Iterator[None]:
    """Convolves in 2D, in half the time: a lone frame meets only the last slice of each kernel."""

    def forward(self: Any, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        left, _, top, *_ = self._padding
        weight = self.weight[:, :, -1]
        return F.conv2d(x.squeeze(2), weight, self.bias, padding=(top, left)).unsqueeze(2)

    original = QwenImageCausalConv3d.forward
    QwenImageCausalConv3d.forward = forward
    try:
        yield
    finally:
        QwenImageCausalConv3d.forward = original


def train_vae(
    vae: Any, images: Float[Tensor, "images 3 height width"], generator: torch.Generator
) -> None:
    """Absolute and squared error plus a little KL, which keeps the latents dense enough to denoise.

    Bypasses ``encode`` and ``decode``: the latter's clamp has no gradient where it matters.
    """
    with torch.no_grad():
        # At a standard deviation of 1 the noise drowns the picture for hundreds of steps.
        vae.quant_conv.bias[vae.config.z_dim :] -= 5

    def loss_of(batch: Tensor) -> Tensor:
        image = images[batch].unsqueeze(2)
        posterior = DiagonalGaussianDistribution(vae.quant_conv(vae.encoder(image)))
        latents = posterior.sample(generator=generator)
        decoded = vae.decoder(vae.post_quant_conv(latents))
        error = F.l1_loss(decoded, image) + F.mse_loss(decoded, image)
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        return error + KL_WEIGHT * kl

    fit(vae, loss_of, lr=VAE_LR, steps=VAE_STEPS, batch=VAE_BATCH, generator=generator)


@torch.no_grad()
def encode(
    vae: Any, images: Float[Tensor, "images 3 height width"]
) -> Float[Tensor, "images channels latent_height latent_width"]:
    """The most likely latents, not yet normalised."""
    parts = [vae.encode(part.unsqueeze(2)).latent_dist.mode() for part in images.split(100)]
    return torch.cat(parts).squeeze(2)


def train_transformer(
    pipeline: QwenImagePipeline,
    prompts: list[int],
    latents: Float[Tensor, "images tokens features"],
    generator: torch.Generator,
) -> None:
    """Flow matching: from ``(1 - s) * latents + s * noise`` and ``s`` to ``noise - latents``."""
    texts = [*shapes.TRAIN_PROMPTS, NO_PROMPT]
    with torch.no_grad():
        embeds, mask = pipeline.encode_prompt(texts)
    prompt_of_image = torch.tensor(prompts)
    side = SIZE // pipeline.vae_scale_factor // 2
    transformer = pipeline.transformer

    def loss_of(batch: Tensor) -> Tensor:
        x0 = latents[batch]
        noise = torch.randn(x0.shape, generator=generator)
        sigma = shifted_sigmas(pipeline, x0.shape[1], torch.rand(BATCH, generator=generator))
        s = sigma.view(-1, 1, 1)
        dropped = torch.rand(BATCH, generator=generator) < PROMPT_DROPOUT
        text = torch.where(dropped, len(texts) - 1, prompt_of_image[batch])
        velocity: Tensor = transformer(
            hidden_states=(1 - s) * x0 + s * noise,
            timestep=sigma,
            encoder_hidden_states=embeds[text],
            encoder_hidden_states_mask=mask[text],
            img_shapes=[[(1, side, side)]] * BATCH,
            return_dict=False,
        )[0]
        return F.mse_loss(velocity, noise - x0)

    fit(transformer, loss_of, lr=LR, steps=STEPS, batch=BATCH, generator=generator)


def shifted_sigmas(
    pipeline: QwenImagePipeline, num_tokens: int, uniform: Float[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Noise levels that lie as densely as those at which the pipeline samples."""
    config = pipeline.scheduler.config
    mu = calculate_shift(
        num_tokens,
        config.base_image_seq_len,
        config.max_image_seq_len,
        config.base_shift,
        config.max_shift,
    )
    return math.exp(mu) * uniform / (1 + (math.exp(mu) - 1) * uniform)


def fit(
    module: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    *,
    lr: float,
    steps: int,
    batch: int,
    generator: torch.Generator,
) -> None:
    """AdamW on ``loss_of`` random image indices; warms up over 50 steps and ends at a rate of 0."""
    optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.99), weight_decay=0.01)
    for step in range(steps):
        rate = lr * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(torch.randint(NUM_IMAGES, (batch,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"{type(module).__name__} {step}/{steps}: loss {loss.item():.4f}", flush=True)


def save(
    pipeline: QwenImagePipeline,
    mean: Float[Tensor, " channels"],
    std: Float[Tensor, " channels"],
    file: Path,
) -> None:
    """Every weight in half precision, and the latents' statistics in single."""
    tensors = {"latents_mean": mean, "latents_std": std}
    for name, module in qwen_image.weight_modules(pipeline).items():
        for key, value in module.state_dict().items():
            tensors[f"{name}.{key}"] = value.half().contiguous()
    save_file(tensors, file)
    print(f"wrote {file}: {file.stat().st_size / 2**20:.2f} MiB", flush=True)


def report(pipeline: QwenImagePipeline, images_per_prompt: int = 4) -> None:
    """Prints how well the held-out prompts are drawn, with and without guidance."""
    scenes = [shapes.parse_prompt(text) for text in shapes.HELD_OUT_PROMPTS]
    for scale in (1.0, 4.0):
        images = sample(pipeline, list(shapes.HELD_OUT_PROMPTS), scale, images_per_prompt)
        scores = torch.tensor(
            [score(image, scenes[i // images_per_prompt]) for i, image in enumerate(images)]
        ).view(-1, images_per_prompt)
        print(
            f"held-out prompts, true_cfg_scale {scale:g}: mean score {scores.mean():.3f}, "
            f"deviation within a prompt {scores.std(1).mean():.3f}, right "
            f"{(scores >= RIGHT).float().mean():.0%} of {scores.numel()} images",
            flush=True,
        )


def sample(
    pipeline: QwenImagePipeline, prompts: list[str], scale: float, images_per_prompt: int
) -> Float[Tensor, "images 3 height width"]:
    """10 steps from fixed noise, each prompt's images side by side."""
    images: Tensor = pipeline(
        prompts,
        negative_prompt=[NO_PROMPT] * len(prompts) if scale > 1 else None,
        true_cfg_scale=scale,
        num_inference_steps=10,
        num_images_per_prompt=images_per_prompt,
        height=SIZE,
        width=SIZE,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images
    return images


if __name__ == "__main__":
    main()
