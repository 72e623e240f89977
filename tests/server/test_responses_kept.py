"""What is kept of responses: nobody else's, by no name that a client may choose, and never more than was sent."""

from __future__ import annotations

import tracemalloc
from typing import Any

import httpx
import orjson
import pytest

from server.response_store import Kept
from server.routes.responses import Given, _kept
from tests.server.agent_engine import AgentEngine, turn
from tests.server.fake_engine import FakeEngine
from tests.server.harness import client_of, error_of
from tests.server.test_responses import PATH, USER, WEATHER, engine_saying, post

LONG = {"max_model_len": 100_000}


def refer(id: str) -> dict[str, str]:
    return {"type": "item_reference", "id": id}


async def refused(client: httpx.AsyncClient, status: int = 400, **body: Any) -> dict[str, Any]:
    return error_of(await client.post(PATH, json=body), status)


def told(engine: FakeEngine) -> str:
    """The last prompt."""
    return engine.tokenizer.decode(engine.admitted[-1].prompts[0])


# -- whose ids ----------------------------------------------------------------------------------------------------


async def test_an_id_that_a_client_chose_is_found_by_no_other() -> None:
    async with client_of(engine_saying()) as client:
        mine = [USER | {"id": "msg_1", "content": "my secret"}, {"role": "user", "content": "and more"}]
        first = await post(client, input=mine)
        for path in (PATH, f"{PATH}/input_tokens"):
            assert error_of(await client.post(path, json={"input": [refer("msg_1")]}), 404)["param"] == "input[0].id"
        # another's item of that name is in nobody's way, and each is good in its own conversation
        other = await post(client, input=[USER | {"id": "msg_1", "content": "another word"}])
        for previous, word in ((first, "my secret"), (other, "another word")):
            second = await post(client, input=[refer("msg_1")], previous_response_id=previous["id"])
            listed = (await client.get(f"{PATH}/{second['id']}/input_items")).json()["data"]
            assert listed[0]["id"] == "msg_1"
            assert listed[0]["content"][0]["text"] == word
        await refused(client, 404, input=[refer("msg_1")])  # nor has the reference made it known


async def test_an_id_that_we_made_is_found() -> None:
    engine = engine_saying()
    async with client_of(engine) as client:
        first = await post(client, input="my word")
        given = (await client.get(f"{PATH}/{first['id']}/input_items")).json()["data"][0]["id"]
        second = await post(client, input=[refer(given), refer(first["output"][0]["id"]), USER])
        assert "my word" in told(engine)
        assert "blue" in told(engine)
        await client.delete(f"{PATH}/{first['id']}")
        await post(client, input=[refer(given), USER])  # the second response needs it and still has it
        assert "my word" in told(engine)
        copy = USER | {"id": given, "content": "a forgery"}
        forged = await post(client, input=[copy])
        await post(client, input=[refer(given), USER])
        assert "my word" in told(engine)
        await client.delete(f"{PATH}/{second['id']}")
        assert (await client.get(f"{PATH}/{forged['id']}")).status_code == 200


# -- whose keys ---------------------------------------------------------------------------------------------------


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("other", [bearer("key-2"), {"x-api-key": "key-2"}], ids=["bearer", "x-api-key"])
async def test_what_one_key_made_is_not_there_for_another(other: dict[str, str]) -> None:
    async with client_of(engine_saying(), api_key=["key-1", "key-2"]) as client:
        client.headers.update(bearer("key-1"))
        mine = await post(client, input="my secret")
        path, item = f"{PATH}/{mine['id']}", mine["output"][0]["id"]
        given = (await client.get(f"{path}/input_items")).json()["data"][0]["id"]
        del client.headers["authorization"]
        client.headers.update(other)
        for hidden in (client.get(path), client.get(f"{path}/input_items"), client.post(f"{path}/cancel"),
                       client.delete(path)):  # fmt: skip
            response = await hidden
            assert error_of(response, 404)["param"] == "response_id"
            assert "secret" not in response.text
        error = await refused(client, input="x", previous_response_id=mine["id"])
        assert error["code"] == "previous_response_not_found"
        for id in (item, given):
            await refused(client, 404, input=[USER, refer(id)])
        yours = await post(client)
        assert (await client.get(f"{PATH}/{yours['id']}")).json() == yours
        for name in other:
            del client.headers[name]
        for header in (bearer("key-1"), {"x-api-key": "key-1"}):  # the key counts, not how it is sent
            assert (await client.get(path, headers=header)).json() == mine


async def test_without_keys_all_are_one() -> None:
    async with client_of(engine_saying()) as client:
        mine = await post(client)
        for header in (bearer("anything"), {"x-api-key": "something"}):
            assert (await client.get(f"{PATH}/{mine['id']}", headers=header)).json() == mine


# -- how much -----------------------------------------------------------------------------------------------------


async def peak_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[httpx.Response, int]:
    """The answer, and the most bytes that it took."""
    data = orjson.dumps(body)
    tracemalloc.start()
    try:
        response = await client.post(path, content=data)
        return response, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("path", [PATH, f"{PATH}/input_tokens"])
async def test_references_amplify_nothing(path: str) -> None:
    large = "word " * 5000
    async with client_of(engine_saying(**LONG), max_body_size=1 << 20) as client:
        first = await post(client, input=[USER | {"content": [{"type": "input_text", "text": large}] * 2}])
        id = (await client.get(f"{PATH}/{first['id']}/input_items")).json()["data"][0]["id"]
        response, peak = await peak_of(client, path, {"input": [refer(id)] * 4000})  # 200 MB, if it were read
        error = error_of(response)
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
        assert peak < 8 << 20
        await post(client, input=[refer(id), USER])  # one of them is fine


async def test_a_history_counts_before_it_is_read() -> None:
    text = "word " * 300
    async with client_of(engine_saying(**LONG), max_body_size=8000) as client:
        previous = (await post(client, input=text))["id"]
        bodies = []
        for _ in range(8):
            body = {"input": text, "previous_response_id": previous, "truncation": "auto"}
            response = await client.post(PATH, json=body)
            bodies.append(response.status_code)
            if response.status_code != 200:
                break
            previous = response.json()["id"]
        error = error_of(response)
        assert (error["param"], error["code"]) == ("previous_response_id", "context_length_exceeded")
        assert bodies[:3] == [200] * 3
        listed = (await client.get(f"{PATH}/{previous}/input_items", params={"limit": 2})).json()
        assert listed["has_more"]


async def test_only_what_fits_and_is_stored_becomes_json(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []

    def counted(given: Given) -> Kept:
        kept.append(len(given.own))
        return _kept(given)

    monkeypatch.setattr("server.routes.responses._kept", counted)
    async with client_of(engine_saying(max_model_len=64)) as client:
        error = await refused(client, input="word " * 500)
        assert error["code"] == "context_length_exceeded"
        await post(client, store=False)
        await client.post(f"{PATH}/input_tokens", json={"input": "x"})
        assert kept == []
        await post(client)
        assert kept == [1]


async def test_pages_of_items_of_one_name_come_to_an_end() -> None:
    items = [USER | {"id": "x"}, USER | {"id": "y"}, USER | {"id": "x"}, USER | {"id": "z"}]
    async with client_of(engine_saying()) as client:
        first = await post(client, input=items)
        for order in ("asc", "desc"):
            query, seen = {"limit": "1", "order": order}, []
            for _ in range(len(items) + 1):
                page = (await client.get(f"{PATH}/{first['id']}/input_items", params=query)).json()
                seen += [item["id"] for item in page["data"]]
                if not page["has_more"]:
                    break
                query["after"] = page["last_id"]
            assert not page["has_more"]
            assert seen[0] == ("x" if order == "asc" else "z")


# -- tools --------------------------------------------------------------------------------------------------------


async def test_tools_are_counted_before_they_are_looked_at() -> None:
    foreign = [{"type": "web_search"}] * 600
    spaces = [{"type": "namespace", "name": f"n{k}", "tools": foreign} for k in range(2)]
    engine = AgentEngine([turn("Done.")])
    async with client_of(engine) as client:
        for tools in (foreign * 2, spaces):
            assert (await refused(client, input="x", tools=tools))["param"] == "tools"
        more = {"type": "additional_tools", "tools": foreign}
        assert (await refused(client, input=[USER, more, more]))["param"] == "tools"
        error = await refused(client, input="x", tools=[{"type": "namespace", "name": "n", "tools": [{"type": [1]}]}])
        assert error["param"] == "tools[0].tools[0].type"
        await post(client, tools=foreign)


async def test_the_name_of_a_namespace_is_short() -> None:
    tools = [WEATHER | {"name": f"f{k}"} for k in range(1000)]
    space = {"type": "namespace", "name": "n" * 100_000, "tools": tools}  # 100 MB of names
    async with client_of(AgentEngine([turn("Done.")])) as client:
        response, peak = await peak_of(client, PATH, {"input": "x", "tools": [space]})
        assert error_of(response)["param"] == "tools[0].name"
        assert peak < 8 << 20
