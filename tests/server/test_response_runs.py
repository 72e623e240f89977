"""Responses that run on a connection of their own: found by their id, cancelled, deleted."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from engine.stream import GenerationStream
from tests.server.agent_engine import AgentEngine, turn
from tests.server.fake_engine import FakeEngine
from tests.server.harness import error_of, eventually
from tests.server.responses_harness import check, events_of
from tests.server.runs_harness import LONG, SLOW, Connection, running, said, served
from tests.server.test_responses import PATH, TOOLS, engine_saying, items_of, post, stream, text_of


class Silent(FakeEngine):
    """Never comes to its first token."""

    async def _run(self, stream: GenerationStream, *_: object) -> None:
        await eventually(lambda: stream.ended)


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


async def test_a_stream_that_fails_is_kept() -> None:
    engine = engine_saying()
    engine.fail_after = 4
    async with served(engine) as (_, client):
        last = (await stream(client))[-1]["response"]
        assert last["status"] == "failed"
        assert (await client.get(f"{PATH}/{last['id']}")).json() == last
        error_of(await client.post(PATH, json={"input": "x"}), 500)
