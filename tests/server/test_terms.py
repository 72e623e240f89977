"""On what terms requests reach the engine: time limits, urgency, whose key, whose cache; and how a lapse is told."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.terms import MAX_PRIORITY
from server.logs import REQUEST_LOGGER
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import client_of, error_of
from tests.server.test_auth import bearer, key_file

USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 4},
    "/v1/responses": {"input": "a", "max_output_tokens": 4},
    "/v1/messages": {"messages": [USER], "max_tokens": 4},
    "/v1/embeddings": {"input": "a"},
}
STREAMS = [path for path in BODIES if path != "/v1/embeddings"]


def engine() -> FakeEngine:
    tokenizer = small_tokenizer()
    return FakeEngine(says("hello", tokenizer), tokenizer=tokenizer)


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_may_shorten_the_servers_time_limit_but_not_lengthen_it(path: str) -> None:
    served = engine()
    async with client_of(served, request_timeout=30) as client:
        for given, wanted_s in (({}, 30), ({"timeout": 5}, 5), ({"timeout": 0.5}, 0.5), ({"timeout": 300}, 30)):
            before = time.monotonic()
            response = await client.post(path, json=BODIES[path] | given)
            assert response.status_code == 200, response.text
            deadline_s = served.admitted[-1].terms.deadline_s
            assert deadline_s is not None
            assert before + wanted_s <= deadline_s <= time.monotonic() + wanted_s
    async with client_of(served) as client:
        await client.post(path, json=BODIES[path])
        assert served.admitted[-1].terms.deadline_s is None


@pytest.mark.parametrize("path", BODIES)
async def test_urgency_reaches_the_engine(path: str) -> None:
    served = engine()
    async with client_of(served) as client:
        for priority in (-MAX_PRIORITY, -1, 0, None, MAX_PRIORITY):
            assert (await client.post(path, json=BODIES[path] | {"priority": priority})).status_code == 200
            assert served.admitted[-1].terms.priority == (priority or 0)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout", 0), ("timeout", -1), ("timeout", 86401), ("timeout", "5"), ("timeout", True),
        ("priority", 0.5), ("priority", "1"), ("priority", MAX_PRIORITY + 1), ("priority", True),
    ],
)  # fmt: skip
async def test_bad_terms_are_named(path: str, field: str, value: Any) -> None:
    served = engine()
    async with client_of(served) as client:
        response = await client.post(path, json=BODIES[path] | {field: value})
    if path == "/v1/messages":
        assert response.status_code == 400
        assert field in response.json()["error"]["message"]
    else:
        assert error_of(response)["param"] == field
    assert served.admitted == []


# -- a lapse ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
async def test_a_plain_answer_whose_time_is_over_is_an_error_that_is_not_tried_again(path: str) -> None:
    served = engine()
    served.fail_after, served.fails_with = 0, "timeout"
    async with client_of(served) as client:
        response = await client.post(path, json=BODIES[path])
        numbers = (await client.get("/metrics")).text
    assert response.status_code == 408
    assert response.headers["x-should-retry"] == "false"
    assert "secret" not in response.text
    if path == "/v1/messages":
        assert response.json()["error"]["type"] == "timeout_error"
    else:
        assert error_of(response, 408)["code"] == "timeout"
    assert 'pagemill_errors_total{code="408"} 1.0' in numbers


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_whose_time_is_over_ends_with_an_error_event(path: str) -> None:
    served = engine()
    served.fail_after, served.fails_with = 2, "timeout"
    async with client_of(served) as client:
        response = await client.post(path, json=BODIES[path] | {"stream": True})
        numbers = (await client.get("/metrics")).text
    assert response.status_code == 200
    assert "took longer than it was given" in response.text
    assert "secret" not in response.text
    assert 'pagemill_errors_total{code="408"} 1.0' in numbers


async def test_who_comes_too_late_is_told_so_before_anything_is_computed() -> None:
    served = engine()
    async with client_of(served) as client:
        response = await client.post("/v1/completions", json=BODIES["/v1/completions"] | {"timeout": 1e-9})
    assert error_of(response, 408)["code"] == "timeout"


# -- whose key ----------------------------------------------------------------------------------------------------

KEYS = """
[alice]
sha256 = ["{one}", "{two}"]
weight = 3
[team-1]
sha256 = "{three}"
cache_group = "team"
[team-2]
sha256 = "{boss}"
cache_group = "team"
[team]
sha256 = "{eye}"
"""


@pytest.mark.parametrize("path", BODIES)
async def test_the_key_says_who_it_is_and_what_share_it_has(path: str, tmp_path: Path) -> None:
    served = engine()
    async with client_of(served, api_key_file=key_file(tmp_path, KEYS)) as client:
        for key, name, weight, reserved in (
            ("one", "alice", 3, 0.5),
            ("two", "alice", 3, 0.5),
            ("eye", "team", 1, 1 / 6),
        ):
            assert (await client.post(path, json=BODIES[path], headers=bearer(key))).status_code == 200
            terms = served.admitted[-1].terms
            assert (terms.client, terms.weight, terms.reserved) == (name, weight, pytest.approx(reserved))


async def salts(client: httpx.AsyncClient, served: FakeEngine, *keys: str, salt: str | None = None) -> list[str]:
    found = []
    for key in keys:
        body = BODIES["/v1/completions"] | {"cache_salt": salt}
        await client.post("/v1/completions", json=body, headers=bearer(key))
        found.append(served.admitted[-1].cache_salt)
    return found


async def test_only_keys_of_one_client_or_group_share_prefixes(tmp_path: Path) -> None:
    served = engine()
    async with client_of(served, api_key=["inline"], api_key_file=key_file(tmp_path, KEYS)) as client:
        one, two, three, boss, eye, inline = await salts(
            client, served, "one", "two", "three", "boss", "eye", "inline"
        )
        assert one == two
        assert three == boss
        assert len({one, three, eye, inline, ""}) == 5
        salted = await salts(client, served, "one", "three", salt="s")
        assert len({one, three, *salted, "s"}) == 5
        forged = await salts(client, served, "eye", salt=one)
        assert forged != [one]


async def test_without_keys_the_salt_is_the_clients_own() -> None:
    served = engine()
    async with client_of(served) as client:
        assert await salts(client, served, "anything", salt="s") == ["s"]
        assert await salts(client, served, "anything") == [""]


async def test_tokens_are_counted_against_the_key_as_usage_tells_them(tmp_path: Path) -> None:
    served = engine()
    text = '[a]\nsha256 = "{one}"\ntokens_per_minute = 9\n[b]\nsha256 = "{two}"'
    async with client_of(served, api_key_file=key_file(tmp_path, text)) as client:
        body = BODIES["/v1/completions"]
        usage = (await client.post("/v1/completions", json=body, headers=bearer("one"))).json()["usage"]
        assert usage["total_tokens"] == 5
        assert (await client.post("/v1/completions", json=body, headers=bearer("one"))).status_code == 200
        refused = await client.post("/v1/completions", json=body, headers=bearer("one"))
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) == 7, "a token over, at 9 a minute"
        assert (await client.post("/v1/completions", json=body, headers=bearer("two"))).status_code == 200


# -- the log line -------------------------------------------------------------------------------------------------


async def test_the_log_line_tells_where_the_time_went_and_whose_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, REQUEST_LOGGER)
    served = engine()
    async with client_of(served, api_key_file=key_file(tmp_path, KEYS)) as client:
        await client.post("/v1/completions", json=BODIES["/v1/completions"], headers=bearer("one"))
        await client.post("/v1/completions", json=BODIES["/v1/completions"], headers=bearer("wrong"))
    answered, refused = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert answered["client"] == "alice"
    assert answered["finish"] == "length"
    assert (answered["prompt_tokens"], answered["completion_tokens"], answered["cached_tokens"]) == (1, 4, 2)
    assert refused["status"] == 401
    assert "client" not in refused
    assert "hi" not in str(answered)
