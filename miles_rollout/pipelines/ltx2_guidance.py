"""LTX-2's guidances: the denoised sample is moved away from weaker ones, then rescaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diffusers.pipelines.ltx2.pipeline_ltx2 import rescale_noise_cfg
from torch import Tensor


def guided_velocity(
    velocities: Sequence[Tensor],
    state: Tensor,
    sigma: Tensor,
    guidance: Mapping[str, float | bool],
    prefix: str,
) -> Tensor:
    """The velocity [B, tokens, channels] of one stream.

    ``velocities`` are those of a step's calls in float32: the whole model, with the negative rows
    in front where they are asked for; then that with perturbed blocks; then that whose media do not
    see each other. ``prefix`` is that of the stream's scales.
    """

    def x0(velocity: Tensor) -> Tensor:
        return state - velocity * sigma

    main, *weaker = velocities
    by_prompt: Tensor | int = 0
    by_blocks: Tensor | int = 0
    by_other: Tensor | int = 0
    if guidance["do_classifier_free_guidance"]:
        negative, main = main.chunk(2)
        denoised = x0(main)
        by_prompt = (guidance[f"{prefix}guidance_scale"] - 1) * (denoised - x0(negative))
    else:
        denoised = x0(main)
    if guidance["do_spatio_temporal_guidance"]:
        by_blocks = guidance[f"{prefix}stg_scale"] * (denoised - x0(weaker.pop(0)))
    if guidance["do_modality_isolation_guidance"]:
        by_other = (guidance[f"{prefix}modality_scale"] - 1) * (denoised - x0(weaker.pop(0)))
    moved = denoised + by_prompt + by_blocks + by_other
    rescale = guidance[f"{prefix}guidance_rescale"]
    if rescale > 0:
        moved = rescale_noise_cfg(moved, denoised, guidance_rescale=rescale)
    return (state - moved) / sigma
