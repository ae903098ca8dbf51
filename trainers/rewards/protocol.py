"""What a reward is: a function of finished media, prompts and the prompts' metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from miles_rollout.media import Media


@runtime_checkable
class Reward(Protocol):
    """Scores a batch: one number a sample, or named components of one number a sample each.

    Numbers may come as a sequence, a tensor or an array of shape [N]. None, NaN and infinity say
    that a sample has no score; it is then left out of training. A component named ``total`` is the
    reward and the others are for the logs; without it the reward is the sum of the components. A
    reward may raise: the samples are then scored one by one, and those that raise are left out. If
    it raises ``RewardUnavailable``, that is not tried: they are left out. A method
    ``time_limit_s(count)``, if there is one, says how many seconds a call with so many samples may
    take, where that is more than the run's limit.
    """

    def __call__(
        self,
        media: Sequence[Media],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> Sequence[float | None] | Mapping[str, Sequence[float | None]]:
        """The scores of ``media``, in order."""
        ...
