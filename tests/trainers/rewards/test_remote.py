"""A reward behind HTTP: a real server in a thread, its faults, and the client's answer to each."""

import contextlib
import json
import re
import socket
import threading
import time

import httpx
import pytest
import torch
import uvicorn

from miles_rollout import Media
from trainers.config_loader import ConfigError
from trainers.rewards import build_reward
from trainers.rewards.media_json import encode_media
from trainers.rewards.remote import RemoteReward
from trainers.rewards.reward_call import RewardFailure
from trainers.rewards.scores import ScoredParts
from trainers.rewards.scoring import RewardConfig, Scorer
from trainers.rewards.serve import create_app


def brightness(media, prompts, metadata):
    """Mean of the picture plus what the metadata adds; named components."""
    light = [m.image.mean().item() for m in media]
    added = [float(m.get("add", 0)) for m in metadata]
    return {"light": light, "added": added}


def media(*levels):
    return [Media(image=torch.full((3, 4, 4), float(level))) for level in levels]


@contextlib.contextmanager
def served(app, port=0):
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def serving(reward=brightness, **kwargs):
    with served(create_app("brightness", reward, **kwargs)) as url:
        yield url


class Pauses(list):
    """Records pauses in place of sleeping."""

    def __call__(self, seconds):
        self.append(seconds)


def remote(url, **kwargs):
    return RemoteReward(url, **{"retries": 2, "sleep": Pauses(), **kwargs})


def answering(*answers):
    """An app that gives the answers one after the other: (status, body)."""
    from fastapi import FastAPI
    from fastapi.responses import Response

    app, left, seen = FastAPI(), list(answers), []

    @app.post("/score")
    def score():
        status, body = left.pop(0) if len(left) > 1 else left[0]
        seen.append(status)
        return Response(json.dumps(body), status_code=status, media_type="application/json")

    app.state.seen = seen
    return app


def test_scores_come_back_in_order_whatever_the_batch():
    levels = [0.0, 0.2, 1.0, 0.6, 0.4]
    metadata = [{"add": i} for i in range(5)]
    with serving() as url:
        for size in (1, 2, 5):
            scores = remote(url, batch_size=size)(media(*levels), ["p"] * 5, metadata)
            assert scores["light"] == pytest.approx(levels, abs=1e-3)
            assert scores["added"] == [0, 1, 2, 3, 4]
            assert scores["total"] == pytest.approx([a + i for i, a in enumerate(levels)], abs=1e-3)


def test_a_sample_without_a_score_is_null_and_masked():
    def partly(media, prompts, metadata):
        return [float("nan") if p == "bad" else 1.0 for p in prompts]

    with serving(partly) as url:
        assert remote(url)(media(0, 1), ["bad", "x"], [{}, {}]) == {"total": [None, 1.0]}


def test_a_reward_that_raises_for_one_sample_scores_the_others():
    def picky(media, prompts, metadata):
        if "bad" in prompts:
            raise ValueError("what a prompt")
        return [1.0] * len(media)

    with serving(picky) as url:
        assert remote(url)(media(0, 1), ["bad", "x"], [{}, {}]) == {"total": [None, 1.0]}


def test_samples_that_the_reward_raises_for_are_null_with_one_line_and_not_tried_again(caplog):
    def picky(media, prompts, metadata):
        if "bad" in prompts:
            raise ValueError("no model\nTraceback")
        return {"light": [1.0] * len(media)}

    pauses = Pauses()
    prompts = ["bad", "x", "bad"]
    with serving(picky) as url:
        scores = remote(url, sleep=pauses, batch_size=1)(media(0, 0, 0), prompts, [{}] * 3)
        response = httpx.post(f"{url}/score", json={"samples": [sample(prompt="bad")]})
    assert scores == {"light": [None, 1.0, None], "total": [None, 1.0, None]}
    assert pauses == []
    assert response.status_code == 200
    assert response.json()["scores"] == {"total": [None]}
    assert "Traceback" not in response.text
    told = [r.getMessage() for r in caplog.records if r.name == "trainers.rewards.remote"]
    assert len(told) == 2
    assert re.search(r"samples without a score: .*ValueError: no model", told[0])


def test_what_is_null_alone_does_not_name_the_total():
    app = answering((200, {"scores": {"total": [None]}}), (200, {"scores": {"light": [2]}}))
    with served(app) as url:
        reward = remote(url, batch_size=1)
        assert reward(media(0, 1), ["p"] * 2, [{}] * 2) == {"light": [None, 2.0]}


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_passing_fault_is_tried_again(status):
    app = answering((status, {"error": "later"}), (status, {}), (200, {"scores": {"total": [2]}}))
    with served(app) as url:
        assert remote(url)(media(0), ["p"], [{}]) == {"total": [2.0]}
    assert app.state.seen == [status, status, 200]


@pytest.mark.parametrize(
    ("status", "advice"),
    [(400, "check url"), (401, "set token_env"), (403, "set token_env"), (404, "check url")],
)
def test_a_refusal_ends_the_run_at_once(status, advice):
    app = answering((status, {"error": "because"}))
    with served(app) as url, pytest.raises(RewardFailure, match=f"{status}: because; {advice}"):
        remote(url)(media(0), ["p"], [{}])
    assert app.state.seen == [status]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"scores": {"total": [1, 2]}}, "one number a sample for component 'total'; got 2 for 1"),
        ({"scores": {"total": ["a"]}}, "breaks the protocol; got TypeError"),
        ({"scores": {"total": [10**400]}}, "breaks the protocol; got OverflowError"),
        ({"scores": [1]}, "breaks the protocol"),
        ({"scores": {}}, "has no component"),
        ({"rewards": [1]}, "breaks the protocol; got KeyError"),
        (["x"], "breaks the protocol"),
    ],
)
def test_an_answer_that_breaks_the_protocol_ends_the_run(body, message):
    with served(answering((200, body))) as url, pytest.raises(RewardFailure, match=message):
        remote(url)(media(0), ["p"], [{}])


def test_a_server_that_is_too_slow_is_a_transport_error():
    def slow(media, prompts, metadata):
        time.sleep(1)
        return [1.0]

    with (
        serving(slow) as url,
        pytest.raises(ConnectionError, match="no answer in 1 tries; got ReadTimeout"),
    ):
        remote(url, timeout_s=0.1, retries=0)(media(0), ["p"], [{}])


def test_a_body_that_is_too_large_is_halved_until_it_fits():
    one = len(json.dumps({"samples": [sample()]}))
    with serving(max_body_mb=2.5 * one / 2**20) as url:
        assert len(remote(url, batch_size=8)(media(*[0.5] * 7), ["p"] * 7, [{}] * 7)["light"]) == 7
    with (
        serving(max_body_mb=0.5 * one / 2**20) as url,
        pytest.raises(RewardFailure, match=r"413: body: longer than .* one sample is too large"),
    ):
        remote(url)(media(0.5, 0.5), ["p"] * 2, [{}] * 2)


def test_the_size_that_fitted_is_remembered():
    refusal = (413, {"error": "too large"})
    fits = (200, {"scores": {"total": [1, 2]}})
    app = answering(refusal, refusal, *[fits] * 8)
    with served(app) as url:
        reward = remote(url, timeout_s=10, retries=0, batch_size=8)
        assert reward.time_limit_s(8) == 20
        assert reward(media(*[0] * 8), ["p"] * 8, [{}] * 8) == {"total": [1, 2] * 4}
        assert reward.time_limit_s(8) == 80
        reward(media(*[0] * 8), ["p"] * 8, [{}] * 8)
    assert app.state.seen == [413, 413] + [200] * 8


@pytest.mark.parametrize(("first", "second"), [("ab", "a"), ("a", "ab"), ("a", "b")])
def test_components_that_only_one_request_names_end_the_run(first, second):
    answers = [(200, {"scores": {name: [1] for name in names}}) for names in (first, second)]
    message = "answers name different components; got .*; return the same"
    for before in ([], [(413, {"error": "too large"})]):
        with served(answering(*before, *answers)) as url:
            reward = remote(url, batch_size=2 if before else 1)
            with pytest.raises(RewardFailure, match=message):
                reward(media(0, 1), ["p"] * 2, [{}] * 2)


def test_what_was_said_before_a_server_went_away_in_a_halved_batch_is_kept():
    app = answering((413, {}), (200, {"scores": {"total": [1, 2]}}), (503, {"error": "down"}))
    with served(app) as url:
        scores = scorer_of(url, batch_size=4).score(media(*[0] * 4), ["p"] * 4, [{}] * 4)
    assert scores.masked.tolist() == [False, False, True, True]


def test_the_token_comes_from_the_environment_and_is_asked_for(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "secret")
    with serving(token="secret") as url:
        assert remote(url, token_env="A_TOKEN")(media(0), ["p"], [{}])["light"] == [0.0]
        with pytest.raises(
            RewardFailure, match="401: authorization: the token is missing or wrong"
        ):
            remote(url)(media(0), ["p"], [{}])
    monkeypatch.delenv("A_TOKEN")
    with pytest.raises(ConfigError, match="environment variable A_TOKEN holds no token; got None"):
        remote("http://x", token_env="A_TOKEN")


def sample(**changes):
    return {"prompt": "p", "metadata": {}, "media": encode_media(media(0.5)[0]), **changes}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"not json", "body: needs JSON"),
        (b"[" * 100_000, "body: needs JSON"),
        (b"[]", "body: needs JSON"),
        (b'{"samples": []}', "samples: needs a list of at least one"),
        ({"samples": [1]}, r"samples\[0\].prompt: must be a string"),
        ({"samples": [sample(), sample(prompt=None)]}, r"samples\[1\].prompt: must be a string"),
        ({"samples": [sample(metadata=3)]}, r"samples\[0\].metadata: must be an object"),
        ({"samples": [sample(media=None)]}, r"samples\[0\].media: must be an object"),
        ({"samples": [sample(media={"image": "?"})]}, r"samples\[0\].media: not base64"),
    ],
)
def test_malformed_input_is_a_line_and_never_a_traceback(body, message):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with serving() as url:
        response = httpx.post(f"{url}/score", content=content)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "\n" not in error
    assert re.search(message, error)


def test_health_names_the_reward():
    with serving() as url:
        assert httpx.get(f"{url}/health").json() == {"status": "ok", "reward": "brightness"}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"url": "localhost:1"}, "url begins with http"),
        ({"timeout_s": 0}, "timeout_s must be above 0; got 0"),
        ({"retries": -1}, "retries must be at least 0; got -1"),
        ({"batch_size": 0}, "batch_size must be above 0"),
    ],
)
def test_wrong_settings_are_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        build_reward("remote", {"url": "http://x", **kwargs})


def scorer_of(url, *, timeout_s=30, max_masked_fraction=1.0, **kwargs):
    kwargs = {"url": url, "retries": 2, "backoff_s": 0.01, **kwargs}
    config = RewardConfig(name="remote", kwargs=kwargs)
    return Scorer([config], timeout_s=timeout_s, max_masked_fraction=max_masked_fraction)


def test_all_tries_count_however_short_the_limit_of_a_call_is():
    app = answering((503, {}), (503, {}), (200, {"scores": {"total": [1, 2]}}))
    with served(app) as url:
        scorer = scorer_of(url, timeout_s=0.05, backoff_s=0.1)
        assert scorer.score(media(0, 1), ["p"] * 2, [{}] * 2).total.tolist() == [1, 2]
    assert app.state.seen == [503, 503, 200]


def test_the_limit_of_a_call_holds_all_tries_and_pauses_of_its_requests():
    reward = remote("http://x", timeout_s=10, retries=3, backoff_s=1, batch_size=8)
    a_request = 4 * (10 + 10) + 1 + 2 + 4
    assert reward.time_limit_s(1) == reward.time_limit_s(8) == a_request
    assert reward.time_limit_s(17) == 3 * a_request


def test_a_server_that_is_away_is_not_asked_for_every_sample():
    app = answering((200, {"scores": {"total": [1, 2]}}), (503, {"error": "down"}))
    with served(app) as url:
        scores = scorer_of(url, batch_size=2).score(media(*[0] * 6), ["p"] * 6, [{}] * 6)
    assert scores.total[:2].tolist() == [1, 2], "what was said before is kept"
    assert scores.masked.tolist() == [False] * 2 + [True] * 4
    assert app.state.seen == [200, 503, 503, 503]
    assert re.search(
        r"RewardUnavailable: .* no answer in 3 tries; got status 503", scores.errors[0]
    )


def test_a_server_that_stays_away_ends_the_run_with_the_first_chunk():
    app = answering((503, {"error": "down"}))
    with served(app) as url:
        scorer = scorer_of(url, max_masked_fraction=0.25)
        parts = ScoredParts(8, max_masked=2)
        with pytest.raises(RewardFailure, match=r"8 of 8 samples have no score; got .*status 503"):
            scorer.score_part(parts, media(*[0] * 4), ["p"] * 4, [{}] * 4)
    assert app.state.seen == [503] * 3


def test_a_dead_server_masks_and_then_stops_and_a_new_one_goes_on():
    pauses = Pauses()

    def scorer(url):
        kwargs = {"url": url, "retries": 1, "backoff_s": 0.01}
        config = RewardConfig(name="remote", kwargs=kwargs)
        return Scorer([config], timeout_s=30, max_masked_fraction=0.5)

    with serving() as url:
        live = scorer(url)
        assert not live.score(media(0, 1), ["p"] * 2, [{}] * 2).masked.any()
    with pytest.raises(RewardFailure, match=r"2 of 2 samples have no score; .* no answer in 2 tr"):
        live.score(media(0, 1), ["p"] * 2, [{}] * 2)
    port = int(url.rpartition(":")[2])
    tried, restarted = threading.Event(), threading.Event()

    def restart(seconds):
        """In place of the pause between two tries."""
        pauses.append(seconds)
        tried.set()
        restarted.wait()

    waiting = RemoteReward(url, retries=1, sleep=restart)
    scores = []
    thread = threading.Thread(
        target=lambda: scores.append(waiting(media(1.0), ["p"], [{}])), daemon=True
    )
    thread.start()
    assert tried.wait(30)
    with served(create_app("brightness", brightness), port=port):
        restarted.set()
        thread.join(30)
    assert scores == [{"light": [1.0], "added": [0.0], "total": [1.0]}]
    assert pauses == [0.5]
