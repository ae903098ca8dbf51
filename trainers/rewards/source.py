"""A reward that was named and checked, and that loads its model only when it is first needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, final

from trainers.config_loader import ConfigError
from trainers.first_line import first_line
from trainers.rewards.protocol import Reward

PromptCheck: TypeAlias = Callable[[str, Mapping[str, Any]], object]
"""Raises ``ValueError`` for a prompt, with its metadata, that the reward could never score."""


@final
class RewardSource:
    """``target`` is the reward itself, or what builds it from ``kwargs``."""

    def __init__(self, name: str, target: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        is_class = inspect.isclass(target)
        try:
            signature = inspect.signature(target)
        except (TypeError, ValueError) as error:  # what is written in C may have none
            raise ConfigError(
                f"reward {name!r}: its arguments are not known; got {target!r} ({first_line(error)}); "
                "name a function or class that is written in Python"
            ) from error
        self._is_reward = not is_class and "media" in signature.parameters
        given = {"media": (), "prompts": (), "metadata": ()} if self._is_reward else {}
        try:
            signature.bind(**given, **kwargs)
        except TypeError as error:
            known = ", ".join(key for key in signature.parameters if key not in given) or "none"
            raise ConfigError(
                f"reward {name!r}: wrong kwargs: {error}; got {dict(kwargs)}; it takes {known}"
            ) from None
        held = inspect.getattr_static(target, "check_prompt", None)
        if is_class and held is not None and not isinstance(held, staticmethod):
            raise ConfigError(
                f"reward {name!r}: its check_prompt is asked before the reward is built; got a method "
                f"of {target.__name__}; make it a staticmethod"
            )
        self.check_prompt: PromptCheck | None = getattr(target, "check_prompt", None)
        """None: every prompt will do."""
        self._target = partial(target, **kwargs)
        self._built: Reward | None = None

    def get(self) -> Reward:
        """The reward, built at the first call."""
        if self._built is None:
            self._built = self._target if self._is_reward else self._target()
        return self._built
