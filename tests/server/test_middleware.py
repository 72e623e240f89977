"""Middleware alone, around a tiny ASGI app: ids, keys, phases, bodies."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.outputs import Phase
from server import middleware
from server.auth import Auth, OriginGate
from server.bodies import BodyLimit
from server.logs import REQUEST_LOGGER, Seldom
from server.metrics import Metrics
from server.middleware import PhaseGate, RequestContext
from server.protocol.errors import ApiError
from tests.server.keys import load_keys


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body it got."""
    scope.get("state", {}).get("log", {})["note"] = "seen"
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": body})


def client_of(app: ASGIApp, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, **options), base_url="http://test")


def assert_openai_shape(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


# -- request id and log -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["abc-123", "trace:9f/x.y_z@1+2=", "a" * 64])
async def test_a_sane_request_id_is_echoed(given: str) -> None:
    async with client_of(RequestContext(echo, Metrics())) as client:
        response = await client.get("/", headers={"X-Request-Id": given})
    assert response.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize("given", ["", "a" * 65, "z" * 6000, "a b", "a\tb", "tür", "a;b", '"x"'])
async def test_any_other_request_id_is_replaced(given: str) -> None:
    async with client_of(RequestContext(echo, Metrics())) as client:
        response = await client.get("/", headers={"X-Request-Id": given.encode()})
    (made,) = response.headers.get_list("x-request-id")
    assert made != given
    assert len(made) == 32


async def test_one_line_per_request_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, REQUEST_LOGGER)
    async with client_of(RequestContext(echo, Metrics())) as client:
        await client.post("/a%0Ab", content=b"secret prompt", headers={"X-Request-Id": "mine"})
    (record,) = caplog.records
    fields = record.fields  # type: ignore[attr-defined]  # ours
    assert fields["id"] == "mine"
    assert fields["status"] == 200
    assert fields["note"] == "seen"
    assert "\n" not in fields["path"]
    assert "secret" not in str(fields) + record.getMessage()


async def test_strangers_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "STRANGERS_PER_SECOND", 2)
    app = RequestContext(Auth(echo, load_keys(["key"], None), ()), metrics := Metrics())
    async with client_of(app) as client:
        with caplog.at_level(logging.INFO, logger=REQUEST_LOGGER):
            for _ in range(100):
                assert (await client.get("/x")).status_code == 401
            (await client.get("/x", headers={"Authorization": "Bearer key"})).raise_for_status()
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    refused = [line for line in lines if line["status"] == 401]
    assert 2 <= len(refused) < 100
    assert len(refused) + sum(line.get("untold", 0) for line in refused) <= 100
    assert lines[-1]["status"] == 200
    assert 'pagemill_errors_total{code="401"} 100.0' in metrics.render().decode()
    assert len(metrics.recent_errors) == 1


async def test_what_needs_no_key_fills_neither_log_nor_the_list_of_errors(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "STRANGERS_PER_SECOND", 2)
    metrics, keys = Metrics(), {"Authorization": "Bearer key"}
    app = RequestContext(OriginGate(Auth(echo, load_keys(["key"], None), ("/",)), (), only_local=False), metrics)
    metrics.error(500, "/v1/completions", "of use")
    async with client_of(app) as client:
        with caplog.at_level(logging.INFO, logger=REQUEST_LOGGER):
            for _ in range(100):
                assert (await client.get("/")).status_code == 200
                assert (await client.get("/x")).status_code == 401
                assert (await client.get("/x", headers={"Origin": "http://evil"})).status_code == 403
            assert len(caplog.records) < 50
            for _ in range(5):
                (await client.get("/x", headers=keys)).raise_for_status()
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [line["status"] for line in lines[-5:]] == [200] * 5
    assert len(lines) - 5 + sum(line.get("untold", 0) for line in lines) == 300
    assert sorted(note.status for note in metrics.recent_errors) == [401, 403, 500]
    shown = metrics.render().decode()
    assert "pagemill_http_requests_total 305.0" in shown
    assert "pagemill_http_requests_let_in_total 5.0" in shown


def test_so_many_lines_a_second_and_the_rest_is_counted() -> None:
    seldom = Seldom(2)
    assert [seldom.allows(now) for now in (5.0, 5.1, 5.2, 5.9, 6.0, 6.1, 6.2)] == [
        True,
        True,
        False,
        False,
        True,
        True,
        False,
    ]
    assert (seldom.untold(), seldom.untold()) == (3, 0)


async def test_probes_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, REQUEST_LOGGER)
    async with client_of(RequestContext(echo, Metrics())) as client:
        await client.get("/health")
        await client.get("/metrics")
    assert not caplog.records


async def test_probes_while_the_model_loads_are_no_errors() -> None:
    async def not_ready(scope: Scope, receive: Receive, send: Send) -> None:
        await ApiError(503, "not yet").response(scope)(scope, receive, send)

    metrics = Metrics()
    async with client_of(RequestContext(not_ready, metrics)) as client:
        for path in ("/health", "/health", "/v1/completions"):
            assert (await client.get(path)).status_code == 503
    assert b'pagemill_errors_total{code="503"} 1.0' in metrics.render()


async def test_a_crash_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def crash(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("inside")

    metrics = Metrics()
    async with client_of(RequestContext(crash, metrics)) as client:
        told = await client.get("/")
    assert (told.status_code, told.json()["error"]["type"]) == (500, "server_error")
    assert told.headers["x-request-id"]
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["a request failed"]
    values = {
        (s.name, s.labels.get("code")): s.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for s in family.samples
    }
    assert values["pagemill_errors_total", "500"] == 1
    assert values["pagemill_http_in_flight", None] == 0


# -- phases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "closes"), [(Phase.STARTING, False), (Phase.DRAINING, True), (Phase.DEAD, True)])
async def test_nothing_is_served_unless_ready(phase: Phase, closes: bool) -> None:
    async with client_of(PhaseGate(echo, lambda: phase, ["/health"])) as client:
        response = await client.post("/v1/completions", content=b"x")
        assert response.status_code == 503
        assert assert_openai_shape(response)["code"] == f"server_{phase.value}"
        assert response.headers["retry-after"]
        assert (response.headers.get("connection") == "close") is closes
        assert (await client.get("/health")).status_code == 200


# -- bodies -------------------------------------------------------------------------------------------------------


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_a_body_arrives_whole_up_to_the_limit() -> None:
    async with client_of(BodyLimit(echo, 10, 5)) as client:
        assert (await client.post("/", content=b"0123456789")).text == "0123456789"
        assert (await client.post("/", content=pieces(b"01234", b"56789"))).text == "0123456789"
        assert (await client.get("/")).text == ""


async def test_a_larger_body_is_refused_with_and_without_a_length() -> None:
    async with client_of(BodyLimit(echo, 10, 5)) as client:
        for content in (b"0123456789a", pieces(b"01234", b"56789", b"a")):
            response = await client.post("/", content=content)
            assert response.status_code == 413
            assert "10 bytes" in assert_openai_shape(response)["message"]


async def run_raw(
    app: ASGIApp, receive: Receive, headers: list[tuple[bytes, bytes]], sent: list[Any] | None = None
) -> list[Any]:
    sent = [] if sent is None else sent

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    await app(scope, receive, send)
    return sent


async def test_a_length_that_lies_or_has_10000_digits_is_refused_before_reading() -> None:
    for length in (b"11", b"9" * 10_000):
        sent: list[Any] = []

        async def receive(sent: list[Any] = sent) -> Any:
            assert sent[0]["status"] == 413
            assert json.loads(sent[1]["body"])["error"]["code"] == "request_too_large"
            return {"type": "http.disconnect"}

        await run_raw(BodyLimit(echo, 10, 5), receive, [(b"content-length", length)], sent)


@pytest.mark.parametrize(
    "layer", [BodyLimit(echo, 10, 5), Auth(echo, load_keys(["sk"], None), ())], ids=["too large", "no key"]
)
async def test_the_body_of_a_refused_request_is_not_taken_for_ever(
    layer: ASGIApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "LINGER_S", 0.1)

    async def endless() -> Any:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    async with asyncio.timeout(5):
        sent = await run_raw(layer, endless, [(b"transfer-encoding", b"chunked")])
    assert sent[0]["status"] in (401, 413)
    assert [message["more_body"] for message in sent[1:]] == [True, False]


async def test_a_refused_request_with_its_body_here_is_answered_at_once() -> None:
    whole = {"type": "http.request", "body": b"x" * 1000, "more_body": False}

    async def receive() -> Any:
        return whole

    began = time.monotonic()
    assert (await run_raw(BodyLimit(echo, 10, 5), receive, [(b"transfer-encoding", b"chunked")]))[0]["status"] == 413
    assert (await run_raw(Auth(echo, load_keys(["sk"], None), ()), receive, [(b"content-length", b"5")]))[0][
        "status"
    ] == 401
    assert time.monotonic() - began < 1


async def test_a_body_that_does_not_come_ends_in_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "LINGER_S", 0.05)

    async def stuck() -> Any:
        await asyncio.sleep(60)

    sent = await run_raw(BodyLimit(echo, 10, 0.05), stuck, [(b"content-length", b"5")])
    assert sent[0]["status"] == 408


async def test_a_client_that_leaves_while_sending_reaches_no_route() -> None:
    async def gone() -> Any:
        return {"type": "http.disconnect"}

    assert await run_raw(BodyLimit(echo, 10, 5), gone, [(b"content-length", b"5")]) == []


async def test_after_the_body_the_route_still_hears_of_the_disconnect() -> None:
    messages: list[Any] = [{"type": "http.request", "body": b"x", "more_body": False}, {"type": "http.disconnect"}]
    heard: list[str] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def listen(scope: Scope, receive: Receive, send: Send) -> None:
        heard.extend([(await receive())["type"], (await receive())["type"]])

    await run_raw(BodyLimit(listen, 10, 5), receive, [(b"content-length", b"1")])
    assert heard == ["http.request", "http.disconnect"]
