"""Prompts that a reward could never score, refused before a model is loaded.

A reward may have a ``check_prompt(prompt, metadata)`` that raises ``ValueError`` with
``what is wrong; got value; what to set``. It is asked about every prompt of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trainers.data import DataError, PromptRecord
from trainers.rewards.source import PromptCheck, RewardSource

F = TypeVar("F", bound=Callable[..., Any])


def with_prompt_check(check: PromptCheck) -> Callable[[F], F]:
    """Give a reward that is a function its ``check_prompt``."""

    def mark(reward: F) -> F:
        vars(reward)["check_prompt"] = check
        return reward

    return mark


def check_prompt(
    label: str, source: RewardSource, prompt: str, metadata: Mapping[str, Any], *, where: str
) -> None:
    """Raise ``DataError`` if the reward called ``label`` refuses a prompt, which is at ``where``."""
    if source.check_prompt is None:
        return
    try:
        source.check_prompt(prompt, metadata)
    except ValueError as error:
        raise DataError(f"{where}: reward {label!r}: {error}") from error


def check_prompts(
    sources: Mapping[str, RewardSource], path: str, records: Sequence[PromptRecord]
) -> None:
    """`check_prompt` for every record of a prompt file and every reward, by label."""
    for record in records:
        for label, source in sources.items():
            where = f"{path}:{record.line}"
            check_prompt(label, source, record.prompt, record.metadata, where=where)
