"""Responses that run: found by their id, cancelled, and made in the background."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai.types.responses import Response

from engine.outputs import Phase, QueueFull
from engine.stream import GenerationStream
from server.app import create_app
from server.response_runs import Runs
from server.settings import Settings
from tests.server.agent_engine import AgentEngine, turn
from tests.server.fake_engine import FakeEngine
from tests.server.harness import error_of, eventually
from tests.server.responses_harness import check, events_of
from tests.server.test_responses import PATH, TOOLS, engine_saying, items_of, post, stream, text_of

LONG = "word " * 400
SLOW = {"pause_s": 0.005, "max_model_len": 1 << 14}  # longer than any test takes, unless it is hurried
ENDS = ("response.completed", "response.incomplete", "response.failed")


@asynccontextmanager
async def served(engine: FakeEngine, **settings: Any) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """In the end nothing is left over: no task, no running response, nothing reserved."""
    tasks = asyncio.all_tasks()
    app = create_app(Settings(**settings), engine)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield app, client
    engine.pause_s = 0
    await eventually(lambda: asyncio.all_tasks() <= tasks)
    runs: Runs = app.state.response_runs
    assert len(runs) == 0
    assert runs.store.num_reserved == 0


class Connection:
    """One request spoken to an app by hand, so that the client can leave."""

    def __init__(
        self, app: FastAPI, method: str, path: str, body: dict[str, Any] | None = None, query: str = ""
    ) -> None:
        self._gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode() if body is not None else b""
        self.data = b""
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "headers": [(b"content-length", b"%d" % len(self._body or b""))], "client": ("test", 1),
            "server": ("test", 80),
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def leave(self) -> None:
        self._gone.set()
        await self.task

    @property
    def events(self) -> list[dict[str, Any]]:
        """Those that came whole."""
        return events_of(self.data[: self.data.rfind(b"\n\n") + 2].decode())

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.data += message.get("body", b"")


class Silent(FakeEngine):
    """Never comes to its first token."""

    async def _run(self, stream: GenerationStream, *_: object) -> None:
        await eventually(lambda: stream.ended)


async def running(app: FastAPI) -> str:
    """The id of the one response that runs, once there is one."""
    await eventually(lambda: len(getattr(app.state, "response_runs", ())))
    (id,) = app.state.response_runs._running
    return str(id)


async def said(client: httpx.AsyncClient, id: str, num_chars: int = 20) -> dict[str, Any]:
    """A running response, once it has said that much."""
    for _ in range(1000):
        response: dict[str, Any] = (await client.get(f"{PATH}/{id}")).json()
        if len(text_of(response)) >= num_chars:
            return response
        await asyncio.sleep(0.002)
    raise AssertionError(response)


async def ended(client: httpx.AsyncClient, id: str) -> dict[str, Any]:
    """A background response, polled until it has ended."""
    for _ in range(2000):
        answer = await client.get(f"{PATH}/{id}")
        assert answer.status_code == 200, answer.text
        response: dict[str, Any] = answer.json()
        Response.model_validate(response)
        if response["status"] not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0.002)
    raise AssertionError(response)


# -- with a connection --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [0, 2])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_running_response_is_found(streamed: bool, logprobs: int) -> None:
    engine = engine_saying(LONG, **SLOW)
    async with served(engine) as (app, client):
        whole = asyncio.create_task(post_or_stream(client, streamed, top_logprobs=logprobs))
        id = await running(app)
        parts = [await said(client, id, count) for count in (1, 10, 30)]
        engine.pause_s = 0
        final = await whole
        for part in parts:
            Response.model_validate(part)
            assert (part["id"], part["status"], part["usage"]) == (id, "in_progress", None)
            assert part["output"][0]["id"] == final["output"][0]["id"]
            assert part["output"][0]["status"] == "in_progress"
            assert LONG.startswith(text_of(part))
            assert bool(part["output"][0]["content"][0]["logprobs"]) == bool(logprobs)
        assert final["status"] == "completed"
        assert text_of(final) == LONG
        assert (await client.get(f"{PATH}/{id}")).json() == final


async def post_or_stream(client: httpx.AsyncClient, streamed: bool, **body: Any) -> dict[str, Any]:
    if not streamed:
        return await post(client, **body)
    events = await stream(client, **body)
    return check(events) if events[-1]["type"] == "response.completed" else dict(events[-1]["response"])


async def test_what_was_looked_at_is_what_it_would_have_been() -> None:
    said_all = turn("I look." * 20, thinking="Hm." * 20, calls=[("weather", {"city": "Rom"})])
    engine = AgentEngine([said_all], pause_s=0.002)
    async with served(engine) as (app, client):
        asked = asyncio.create_task(post(client, tools=TOOLS))
        id = await running(app)
        while not asked.done():
            part = (await client.get(f"{PATH}/{id}")).json()
            assert [item["type"] for item in part["output"]] == ["reasoning", "message", "function_call"][
                : len(part["output"])
            ]
        engine.pause_s = 0
        assert items_of(await asked) == items_of(await post(client, tools=TOOLS))


@pytest.mark.parametrize("streamed", [False, True])
async def test_cancel(streamed: bool) -> None:
    engine = engine_saying(LONG, **SLOW)
    async with served(engine) as (app, client):
        asked = asyncio.create_task(post_or_stream(client, streamed))
        id = await running(app)
        await said(client, id)
        cancelled = (await client.post(f"{PATH}/{id}/cancel")).json()
        assert engine.closed == [1]  # nothing more is computed
        final = await asked
        for response in (cancelled, final, (await client.get(f"{PATH}/{id}")).json()):
            Response.model_validate(response)
            assert (response["id"], response["status"], response["error"]) == (id, "cancelled", None)
            assert response["output"][0]["status"] == "incomplete"
            assert len(text_of(response)) >= 20
            assert LONG.startswith(text_of(response))
            assert 20 <= response["usage"]["output_tokens"] <= engine.num_delivered_tokens
            assert response["completed_at"] is None
        assert text_of(final) == text_of(cancelled)
        assert (await client.post(f"{PATH}/{id}/cancel")).json() == final
        second = await post(client, input="Go on.", previous_response_id=id, max_output_tokens=1)
        assert second["status"] == "incomplete"
        metrics = (await client.get("/metrics")).text
    assert "pagemill_client_disconnects_total 0.0" in metrics
    assert 'pagemill_request_success_total{finished_reason="abort"} 1.0' in metrics


async def test_a_cancelled_stream_ends_as_documented() -> None:
    engine = engine_saying(LONG, **SLOW)
    async with served(engine) as (app, client):
        asked = asyncio.create_task(stream(client))
        id = await running(app)
        await said(client, id)
        await client.post(f"{PATH}/{id}/cancel")
        events = await asked
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[-4:]] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.failed",
    ]  # fmt: skip
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text_of(events[-1]["response"])


async def test_before_its_first_token() -> None:
    engine = Silent(lambda prompt, p, c: [])
    async with served(engine) as (app, client):
        for streamed in (False, True):
            asked = asyncio.create_task(post_or_stream(client, streamed))
            id = await running(app)
            assert (await client.get(f"{PATH}/{id}")).json()["output"] == []
            assert (await client.post(f"{PATH}/{id}/cancel")).json()["status"] == "cancelled"
            assert (await asked)["output"] == []


async def test_what_has_ended_cannot_be_cancelled() -> None:
    async with served(engine_saying()) as (_, client):
        id = (await post(client))["id"]
        error = error_of(await client.post(f"{PATH}/{id}/cancel"))
        assert error["param"] == "response_id"
        error_of(await client.post(f"{PATH}/resp_no/cancel"), 404)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("background", [False, True])
async def test_delete(streamed: bool, background: bool) -> None:
    engine = engine_saying(LONG, **SLOW)
    async with served(engine) as (app, client):
        asked = asyncio.create_task(
            client.post(PATH, json={"input": "x", "stream": streamed, "background": background})
        )
        id = await running(app)
        assert (await client.delete(f"{PATH}/{id}")).json()["deleted"] is True
        assert engine.closed == [1]
        answer = await asked
        if streamed or not background:
            last = events_of(answer.text)[-1]["response"] if streamed else answer.json()
            assert last["status"] == "cancelled"
        for gone in (client.get(f"{PATH}/{id}"), client.delete(f"{PATH}/{id}"), client.post(f"{PATH}/{id}/cancel")):
            error_of(await gone, 404)
        assert len(app.state.response_runs.store) == 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_who_leaves_takes_the_response_along(streamed: bool) -> None:
    engine = engine_saying(LONG, **SLOW)
    async with served(engine) as (app, client):
        connection = Connection(app, "POST", PATH, {"input": "x", "stream": streamed})
        id = await running(app)
        await said(client, id)
        await connection.leave()
        assert engine.closed == [1]
        error_of(await client.get(f"{PATH}/{id}"), 404)


async def test_what_is_not_stored_is_not_found() -> None:
    engine = engine_saying(LONG, **SLOW)
    async with served(engine) as (app, client):
        connection = Connection(app, "POST", PATH, {"input": "x", "stream": True, "store": False})
        await eventually(lambda: b"response.output_text.delta" in connection.data)
        id = connection.events[0]["response"]["id"]
        error_of(await client.get(f"{PATH}/{id}"), 404)
        error_of(await client.post(f"{PATH}/{id}/cancel"), 404)
        await connection.leave()


async def test_what_runs_cannot_be_continued_yet() -> None:
    engine = engine_saying(LONG, **SLOW)
    async with served(engine) as (app, client):
        asked = asyncio.create_task(post(client))
        id = await running(app)
        body = {"input": "x", "previous_response_id": id}
        for path in (PATH, f"{PATH}/input_tokens"):
            error = error_of(await client.post(path, json=body))
            assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_in_progress")
        engine.pause_s = 0
        await asked
        assert (await client.post(PATH, json=body)).status_code == 200


async def test_each_key_finds_its_own() -> None:
    engine = engine_saying(LONG, **SLOW)
    async with served(engine, api_key=("mine", "yours")) as (_, client):
        client.headers["authorization"] = "Bearer mine"
        mine = (await post(client, background=True, input="secret"))["id"]
        yours = {"authorization": "Bearer yours"}
        path = f"{PATH}/{mine}"
        for hidden in (client.get(path, headers=yours), client.delete(path, headers=yours),
                       client.post(f"{path}/cancel", headers=yours),
                       client.get(f"{path}/input_items", headers=yours),
                       client.get(path, params={"stream": "true"}, headers=yours)):  # fmt: skip
            error_of(await hidden, 404)
        body = {"input": "x", "previous_response_id": mine}
        error = error_of(await client.post(PATH, json=body, headers=yours))
        assert error["code"] == "previous_response_not_found"
        assert (await client.get(path)).json()["status"] in ("queued", "in_progress")
        await client.post(f"{path}/cancel")


# -- in the background --------------------------------------------------------------------------------------------


async def test_in_the_background() -> None:
    engine = engine_saying(LONG, **SLOW)
    async with served(engine) as (_, client):
        made = await post(client, background=True, metadata={"a": "b"})
        assert (made["status"], made["background"], made["output"]) == ("queued", True, [])
        path = f"{PATH}/{made['id']}"
        part = await said(client, made["id"])
        assert (part["status"], part["metadata"]) == ("in_progress", {"a": "b"})
        items = (await client.get(f"{path}/input_items")).json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["Name a colour."]
        error_of(await client.get(path, params={"stream": "true"}))
        engine.pause_s = 0
        final = await ended(client, made["id"])
        assert (final["status"], text_of(final)) == ("completed", LONG)
        assert final["usage"]["output_tokens"] == engine.num_delivered_tokens
        assert (await client.post(f"{path}/cancel")).json() == final
        again = await post(client, input="x", previous_response_id=made["id"], background=True, max_output_tokens=3)
        final = await ended(client, again["id"])
        assert (final["status"], text_of(final)) == ("incomplete", LONG[:3])
        assert (await client.get(f"{PATH}/{again['id']}/input_items")).json()["data"][1]["role"] == "assistant"


async def test_cancelled_in_the_background() -> None:
    engine = engine_saying(LONG, **SLOW)
    async with served(engine) as (app, client):
        for streamed in (False, True):
            asked = asyncio.create_task(client.post(PATH, json={"input": "x", "background": True, "stream": streamed}))
            id = await running(app)
            await said(client, id)
            first, second = [(await client.post(f"{PATH}/{id}/cancel")).json() for _ in range(2)]
            assert first["status"] == second["status"] == "cancelled"
            final = await ended(client, id)
            assert text_of(final) == text_of(first)
            if streamed:
                last = events_of((await asked).text)[-1]
                assert (last["type"], last["response"]) == ("response.failed", final)
    assert engine.closed == [1, 2]


async def test_a_stream_that_was_dropped_goes_on() -> None:
    engine = engine_saying(LONG, **SLOW)
    async with served(engine, sse_keep_alive=0.01) as (app, client):
        first = Connection(app, "POST", PATH, {"input": "x", "stream": True, "background": True})
        await eventually(lambda: len(first.events) > 8)
        await first.leave()
        id = first.events[0]["response"]["id"]
        path = f"{PATH}/{id}"
        seen = first.events
        assert engine.closed == []
        second = Connection(app, "GET", path, query=f"stream=true&starting_after={seen[-1]['sequence_number']}")
        await eventually(lambda: len(second.events) > 4)
        third = asyncio.create_task(client.get(path, params={"stream": "true"}))
        engine.pause_s = 0
        await second.task
        seen += second.events
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        assert [event["type"] for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
        assert [event["response"]["status"] for event in seen[:3]] == ["queued", "queued", "in_progress"]
        assert seen[-1]["type"] == "response.completed"
        assert text_of(seen[-1]["response"]) == LONG
        assert events_of((await third).text) == seen
        assert await ended(client, id) == seen[-1]["response"]
        for number in range(0, len(seen), 50):  # and when all is over
            query = {"stream": "true", "starting_after": number}
            answer = await client.get(path, params=query)
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert events_of(answer.text) == seen[number + 1 :]
        assert (await client.get(path, params=query | {"starting_after": len(seen) - 1})).text == ""


async def test_how_a_stream_is_taken_up_again() -> None:
    async with served(engine_saying()) as (_, client):
        events = await stream(client, background=True)
        id = events[0]["response"]["id"]
        other = (await post(client, background=True))["id"]
        await ended(client, other)
        for name, query, path in (
            ("starting_after", {"stream": "true", "starting_after": "x"}, id),
            ("starting_after", {"stream": "true", "starting_after": "-1"}, id),
            ("starting_after", {"stream": "true", "starting_after": "9" * 40}, id),
            ("starting_after", {"stream": "true", "starting_after": str(len(events))}, id),
            ("starting_after", {"starting_after": "1"}, id),
            ("stream", {"stream": "maybe"}, id),
            ("stream", {"stream": "true"}, other),
        ):
            assert error_of(await client.get(f"{PATH}/{path}", params=query))["param"] == name
        query = {"include[]": "message.output_text.logprobs", "include_obfuscation": "false", "stream": "false"}
        answer = await client.get(f"{PATH}/{id}", params=query)
        assert answer.headers["x-pagemill-ignored"] == "include.message.output_text.logprobs, include_obfuscation"
        answer = await client.get(f"{PATH}/{id}/input_items", params={"include": "x", "limit": "1"})
        assert answer.headers["x-pagemill-ignored"] == "include.x"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_failure_in_the_background(streamed: bool) -> None:
    engine = engine_saying()
    engine.fail_after = 3
    async with served(engine) as (_, client):
        answer = await client.post(PATH, json={"input": "x", "background": True, "stream": streamed})
        id = (events_of(answer.text)[0]["response"] if streamed else answer.json())["id"]
        final = await ended(client, id)
        assert final["status"] == "failed"
        assert final["error"]["code"] == "server_error"
        assert "secret" not in json.dumps(final)
        if streamed:
            assert events_of(answer.text)[-1]["response"] == final


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_mistake_of_ours_in_the_background(streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("server.front.Front.tell", broken)
    engine = engine_saying(LONG, **SLOW)
    async with served(engine) as (app, client):
        asked = asyncio.create_task(client.post(PATH, json={"input": "x", "background": True, "stream": streamed}))
        await eventually(lambda: engine.closed)
        await asked
        (id,) = app.state.response_runs.store._kept
        final = await ended(client, id)
        assert (final["status"], final["error"]["code"]) == ("failed", "server_error")
        assert "secret" not in json.dumps(final)


async def test_the_end_of_the_server_ends_it() -> None:
    engine = engine_saying(LONG, **SLOW)
    async with served(engine) as (app, client):
        reader = Connection(app, "POST", PATH, {"input": "x", "background": True, "stream": True})
        id = await running(app)
        await said(client, id)
        engine.phase = Phase.DRAINING
        engine.fail_after = 0  # the grace period is over
        await reader.task
        last = reader.events[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["message"] == "The server is shutting down."


async def test_what_is_refused() -> None:
    engine = engine_saying()
    async with served(engine) as (_, client):
        body = {"input": "x", "background": True}
        assert error_of(await client.post(PATH, json=body | {"store": False}))["param"] == "store"
        assert error_of(await client.post(PATH, json=body | {"background": "yes"}))["param"] == "background"
        structured = {"format": {"type": "json_schema", "name": "n", "schema": {"title": "bad"}}}
        error_of(await client.post(PATH, json=body | {"text": structured}))  # at once, not in the background
        engine.refusal = QueueFull("The queue is full.", retry_after_s=1)
        error_of(await client.post(PATH, json=body), 429)
        assert engine.admitted == []
    async with served(engine_saying(), max_stored_responses=0) as (_, client):
        assert error_of(await client.post(PATH, json=body))["param"] == "background"
        assert (await client.post(PATH, json={"input": "x"})).status_code == 200


async def test_so_many_may_run() -> None:
    engine = engine_saying(LONG, **SLOW)
    async with served(engine, max_background_responses=2) as (app, client):
        ids = [(await post(client, background=True))["id"] for _ in range(2)]
        refused = await client.post(PATH, json={"input": "x", "background": True})
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) > 0
        await client.post(f"{PATH}/{ids[0]}/cancel")
        await eventually(lambda: len(app.state.response_runs) == 1)
        ids[0] = (await post(client, background=True))["id"]
        for id in ids:
            await client.delete(f"{PATH}/{id}")
    async with served(engine, max_background_responses=0) as (_, client):
        error_of(await client.post(PATH, json={"input": "x", "background": True}), 429)


# -- memory -------------------------------------------------------------------------------------------------------


async def test_events_are_within_the_bound_of_the_store() -> None:
    engine = engine_saying(LONG, max_model_len=1 << 14)
    bound = 1_500_000
    async with served(engine, max_stored_bytes=bound) as (app, client):
        ids, most = [], 0
        for _ in range(6):
            events = await stream(client, background=True)
            store = app.state.response_runs.store
            most = max(most, store.num_bytes)
            assert store.num_bytes + store.num_reserved <= bound
            ids.append(events[0]["response"]["id"])
        size = len(json.dumps(events))
        assert most > 2 * size  # they count
        found = [(await client.get(f"{PATH}/{id}", params={"stream": "true"})).status_code for id in ids]
        assert found == sorted(found, reverse=True)  # the oldest went first
        assert 200 in found
        assert 404 in found
        for id in ids:
            await client.delete(f"{PATH}/{id}")
        assert store.num_bytes == 0


async def test_events_without_room_are_given_up() -> None:
    engine = engine_saying(LONG, max_model_len=1 << 14)
    async with served(engine, max_stored_bytes=60_000) as (app, client):
        answer = await client.post(PATH, json={"input": "x", "background": True, "stream": True})
        events = events_of(answer.text)  # as far as they were kept
        final = await ended(client, events[0]["response"]["id"])
        assert (final["status"], text_of(final)) == ("completed", LONG)
        error = error_of(await client.get(f"{PATH}/{final['id']}", params={"stream": "true"}))
        assert error["param"] == "stream"
        assert app.state.response_runs.store.num_bytes < 60_000


async def test_a_response_without_room_ends_all_the_same() -> None:
    engine = engine_saying(LONG, max_model_len=1 << 14)
    async with served(engine, max_stored_bytes=4000) as (_, client):
        final = await ended(client, (await post(client, background=True))["id"])
        assert (final["status"], final["error"]["code"], final["output"]) == ("failed", "server_error", [])
        error_of(await client.post(PATH, json={"input": "x" * 8000, "background": True}), 429)


async def test_many_at_once_leave_nothing() -> None:
    engine = engine_saying("some words", pause_s=0.001)
    async with served(engine, max_background_responses=100) as (app, client):

        async def one(k: int) -> None:
            body = {"input": f"{k}", "background": k % 4 > 0, "stream": k % 2 == 0}
            if k % 3 == 0 and body["stream"]:
                connection = Connection(app, "POST", PATH, body)
                await eventually(lambda: connection.data)
                await connection.leave()
                return
            answer = await client.post(PATH, json=body)
            assert answer.status_code == 200
            id = (events_of(answer.text)[0]["response"] if body["stream"] else answer.json())["id"]
            if k % 5 == 0:
                await client.delete(f"{PATH}/{id}")
            elif k % 7 == 0:
                await client.post(f"{PATH}/{id}/cancel")

        await asyncio.gather(*map(one, range(80)))
        await eventually(lambda: not app.state.response_runs._running)
        assert app.state.response_runs._num_background == 0


@pytest.mark.parametrize("end", ENDS)
async def test_every_end_is_polled(end: str) -> None:
    engine = engine_saying("a b c d e f")
    engine.fail_after = 2 if end == "response.failed" else None
    body = {"max_output_tokens": 3} if end == "response.incomplete" else {}
    async with served(engine) as (_, client):
        events = await stream(client, background=True, **body)
        assert events[-1]["type"] == end
        assert (await ended(client, events[0]["response"]["id"])) == events[-1]["response"]
