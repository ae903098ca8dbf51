"""Advantages: how much better a sample is than the other samples of its prompt.

``A = (R - mean of the group) / (std + epsilon)``, the group-relative advantage of GRPO
(arXiv 2402.03300), with the std of the whole batch as in Flow-GRPO (arXiv 2505.05470), of the
group, or none (arXiv 2503.20783). A group is the samples of one prompt row, by its integer id:
ids made from the text would merge two rows with the same prompt.

What is computed, whatever the order of the samples:

1. A reward that is not finite is left out of every mean and std, and its advantage is 0.
2. A group whose rewards are all equal, or which has a single one, has exactly 0.
3. std is unbiased (n - 1), over all finite rewards of the batch or of the group.
4. float64 inside, on sorted values, so that the order of the samples does not move a bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from miles_rollout.errors import MilesRolloutError
from miles_rollout.shapes import Bool, Float, Int

Std = Literal["batch", "group", "none"]


class AdvantageError(MilesRolloutError, ValueError):
    """Rewards and group ids from which no advantage can be computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """What an iteration's samples are worth to the loss."""

    values: Float[Tensor, " samples"]
    """0 for a masked sample."""
    trained: Bool[Tensor, " samples"] | None = None
    """False: the sample is not replayed, and the mean of the loss is over the others (None: all
    are)."""


def group_advantages(
    rewards: Tensor | Sequence[Any],
    group_ids: Tensor | Sequence[Any],
    *,
    std: Std = "batch",
    epsilon: float | int = 1e-4,
) -> Float[Tensor, " samples"]:
    """One advantage a sample, float32, on the device of ``rewards``."""
    if std not in ("batch", "group", "none"):
        raise AdvantageError(
            f"group_advantages: std is unknown; got {std!r}; set 'batch', 'group' or 'none'"
        )
    if not 0 <= epsilon < float("inf"):
        raise AdvantageError(
            f"group_advantages: epsilon must be finite and not negative; got {epsilon}; set 1e-4"
        )
    values, ids = _checked(rewards, group_ids)
    scale = _std(values[values.isfinite()]) + epsilon
    advantages = torch.zeros_like(values)
    for rows in _varied_groups(values, ids):
        group = values[rows].sort().values
        centred = values[rows] - group.mean()
        if std == "group":
            scale = _std(group) + epsilon
        advantages[rows] = centred if std == "none" else centred / scale
    device = rewards.device if isinstance(rewards, Tensor) else None
    return advantages.to(device=device, dtype=torch.float32)


def gdpo_advantages(
    rewards: Mapping[str, Float[Tensor, " samples"]],
    weights: Mapping[str, float],
    group_ids: Int[Tensor, " samples"],
    *,
    std: Std = "group",
    epsilon: float | int = 1e-4,
) -> Float[Tensor, " samples"]:
    """The weighted sum of the advantages that each reward has by itself (GDPO, arXiv 2601.05242).

    Each is centred and scaled in its group (or as ``std`` says) before they are added, so that two
    rewards of different spread count by their weights alone. The further scaling of the sum over the
    batch that the paper adds is left out. Raises ``AdvantageError`` without a weighted reward.
    """
    if not weights or weights.keys() - rewards.keys():
        raise AdvantageError(
            f"gdpo_advantages: needs the scores of every weighted reward; got {sorted(rewards)} for "
            f"weights of {sorted(weights)}; pass those"
        )
    parts = [
        weights[name] * group_advantages(rewards[name], group_ids, std=std, epsilon=epsilon)
        for name in weights
    ]
    return torch.stack(parts).sum(0)


def best_and_worst(
    rewards: Float[Tensor, " samples"],
    group_ids: Int[Tensor, " samples"],
    *,
    best: int,
    worst: int,
) -> Bool[Tensor, " samples"]:
    """True for the ``best`` highest and ``worst`` lowest finite rewards of each group.

    Of equal rewards the earlier sample counts as the better one. 0 and 0: True for all.
    """
    values, ids = _checked(rewards, group_ids)
    if not best and not worst:
        return torch.ones(len(values), dtype=torch.bool)
    chosen = torch.zeros(len(values), dtype=torch.bool)
    for group in ids.unique():
        rows = (values.isfinite() & (ids == group)).nonzero()[:, 0]
        ranked = rows[values[rows].argsort(descending=True, stable=True)]
        chosen[ranked[:best]] = True
        chosen[ranked[max(len(ranked) - worst, 0) :]] = True
    return chosen


def zero_std_groups(rewards: Tensor | Sequence[Any], group_ids: Tensor | Sequence[Any]) -> int:
    """How many groups give no signal: fewer than two different finite rewards."""
    values, ids = _checked(rewards, group_ids)
    return len(ids.unique()) - len(_varied_groups(values, ids))


def _checked(
    rewards: Tensor | Sequence[Any], group_ids: Tensor | Sequence[Any]
) -> tuple[Float[Tensor, " samples"], Int[Tensor, " samples"]]:
    """Both on the CPU: float64 rewards, integer ids."""
    values = torch.as_tensor(rewards).detach().to(device="cpu", dtype=torch.float64)
    try:
        ids = torch.as_tensor(group_ids).cpu()
    except (TypeError, ValueError):
        ids = torch.empty(0)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise AdvantageError(
            f"group_advantages: group ids must be integers; got {_short(group_ids)}; pass the "
            "number of the prompt's row, never its text"
        )
    if values.ndim != 1 or values.shape != ids.shape:
        raise AdvantageError(
            "group_advantages: needs one reward and one group id a sample; got rewards "
            f"{tuple(values.shape)} and group ids {tuple(ids.shape)}; pass two of shape [N]"
        )
    return values, ids


def _varied_groups(
    values: Float[Tensor, " samples"], ids: Int[Tensor, " samples"]
) -> list[Int[Tensor, " rows"]]:
    """The finite samples of every group in which they differ.

    Compared, not subtracted: the mean of equal numbers may differ from them by rounding.
    """
    finite = values.isfinite()
    groups = [(finite & (ids == group)).nonzero()[:, 0] for group in ids.unique()]
    return [rows for rows in groups if len(rows) and values[rows].min() < values[rows].max()]


def _std(values: Float[Tensor, " samples"]) -> Tensor:
    return values.sort().values.std() if len(values) > 1 else torch.zeros(())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
