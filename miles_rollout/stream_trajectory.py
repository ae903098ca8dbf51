"""What one latent stream of a request went through: its states, its schedule, its log-probs.

``timesteps`` and ``sigmas`` cover every step whatever was kept; ``latent_step_indices`` tells which
boundary each kept latent is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from miles_rollout.errors import RolloutParamsError
from miles_rollout.shapes import Bool, Float, Int


@dataclass(frozen=True, kw_only=True)
class StreamTrajectory:
    """One latent stream of a request: T steps, B samples, K kept states."""

    latents: Float[Tensor, "batch kept ..."]
    """The states as the denoiser saw them; the final one is what is decoded."""
    latent_step_indices: Int[Tensor, " kept"]
    """Which boundary in 0..T each kept latent is."""
    timesteps: Float[Tensor, " boundaries"]
    """[T + 1] in the scheduler's own convention, terminal value included."""
    sigmas: Float[Tensor, " boundaries"]
    """[T + 1], exact copies of the scheduler's, never filtered."""
    log_probs: Float[Tensor, "batch steps"]
    """[B, T]: mean over elements; zeros on deterministic steps."""
    sde_step_indices: tuple[int, ...]
    num_elements: Int[Tensor, " batch"]
    """The unmasked elements of each sample, which weight the joint log-prob."""
    mask: Bool[Tensor, "batch ..."] | None = None
    """False where an element is neither noised, scored nor counted."""
    velocity_sign: float = 1.0
    """-1 where the denoiser predicts x0 - noise."""
    means: Mapping[int, Float[Tensor, "batch ..."]] = field(default_factory=dict)
    """With ``RolloutParams.return_means``: the mean of each replayable step, by step."""
    debug: Mapping[str, Tensor] = field(default_factory=dict)
    """With ``RolloutParams.debug``: velocity, mean, noise [B, T, ...] and std [B, T, 1, ...]."""

    @property
    def num_steps(self) -> int:
        """T, the denoiser's evaluations."""
        return self.log_probs.shape[1]

    def latent(self, boundary: int) -> Float[Tensor, "batch ..."]:
        """The state at a boundary in 0..T, contiguous. Raises for one that was not kept."""
        at = (self.latent_step_indices == boundary).nonzero().flatten().tolist()
        if not at:
            raise RolloutParamsError(
                f"trajectory: boundary {boundary} was not kept; got return_step_indices "
                f"{self.latent_step_indices.tolist()}; add {boundary} to them"
            )
        return self.latents[:, at[0]].contiguous()

    def map(self, batched: Any, shared: Any) -> StreamTrajectory:
        """Apply ``batched`` to tensors with a batch axis and ``shared`` to the others."""
        return replace(
            self,
            latents=batched(self.latents),
            log_probs=batched(self.log_probs),
            num_elements=batched(self.num_elements),
            mask=None if self.mask is None else batched(self.mask),
            means={step: batched(tensor) for step, tensor in self.means.items()},
            debug={name: batched(tensor) for name, tensor in self.debug.items()},
            latent_step_indices=shared(self.latent_step_indices),
            timesteps=shared(self.timesteps),
            sigmas=shared(self.sigmas),
        )
