"""Losses on one denoising step: policy gradients, the forward process, distances to a reference."""

from trainers.losses.distances import LossError, mean_kl, velocity_mse
from trainers.losses.forward_process import (
    NFT_METRIC_REDUCTIONS,
    diffusion_nft_loss,
    diffusion_nft_loss_terms,
    reward_probability,
)
from trainers.losses.policy_gradient import (
    METRIC_REDUCTIONS,
    STREAM_REDUCTIONS,
    ClipRange,
    grpo_guard_loss,
    grpo_guard_loss_terms,
    grpo_loss,
    grpo_loss_terms,
    ratio_metrics,
    reduce_metrics,
)

__all__ = [
    "METRIC_REDUCTIONS",
    "NFT_METRIC_REDUCTIONS",
    "STREAM_REDUCTIONS",
    "ClipRange",
    "LossError",
    "diffusion_nft_loss",
    "diffusion_nft_loss_terms",
    "grpo_guard_loss",
    "grpo_guard_loss_terms",
    "grpo_loss",
    "grpo_loss_terms",
    "mean_kl",
    "ratio_metrics",
    "reduce_metrics",
    "reward_probability",
    "velocity_mse",
]
