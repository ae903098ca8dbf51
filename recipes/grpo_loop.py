"""GRPO on a flow-matching model, all of it, on the SDK alone: ``python -m recipes.grpo_loop``.

Read this first. It trains the tiny Qwen-Image to draw what the prompt names, on one CPU core:

1. Each prompt gets a group of samples. In the window's steps the sampler adds noise, so that the
   samples differ and every such step has a log-prob.
2. A reward looks at each picture. Its advantage is its reward minus its group's mean.
3. The denoiser is replayed on the recorded steps, with gradients. Before the first update the
   replayed log-probs are those of the rollout, bit for bit: the ratio is exactly 1.
4. The clipped policy gradient raises the log-prob of what was better than its group.

What a real run adds is in ``trainers``: held-out evaluation, checkpoints, KL, masking, tracking.
"""

from __future__ import annotations

import argparse

import peft
import torch
from torch import Tensor, nn

from miles_rollout import RolloutBatch, RolloutEngine, RolloutParams
from miles_rollout.noise import keyed_generator
from miles_rollout.testing import tiny_qwen_image
from miles_rollout.testing.shape_score import score
from miles_rollout.testing.shapes import TRAIN_PROMPTS, parse_prompt

NUM_PROMPTS = 6
GROUP_SIZE = 16
NUM_STEPS = 10
WINDOW = (1, 2, 3, 4)  # the stochastic steps, which are the trained ones
NOISE_LEVEL = 0.7
CLIP_RANGE = 1e-4  # log-probs are means over latent elements, so ratios stay very near 1
ADVANTAGE_CLIP = 5.0
LEARNING_RATE = 1e-3
RANK, ALPHA = 16, 32
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "img_mlp.net.0.proj", "img_mlp.net.2"]


def build_policy() -> tuple[RolloutEngine, list[nn.Parameter]]:
    """The pipeline, with a LoRA on its denoiser: rollout and training use these very weights."""
    pipe = tiny_qwen_image(pretrained=True)
    with torch.random.fork_rng(devices=[]):  # peft draws from the global generator
        pipe.transformer.add_adapter(
            peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS)
        )
    parameters = []
    for name, parameter in sorted(pipe.transformer.named_parameters()):
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameters.append(parameter)
        if ".lora_A." in name:
            nn.init.normal_(parameter, std=1 / RANK, generator=keyed_generator("lora", name))
    return RolloutEngine(pipe), parameters


def sample(engine: RolloutEngine, iteration: int, seed: int) -> list[RolloutBatch]:
    """``GROUP_SIZE`` pictures of each of ``NUM_PROMPTS`` prompts, with their trajectories."""
    order = torch.randperm(
        len(TRAIN_PROMPTS), generator=keyed_generator("prompts", seed, iteration)
    )
    prompts = [TRAIN_PROMPTS[i] for i in order[:NUM_PROMPTS].tolist()]
    params = RolloutParams(
        sde_type="sde",
        noise_level=NOISE_LEVEL,
        sde_step_indices=WINDOW,
        return_step_indices=sorted({*WINDOW, *(step + 1 for step in WINDOW)}),
    )
    chunks = engine.generate(
        prompts,
        GROUP_SIZE,
        params,
        seed=seed,
        iteration=iteration,
        chunk_size=NUM_PROMPTS * GROUP_SIZE // 2,
        num_inference_steps=NUM_STEPS,
        height=32,
        width=32,
    )
    return list(chunks)


def reward_of(batch: RolloutBatch) -> Tensor:
    """[B], 0..1: does the picture show the shape and the colours that its prompt names?"""
    assert batch.media is not None
    scores = []
    for media, prompt in zip(batch.media, batch.prompts, strict=True):
        assert media.image is not None
        scores.append(score(media.image, parse_prompt(prompt)))
    return torch.tensor(scores)


def advantages_of(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Reward minus its group's mean, over the std of all rewards."""
    centred = torch.empty_like(rewards)
    for group in group_ids.unique():
        rows = group_ids == group
        centred[rows] = rewards[rows] - rewards[rows].mean()
    return (centred / (rewards.std() + 1e-4)).clamp(-ADVANTAGE_CLIP, ADVANTAGE_CLIP)


def update(
    engine: RolloutEngine,
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    batches: list[RolloutBatch],
    advantages: Tensor,
) -> float:
    """One optimizer step on all (sample, step) pairs. Returns max |ratio - 1|, which must be 0."""
    optimizer.zero_grad()
    num_pairs = len(advantages) * len(WINDOW)
    gap = 0.0
    parts = advantages.split([len(batch.prompts) for batch in batches])
    for batch, advantage in zip(batches, parts, strict=True):
        for step in WINDOW:
            replay = engine.replay(batch.trajectory, step)
            ratio = (replay.log_prob - batch.trajectory.log_probs[:, step]).exp()
            clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
            loss = torch.maximum(-advantage * ratio, -advantage * clipped).sum() / num_pairs
            loss.backward()
            gap = max(gap, (ratio.detach() - 1).abs().max().item())
    nn.utils.clip_grad_norm_(parameters, max_norm=1.0)
    optimizer.step()
    return gap


def train(iterations: int, seed: int) -> list[float]:
    """Rollout, reward, advantage, update; returns the mean reward of every iteration."""
    engine, parameters = build_policy()
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    history = []
    for iteration in range(iterations):
        batches = sample(engine, iteration, seed)
        rewards = torch.cat([reward_of(batch) for batch in batches])
        group_ids = torch.cat([batch.group_ids for batch in batches])
        gap = update(engine, optimizer, parameters, batches, advantages_of(rewards, group_ids))
        history.append(rewards.mean().item())
        print(
            f"iteration {iteration:3d}  reward {history[-1]:.3f}  |ratio - 1| {gap:g}", flush=True
        )
    return history


def main() -> None:
    """Parse ``sys.argv`` and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    train(arguments.iterations, arguments.seed)


if __name__ == "__main__":
    main()
