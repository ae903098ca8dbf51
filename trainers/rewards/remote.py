"""Reward: another process or machine scores, over HTTP. The protocol is in docs/rewards.md.

What happens when it does not answer: transport errors, time-outs and the statuses 408, 429 and 5xx are
tried again with growing pauses; then the call raises ``RewardUnavailable``, the samples that it has no
scores of yet are masked, and too many of them stop the run by the rules of `scoring`. What trying again
cannot repair ends the run at once: a rejected token, a request that the server does not understand, an
answer that breaks the protocol.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from miles_rollout import Media
from trainers.config_loader import ConfigError
from trainers.rewards.media_json import encode_media
from trainers.rewards.reward_call import RewardFailure, RewardUnavailable

logger = logging.getLogger(__name__)

_Answer: TypeAlias = dict[str, list[float | None]]
"""Component -> a number or None for each sample of a request."""

_TRY_AGAIN = {408, 429, *range(500, 600)}
_TOO_LARGE = 413


class RemoteReward:
    """Sends batches to ``url`` and returns their scores in order.

    ``timeout_s``: of one request. ``retries``: further tries of a failed one; pauses begin at
    ``backoff_s`` and double. ``batch_size``: samples a request, halved for this and later calls where
    the server says that it is too large. ``token_env``: the environment variable that holds the bearer token, if the server
    wants one; the token itself is never in a config. Raises ``ConfigError`` for wrong settings.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float | int = 60.0,
        retries: int = 4,
        backoff_s: float | int = 0.5,
        batch_size: int = 8,
        token_env: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"remote: url begins with http:// or https://; got {url!r}; set url")
        numbers = {"timeout_s": timeout_s, "backoff_s": backoff_s, "batch_size": batch_size}
        for name, value in numbers.items():
            if not value > 0:
                raise ConfigError(f"remote: {name} must be above 0; got {value}; set {name}")
        if retries < 0:
            raise ConfigError(f"remote: retries must be at least 0; got {retries}; set retries")
        self._headers = {}
        if token_env is not None:
            token = os.environ.get(token_env)
            if not token:
                raise ConfigError(
                    f"remote: the environment variable {token_env} holds no token; got "
                    f"{token!r}; export {token_env}, or leave token_env out"
                )
            self._headers = {"Authorization": f"Bearer {token}"}
        self._httpx = _require_httpx()
        self._url = url.rstrip("/") + "/score"
        self._timeout_s, self._retries, self._backoff_s = timeout_s, retries, backoff_s
        self._batch_size = batch_size
        self._sleep = sleep

    def time_limit_s(self, count: int) -> float:
        """The most that a call with ``count`` samples takes, all tries and pauses of every request.

        A try may wait ``timeout_s`` for its connection, and as long again for its answer. Requests
        are of the size that fitted the server so far.
        """
        tries = self._retries + 1
        pauses = self._backoff_s * (2.0 ** min(self._retries, 64) - 1)
        return -(-count // self._batch_size) * (tries * 2 * self._timeout_s + pauses)

    def __call__(
        self,
        media: Sequence[Media],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> dict[str, list[float | None]]:
        """The server's components, one number or None a sample."""
        samples = [
            {"prompt": prompt, "metadata": dict(given), "media": encode_media(item)}
            for item, prompt, given in zip(media, prompts, metadata, strict=True)
        ]
        answers: list[_Answer] = []
        start = 0
        with self._httpx.Client(timeout=self._timeout_s, headers=self._headers) as client:
            while start < len(samples):
                batch = samples[start : start + self._batch_size]
                try:
                    answer = self._score(client, batch)
                except RewardUnavailable as error:
                    error.scores = _joined(answers, len(samples))
                    raise
                if answer is None:
                    self._batch_size = (len(batch) + 1) // 2
                    continue
                answers.append(answer)
                start += len(batch)
                self._check_names(answers)
        return _joined(answers, len(samples))

    def _score(self, client: Any, batch: list[dict[str, Any]]) -> _Answer | None:
        """None where the server takes only fewer samples at a time."""
        response = self._post(client, batch)
        if response.status_code == _TOO_LARGE and len(batch) > 1:
            return None
        if response.status_code != 200:
            raise RewardFailure(
                f"remote reward {self._url}: the request was refused; got status "
                f"{response.status_code}: {_reason(response)}; {_advice(response.status_code)}"
            )
        return self._columns(response, len(batch))

    def _check_names(self, answers: Sequence[_Answer]) -> None:
        """An answer of nulls alone may name other components: what failed has none."""
        first, last = _names(answers), answers[-1]
        if last.keys() != first and _has_number(last):
            raise RewardFailure(
                f"remote reward {self._url}: answers name different components; got "
                f"{sorted(last)} after {sorted(first)}; return the same components for every request"
            )

    def _post(self, client: Any, batch: list[dict[str, Any]]) -> Any:
        problem = ""
        for attempt in range(self._retries + 1):
            if attempt:
                self._sleep(self._backoff_s * 2 ** (attempt - 1))
            try:
                response = client.post(self._url, json={"samples": batch})
            except self._httpx.TransportError as error:  # time-outs, too
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status_code not in _TRY_AGAIN:
                return response
            problem = f"status {response.status_code}: {_reason(response)}"
        raise RewardUnavailable(
            f"remote reward {self._url}: no answer in {self._retries + 1} tries; got {problem}; see "
            "to the server, or raise timeout_s or retries"
        )

    def _columns(self, response: Any, count: int) -> _Answer:
        try:
            content = response.json()
            scores, errors = content["scores"], content.get("errors", ())
            columns = {str(name): [_number(v) for v in column] for name, column in scores.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise RewardFailure(
                f"remote reward {self._url}: the answer breaks the protocol; got {error!r} for "
                f'{response.text[:200]!r}; return {{"scores": {{component: [number or null, ...]}}}}'
            ) from error
        for name, column in columns.items():
            if len(column) != count:
                raise RewardFailure(
                    f"remote reward {self._url}: one number a sample for component {name!r}; got "
                    f"{len(column)} for {count} samples; return as many as were sent"
                )
        if not columns:
            raise RewardFailure(
                f"remote reward {self._url}: the answer has no component; got {response.text[:200]}; "
                "return at least one"
            )
        if errors:
            logger.warning("remote reward %s: samples without a score: %s", self._url, errors)
        return columns


def _joined(answers: Sequence[_Answer], count: int) -> _Answer:
    """One column a component, with None for the samples that no answer is of yet."""
    columns: _Answer = {}
    for name in sorted(_names(answers)):
        column: list[float | None] = []
        for answer in answers:
            size = len(next(iter(answer.values())))
            column += answer.get(name, [None] * size)
        columns[name] = column + [None] * (count - len(column))
    return columns


def _names(answers: Sequence[_Answer]) -> set[str]:
    """The components: those of the first answer with a number in it, or else of the first."""
    told = [answer for answer in answers if _has_number(answer)] or answers[:1]
    return {name for answer in told[:1] for name in answer}


def _has_number(answer: _Answer) -> bool:
    return any(value is not None for column in answer.values() for value in column)


def _number(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise TypeError(f"{value!r} is no number")
    return None if value is None else float(value)


def _reason(response: Any) -> str:
    """The server's own line, if it gave one."""
    try:
        return str(response.json()["error"])[:300]
    except (ValueError, KeyError, TypeError):
        return str(response.text[:300]) or "no reason given"


def _advice(status: int) -> str:
    if status in (401, 403):
        return "set token_env to the variable that holds the server's token"
    if status == _TOO_LARGE:
        return "one sample is too large: raise the server's max_body_mb"
    return "check url, and that both sides have one version of the protocol"


def _require_httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise ConfigError(
            f"remote: needs httpx, which cannot be imported; got {error}; pip install "
            "'miles-rollout[remote]'"
        ) from error
    return httpx
