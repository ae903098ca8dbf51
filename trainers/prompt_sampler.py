"""Which prompts an iteration uses: dealt from shuffled epochs, without a state to save."""

from __future__ import annotations

import random

from miles_rollout.noise import derive_seed
from trainers.prompt_lines import DataError


class PromptSampler:
    """Which records an iteration uses: a pure function of (seed, iteration).

    The records are shuffled anew for every epoch and dealt out without gaps, so after any number of
    iterations no record was used twice more than another. An iteration may take the end of one
    epoch and the start of the next; the next is then reordered so that no record comes twice in it.
    Epochs and iterations fall together again after some epochs, and from there only that many are
    followed: a resume needs no state.
    """

    def __init__(self, num_records: int, prompts_per_iteration: int, seed: int) -> None:
        if prompts_per_iteration < 1:
            raise DataError(
                f"prompts_per_iteration: must be positive; got {prompts_per_iteration}; set >= 1"
            )
        if prompts_per_iteration > num_records:
            raise DataError(
                f"prompts_per_iteration: more than there are prompts; got {prompts_per_iteration} "
                f"for {num_records} prompts; set at most {num_records} or add prompts"
            )
        self.num_records = num_records
        self.prompts_per_iteration = prompts_per_iteration
        self.seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def indices(self, iteration: int) -> tuple[int, ...]:
        """The ids of the records of ``iteration``, all different."""
        if iteration < 0:
            raise DataError(f"iteration: must not be negative; got {iteration}; count from 0")
        size, count = self.prompts_per_iteration, self.num_records
        epoch, start = divmod(iteration * size, count)
        chosen = self._order_of(epoch)[start : start + size]
        if len(chosen) < size:
            chosen = chosen + self._order_of(epoch + 1)[: size - len(chosen)]
        return tuple(chosen)

    def _order_of(self, epoch: int) -> list[int]:
        """The records in the order of ``epoch``, which depends on the one before it."""
        first = epoch
        while first * self.num_records % self.prompts_per_iteration:
            first -= 1
        if first <= self._epoch <= epoch:
            first, order = self._epoch, self._order  # a memory only: it changes no result
        else:
            order = self._shuffled(first)
        for later in range(first + 1, epoch + 1):
            order = self._continued(order, later)
        self._epoch, self._order = epoch, order
        return order

    def _continued(self, previous: list[int], epoch: int) -> list[int]:
        """``epoch`` after ``previous``, the iteration that spans both without a repetition."""
        shuffled = self._shuffled(epoch)
        used = epoch * self.num_records % self.prompts_per_iteration
        if not used:
            return shuffled
        tail = set(previous[-used:])
        head = [i for i in shuffled if i not in tail][: self.prompts_per_iteration - used]
        taken = set(head)
        return head + [i for i in shuffled if i not in taken]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self.num_records))
        random.Random(derive_seed("prompts", self.seed, epoch)).shuffle(order)
        return order
