"""Serves a reward over HTTP: ``python -m trainers.rewards.serve REWARD [--kwargs JSON]``.

REWARD is a name or ``module:attribute``, as in a config. The protocol is in docs/rewards.md; the
client is the reward ``remote``. It listens on this machine alone unless ``--host`` says otherwise, and
then wants a token: the value of the environment variable ``MILES_REWARD_TOKEN``.
"""

from __future__ import annotations

import argparse
import hmac
import json
import math
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from miles_rollout.errors import MilesRolloutError
from trainers.config_loader import ConfigError
from trainers.first_line import first_line
from trainers.rewards import Reward, build_reward
from trainers.rewards.media_json import MediaJsonError, decode_media
from trainers.rewards.reward_call import RewardCall, RewardFailure

TOKEN = "MILES_REWARD_TOKEN"
_MAX_ERRORS_TOLD = 3
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class _Rejected(Exception):
    """A request that is answered with ``status`` and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def create_app(
    name: str,
    reward: Reward,
    *,
    token: str | None = None,
    max_body_mb: float | int = 256,
    timeout_s: float | int = 600,
) -> Any:
    """The ASGI application: ``POST /score`` and ``GET /health``.

    One request is scored at a time: rewards need not be safe for threads. Malformed input gets a
    status of 400 to 499 and a line, never a traceback. Samples that the reward raises for are null,
    all of them as well: that would be so again, while a status of 500 asks the client to come back.
    """
    from fastapi import FastAPI, Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import JSONResponse

    app = FastAPI(title=f"reward {name}", openapi_url=None)
    lock = threading.Lock()
    limit = int(max_body_mb * 2**20)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "reward": name}

    async def score(request: Request) -> JSONResponse:
        try:
            _check_token(request.headers.get("authorization"), token)
            body = await _read(request, limit)
            media, prompts, metadata = await run_in_threadpool(_parse, body)

            def work() -> dict[str, Any]:
                with lock:
                    return _answer(name, reward, media, prompts, metadata, timeout_s)

            return JSONResponse(await run_in_threadpool(work))
        except _Rejected as rejected:
            return JSONResponse({"error": str(rejected)}, status_code=rejected.status)
        except Exception as error:  # the reward's own: the client decides what it means
            message = first_line(f"{type(error).__name__}: {error}")
            return JSONResponse({"error": message}, status_code=500)

    # FastAPI finds the request by its annotation, which is a string here.
    score.__annotations__["request"] = Request
    app.add_api_route("/score", score, methods=["POST"], response_model=None)
    return app


def _check_token(header: str | None, token: str | None) -> None:
    given = (header or "").removeprefix("Bearer ")
    if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
        raise _Rejected(401, "authorization: the token is missing or wrong; send it as a bearer")


async def _read(request: Any, limit: int) -> bytes:
    """The body, refused as soon as it is longer than it may be, whatever its header claims."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise _Rejected(413, f"body: longer than {limit} bytes; send fewer samples")
    return bytes(body)


def _parse(body: bytes) -> tuple[list[Any], list[str], list[Mapping[str, Any]]]:
    try:
        samples = json.loads(body)["samples"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Rejected(400, f'body: needs JSON {{"samples": [...]}}; got {error!r}') from error
    if not isinstance(samples, list) or not samples:
        raise _Rejected(400, "samples: needs a list of at least one")
    media, prompts, metadata = [], [], []
    for i, sample in enumerate(samples):
        if not isinstance(sample, dict) or not isinstance(sample.get("prompt"), str):
            raise _Rejected(400, f"samples[{i}].prompt: must be a string")
        if not isinstance(sample.get("metadata", {}), dict):
            raise _Rejected(400, f"samples[{i}].metadata: must be an object")
        if not isinstance(sample.get("media"), dict):
            raise _Rejected(400, f"samples[{i}].media: must be an object")
        try:
            media.append(decode_media(sample["media"]))
        except MediaJsonError as error:
            raise _Rejected(400, f"samples[{i}].media: {first_line(error)}") from error
        prompts.append(sample["prompt"])
        metadata.append(sample.get("metadata", {}))
    return media, prompts, metadata


def _answer(
    name: str,
    reward: Reward,
    media: Sequence[Any],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    timeout_s: float | int,
) -> dict[str, Any]:
    """By the rules of local rewards: what fails alone has no score, and its neighbours have theirs.

    ``errors`` says why, in a few lines, where it is known.
    """
    call = RewardCall(
        label=name,
        reward=reward,
        media=media,
        prompts=prompts,
        metadata=metadata,
        timeout_s=timeout_s,
    )
    try:
        columns = call.scores(max_failures=len(media) - 1)
    except RewardFailure as failure:
        raise _Rejected(422, str(failure)) from failure
    scores = {
        component: [None if math.isnan(v) else v for v in column.tolist()]
        for component, column in columns.items()
    }
    errors = [first_line(text) for text in call.errors[:_MAX_ERRORS_TOLD]]
    return {"scores": scores, "errors": errors} if errors else {"scores": scores}


def main() -> None:
    """Parse ``sys.argv``, build the reward, serve until interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reward")
    parser.add_argument("--kwargs", default="{}", help="JSON, the reward's arguments")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8085)
    parser.add_argument("--max-body-mb", type=float, default=256)
    arguments = parser.parse_args()
    try:
        token = os.environ.get(TOKEN)
        if arguments.host not in _LOOPBACK and not token:
            raise ConfigError(
                f"serve: other machines could send anything; got host {arguments.host} and no token; "
                f"export {TOKEN}, or serve on 127.0.0.1"
            )
        try:
            import uvicorn

            kwargs = json.loads(arguments.kwargs)
        except ImportError as error:
            raise ConfigError(
                f"serve: needs fastapi and uvicorn; got {error}; pip install 'miles-rollout[serve]'"
            ) from error
        except ValueError as error:
            raise ConfigError(f"serve: --kwargs is no JSON; got {error}; set an object") from error
        app = create_app(
            arguments.reward,
            build_reward(arguments.reward, kwargs),
            token=token,
            max_body_mb=arguments.max_body_mb,
        )
    except MilesRolloutError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
