"""Background responses: polled, cancelled, their streams taken up again, and what they hold."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from engine.outputs import Phase, QueueFull
from server.digest import digest_of
from tests.server.harness import error_of, eventually
from tests.server.responses_harness import events_of
from tests.server.runs_harness import LONG, SLOW, Connection, ended, running, said, served
from tests.server.test_responses import PATH, engine_saying, post, stream, text_of

ENDS = ("response.completed", "response.incomplete", "response.failed")


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


async def test_a_stream_that_was_dropped_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.front.KEEP_ALIVE_S", 0.01)
    engine = engine_saying(LONG, **SLOW)
    async with served(engine) as (app, client):
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
    async with served(engine_saying(), max_stored_bytes=0) as (_, client):
        assert error_of(await client.post(PATH, json=body))["param"] == "background"
        assert (await client.post(PATH, json={"input": "x"})).status_code == 200


async def test_so_many_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.routes.stored_responses.MAX_BACKGROUND", 2)
    engine = engine_saying(LONG, **SLOW)
    async with served(engine) as (app, client):
        ids = [(await post(client, background=True))["id"] for _ in range(2)]
        refused = await client.post(PATH, json={"input": "x", "background": True})
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) > 0
        await client.post(f"{PATH}/{ids[0]}/cancel")
        await eventually(lambda: len(app.state.response_runs) == 1)
        ids[0] = (await post(client, background=True))["id"]
        for id in ids:
            await client.delete(f"{PATH}/{id}")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_one_key_leaves_the_others_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.routes.stored_responses.MAX_BACKGROUND", 4)
    body = {"input": "x", "background": True}
    engine = engine_saying(LONG, **SLOW)
    async with served(engine, api_key=("greedy", "modest")) as (app, client):

        async def statuses(key: str, count: int) -> list[int]:
            return [(await client.post(PATH, json=body, headers=bearer(key))).status_code for _ in range(count)]

        assert await statuses("greedy", 4) == [200, 200, 429, 429]
        assert await statuses("modest", 3) == [200, 200, 429]
        engine.pause_s = 0
        await eventually(lambda: not app.state.response_runs)
        assert await statuses("greedy", 1) == [200]
        await eventually(lambda: not app.state.response_runs)


async def test_it_is_a_request_of_its_key_until_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[a]\nsha256 = "{digest_of(b"sk-a").hex()}"\nmax_requests = 2\n')
    body = {"input": "x", "background": True}
    engine = engine_saying(LONG, **SLOW)
    async with served(engine, api_key_file=str(file)) as (app, client):
        client.headers.update(bearer("sk-a"))
        assert [(await client.post(PATH, json=body)).status_code for _ in range(3)] == [200, 200, 429]
        error_of(await client.post(PATH, json={"input": "x"}), 429)
        engine.pause_s = 0
        await eventually(lambda: not app.state.response_runs)
        assert (await client.post(PATH, json={"input": "x"})).status_code == 200
        await eventually(lambda: not app.state.response_runs)


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
        events = events_of(answer.text)  # as far as they were kept, and why not further
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "error"
        assert "without stream" in events[-1]["message"]
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


async def test_a_stream_without_room_for_its_first_events_is_refused() -> None:
    engine = engine_saying(LONG, **SLOW)
    async with served(engine, max_stored_bytes=60_000) as (app, client):
        held = [await post(client, input="x" * 8000, background=True) for _ in range(5)]
        error = error_of(await client.post(PATH, json={"input": "x", "background": True, "stream": True}), 429)
        assert error["code"] == "rate_limit_exceeded"
        for response in held:
            await client.delete(f"{PATH}/{response['id']}")
        await eventually(lambda: not app.state.response_runs._running)
        engine.pause_s = 0
        assert (await stream(client, background=True))[-1]["type"] in (*ENDS, "error")


async def test_many_at_once_leave_nothing() -> None:
    engine = engine_saying("some words", pause_s=0.001)
    async with served(engine) as (app, client):

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
        await eventually(
            lambda: app.state.response_runs._num_background.total() == 0
        )  # a deleted one ends a moment later


@pytest.mark.parametrize("end", ENDS)
async def test_every_end_is_polled(end: str) -> None:
    engine = engine_saying("a b c d e f")
    engine.fail_after = 2 if end == "response.failed" else None
    body = {"max_output_tokens": 3} if end == "response.incomplete" else {}
    async with served(engine) as (_, client):
        events = await stream(client, background=True, **body)
        assert events[-1]["type"] == end
        assert (await ended(client, events[0]["response"]["id"])) == events[-1]["response"]
