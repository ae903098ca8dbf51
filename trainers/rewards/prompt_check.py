"""Prompts that a reward could never score, refused before a model is loaded.

A reward may have a ``check_prompt(prompt, metadata)`` that raises ``ValueError`` with
``what is wrong; got value; what to set``. It is asked about every prompt of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, TypeVar

from trainers.data import DataError, PromptRecord
from trainers.rewards.protocol import Reward

PromptCheck: TypeAlias = Callable[[str, Mapping[str, Any]], object]
F = TypeVar("F", bound=Callable[..., Any])


def with_prompt_check(check: PromptCheck) -> Callable[[F], F]:
    """Give a reward that is a function its ``check_prompt``."""

    def mark(reward: F) -> F:
        vars(reward)["check_prompt"] = check
        return reward

    return mark


def check_prompt(
    label: str, reward: Reward, prompt: str, metadata: Mapping[str, Any], *, where: str
) -> None:
    """Raise ``DataError`` if the reward called ``label`` refuses a prompt, which is at ``where``."""
    bare = reward.func if isinstance(reward, partial) else reward
    check: PromptCheck | None = getattr(bare, "check_prompt", None)
    if check is None:
        return
    try:
        check(prompt, metadata)
    except ValueError as error:
        raise DataError(f"{where}: reward {label!r}: {error}") from error


def check_prompts(rewards: Mapping[str, Reward], path: str, records: list[PromptRecord]) -> None:
    """`check_prompt` for every record of a prompt file and every reward, by label."""
    for record in records:
        for label, reward in rewards.items():
            where = f"{path}:{record.line}"
            check_prompt(label, reward, record.prompt, record.metadata, where=where)
