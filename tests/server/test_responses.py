"""/v1/responses over a fake engine: requests, answers, the store."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseItemList

from tests.server.agent_engine import AgentEngine, turn
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import client_of, error_of
from tests.server.responses_harness import check, events_of

PATH = "/v1/responses"
USER = {"role": "user", "content": "Name a colour."}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
PATCH = {"type": "custom", "name": "apply_patch"}
FILES = {"type": "namespace", "name": "files", "description": "d", "tools": [WEATHER | {"name": "read"}]}
TOOLS = [WEATHER, PATCH, FILES, {"type": "web_search"}]
EVERYTHING = turn(
    "I look.",
    thinking="Hm.",
    calls=[("weather", {"city": "Rom"}), ("apply_patch", {"input": "+ \"x\"\n"}), ("files__read", {"city": "a"})],
)  # fmt: skip


def engine_saying(text: str = "blue é😀", **options: Any) -> FakeEngine:
    tokenizer = small_tokenizer()
    return FakeEngine(says(text, tokenizer), tokenizer=tokenizer, **options)


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={"input": "Name a colour."} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Response.model_validate(answer)
    return answer


async def stream(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(PATH, json={"input": "Name a colour.", "stream": True} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def text_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )


def items_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    """Without the ids, which differ from answer to answer."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]


# -- answers ------------------------------------------------------------------------------------------------------


async def test_a_plain_answer() -> None:
    engine = engine_saying()
    async with client_of(engine) as client:
        answer = await post(client, model="fake-model", instructions="Be brief.", metadata={"a": "b"}, user="u")
    assert answer["object"] == "response"
    assert answer["status"] == "completed"
    assert text_of(answer) == "blue é😀"
    assert answer["metadata"] == {"a": "b"}
    assert answer["user"] == "u"
    assert answer["instructions"] == "Be brief."
    assert (answer["error"], answer["incomplete_details"]) == (None, None)
    prompt = engine.tokenizer.decode(engine.admitted[0].prompts[0], skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n"
    )
    usage = answer["usage"]
    assert usage["input_tokens"] == len(engine.admitted[0].prompts[0])
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert engine.admitted[0].params.max_tokens is None


@pytest.mark.parametrize("seed", range(6))
async def test_streamed_and_plain_are_equal(seed: int) -> None:
    engine = AgentEngine([EVERYTHING], splits=random.Random(seed))
    async with client_of(engine) as client:
        plain = await post(client, tools=TOOLS)
        final = check(await stream(client, tools=TOOLS))
    assert items_of(final) == items_of(plain)
    assert [item["type"] for item in final["output"]] == [
        "reasoning", "message", "function_call", "custom_tool_call", "function_call",
    ]  # fmt: skip
    assert final["output"][3]["input"] == '+ "x"\n'
    assert (final["output"][4]["namespace"], final["output"][4]["name"]) == ("files", "read")
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert plain["usage"]["output_tokens"] == final["usage"]["output_tokens"]


async def test_headers() -> None:
    async with client_of(AgentEngine(["x"])) as client:
        body = {
            "input": [USER, {"type": "web_search_call", "id": "ws", "status": "completed"}],
            "tools": TOOLS,
            "prompt_cache_key": "k",
            "client_metadata": {"a": 1},
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"verbosity": "low"},
            "include": ["reasoning.encrypted_content", "file_search_call.results"],
            "nonsense": 1,
        }
        response = await client.post(PATH, json=body)
    ignored = set(response.headers["x-pagemill-ignored"].split(", "))
    assert ignored >= {
        "tools.web_search", "input.web_search_call", "prompt_cache_key", "client_metadata", "reasoning.summary",
        "text.verbosity", "include.file_search_call.results", "nonsense",
    }  # fmt: skip
    answer = response.json()
    assert response.headers["x-request-id"] == answer["id"]
    assert answer["prompt_cache_key"] == "k"
    assert answer["text"]["verbosity"] == "low"
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    assert [tool["type"] for tool in answer["tools"]] == ["function", "custom", "namespace"]


async def test_a_strict_server() -> None:
    async with client_of(engine_saying(), strict_fields=True) as client:
        error = error_of(await client.post(PATH, json={"input": "x", "reasoning": {"efort": "low"}}))
        await post(client, prompt_cache_key="k", reasoning={"summary": "auto"}, client_metadata={})
    assert error["param"] == "reasoning.efort"
    assert "effort" in error["message"]


async def test_the_limit_of_tokens() -> None:
    async with client_of(engine_saying("a long answer")) as client:
        plain = await post(client, max_output_tokens=3)
        final = check(await stream(client, max_output_tokens=3))
    for answer in (plain, final):
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["output"][0]["status"] == "incomplete"
        assert answer["usage"]["output_tokens"] == 3


async def test_logprobs() -> None:
    wanted = ["message.output_text.logprobs"]
    async with client_of(engine_saying("abc")) as client:
        none = await post(client)
        some = await post(client, top_logprobs=2)
        chosen = await post(client, include=wanted)
        events = await stream(client, top_logprobs=2, include=wanted)
    assert none["output"][0]["content"][0]["logprobs"] == []
    entries = some["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries][:3] == ["a", "b", "c"]
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    assert len(chosen["output"][0]["content"][0]["logprobs"]) == len(entries)
    assert check(events)["output"][0]["content"][0]["logprobs"] == entries


async def test_a_failure_in_mid_stream() -> None:
    engine = engine_saying("a long answer")
    engine.fail_after = 3
    async with client_of(engine) as client:
        events = await stream(client)
        error_of(await client.post(PATH, json={"input": "x"}), 500)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert "secret" not in str(events)


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "json_object"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}}, "json"),
        ({"text": {"format": {"type": "text"}}}, None),
        ({"tools": [WEATHER], "tool_choice": "required"}, "lark"),
        ({"tools": [WEATHER, PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}}, "lark"),
        ({"tools": [WEATHER], "tool_choice": "auto"}, None),
    ],
)
async def test_forms(fields: dict[str, Any], params: str | None) -> None:
    engine = AgentEngine(["{}"])
    async with client_of(engine) as client:
        await client.post(PATH, json={"input": "x"} | fields)
    structured = engine.admitted[0].params.structured
    assert (structured.kind if structured is not None else None) == params


# -- requests that are refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [USER] * 4097}, "input"),
        ({"background": True, "store": False}, "store"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"truncation": "some"}, "truncation"),
        ({"metadata": {str(k): "v" for k in range(17)}}, "metadata"),
        ({"metadata": {"k": 5}}, "metadata.k"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"bad": 1}}}}, "text.format"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER | {"name": "x" * 300}]}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_refused(fields: dict[str, Any], param: str, streamed: bool) -> None:
    engine = engine_saying()
    if streamed and "stream_options" in fields:
        return
    async with client_of(engine) as client:
        error = error_of(await client.post(PATH, json={"input": "x", "stream": streamed} | fields))
    assert error["param"] is not None
    assert error["param"].startswith(param)
    assert error["type"] == "invalid_request_error"
    assert engine.admitted == []


async def test_unknown_model_and_too_long() -> None:
    async with client_of(engine_saying(max_model_len=64)) as client:
        error = error_of(await client.post(PATH, json={"input": "x", "model": "other"}), 404)
        long = error_of(await client.post(PATH, json={"input": "word " * 40}))
    assert error["code"] == "model_not_found"
    assert (long["code"], long["param"]) == ("context_length_exceeded", "input")


async def test_the_context_cuts_what_is_too_much() -> None:
    engine = engine_saying("x" * 100, max_model_len=64)
    async with client_of(engine) as client:
        answer = await post(client, input="x", max_output_tokens=32000)
    assert answer["status"] == "incomplete"
    assert answer["max_output_tokens"] == 32000
    assert answer["usage"]["total_tokens"] == 64


async def test_truncation_drops_the_oldest_turns() -> None:
    engine = engine_saying("ok", max_model_len=200)
    turns = [item for k in range(20) for item in ({"role": "user", "content": f"question {k}"}, said(f"answer {k}"))]
    items = [{"role": "developer", "content": "keep me"}, *turns, {"role": "user", "content": "last"}]
    async with client_of(engine) as client:
        error_of(await client.post(PATH, json={"input": items}))
        await post(client, input=items, truncation="auto", max_output_tokens=8)
        hopeless = error_of(await client.post(PATH, json={"input": "word " * 99, "truncation": "auto"}))
    prompt = engine.tokenizer.decode(engine.admitted[0].prompts[0])
    assert prompt.startswith("system\nkeep me")
    assert prompt.endswith("last\nassistant\n")
    assert "question 0\n" not in prompt
    assert "question 19\n" in prompt
    room = 200 - len(engine.admitted[0].prompts[0])
    assert 8 <= room < 8 + 60  # one more turn would not have fitted
    assert hopeless["code"] == "context_length_exceeded"


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "output_text", "text": text}]}


# -- earlier responses --------------------------------------------------------------------------------------------


async def test_a_conversation_by_id_equals_one_sent_whole() -> None:
    call = turn(thinking="Hm.", calls=[("apply_patch", {"input": "+x"})])
    prompts = []
    for by_id in (True, False):
        engine = AgentEngine([call, turn("Done.")])
        async with client_of(engine) as client:
            first = await post(client, input=[USER], tools=TOOLS, store=by_id)
            output = {"type": "custom_tool_call_output", "call_id": first["output"][-1]["call_id"], "output": "ok"}
            if by_id:
                second = await post(client, input=[output], tools=TOOLS, previous_response_id=first["id"])
                assert second["previous_response_id"] == first["id"]
            else:
                second = await post(client, input=[USER, *first["output"], output], tools=TOOLS, store=False)
            assert text_of(second) == "Done."
        prompts.append(engine.admitted[1].prompts[0])
        said_so_far = (*engine.admitted[0].prompts[0], *engine.tokenizer.encode(call, add_special_tokens=False))
        assert engine.admitted[1].prompts[0][: len(said_so_far)] == said_so_far  # nothing of it is computed again
    assert prompts[0] == prompts[1]


async def test_stored_responses() -> None:
    async with client_of(engine_saying()) as client:
        answer = await post(client)
        path = f"{PATH}/{answer['id']}"
        assert (await client.get(path)).json() == answer
        assert (await client.get(path, params={"stream": "true"})).status_code == 400
        error_of(await client.post(f"{path}/cancel"))
        streamed = check(await stream(client))
        assert (await client.get(f"{PATH}/{streamed['id']}")).json() == streamed
        deleted = (await client.delete(path)).json()
        assert deleted == {"id": answer["id"], "object": "response", "deleted": True}
        for gone in (client.get(path), client.delete(path), client.post(f"{path}/cancel"),
                     client.get(f"{path}/input_items")):  # fmt: skip
            assert error_of(await gone, 404)["param"] == "response_id"
        private = await post(client, store=False)
        error_of(await client.get(f"{PATH}/{private['id']}"), 404)
        assert private["store"] is False


async def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_of(engine_saying(), max_stored_bytes=0) as client:
        error_of(await client.get(f"{PATH}/{(await post(client))['id']}"), 404)
    monkeypatch.setattr("server.routes.stored_responses.MAX_RESPONSES", 2)
    async with client_of(engine_saying()) as client:
        ids = [(await post(client))["id"] for _ in range(3)]
        assert [(await client.get(f"{PATH}/{id}")).status_code for id in ids] == [404, 200, 200]


async def test_input_items() -> None:
    async with client_of(engine_saying()) as client:
        first = await post(client, input=[USER, said("x"), {"role": "user", "content": "y"}])
        second = await post(client, input="z", previous_response_id=first["id"])
        path = f"{PATH}/{second['id']}/input_items"
        whole = (await client.get(path, params={"order": "asc"})).json()
        ResponseItemList.model_validate(whole)
        assert [item["role"] for item in whole["data"]] == ["user", "assistant", "user", "assistant", "user"]
        assert not whole["has_more"]
        newest = (await client.get(path, params={"limit": 2})).json()
        assert newest["data"] == whole["data"][:2:-1]
        assert newest["has_more"]
        rest = (await client.get(path, params={"limit": 5, "after": newest["last_id"]})).json()
        assert rest["data"] == whole["data"][2::-1]
        for bad in (
            {"limit": 0},
            {"limit": 101},
            {"limit": "x"},
            {"limit": ""},
            {"order": "up"},
            {"after": "nothing"},
        ):
            assert error_of(await client.get(path, params=bad))["param"] == next(iter(bad))


async def test_item_references() -> None:
    engine = engine_saying()
    async with client_of(engine) as client:
        first = await post(client)
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        await post(client, input=[USER, reference, {"role": "user", "content": "again"}])
        assert error_of(await client.post(PATH, json={"input": [USER, reference | {"id": "msg_no"}]}), 404)
    assert "blue é😀" in engine.tokenizer.decode(engine.admitted[1].prompts[0])


async def test_input_tokens() -> None:
    engine = engine_saying()
    async with client_of(engine) as client:
        counted = (await client.post(f"{PATH}/input_tokens", json={"input": "Name a colour."})).json()
        answer = await post(client)
    assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}
    assert len(engine.admitted) == 1


async def test_input_tokens_of_what_is_too_long() -> None:
    async with client_of(engine_saying(max_model_len=64)) as client:
        body = {"input": [USER] * 12, "tools": [{"type": "web_search"}]}
        assert error_of(await client.post(PATH, json=body))["code"] == "context_length_exceeded"
        counted = await client.post(f"{PATH}/input_tokens", json=body)
        assert counted.json()["input_tokens"] > 64
        assert counted.headers["x-pagemill-ignored"] == "tools.web_search"
        cut = await client.post(f"{PATH}/input_tokens", json=body | {"truncation": "auto"})
        assert 0 < cut.json()["input_tokens"] <= 64  # of what the model would be given


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([USER] * 5000, "input must have at most 4096 items, got 5000."),
        (5, "input must be a string or an array, got 5."),
        ({}, "input must be a string or an array, got an object."),
    ],
    ids=["too many", "number", "object"],
)
async def test_odd_inputs(given: Any, told: str) -> None:
    async with client_of(engine_saying()) as client:
        error = error_of(await client.post(PATH, json={"input": given}))
        assert (error["message"], error["param"]) == (told, "input")


async def test_what_is_refused_is_called_as_the_client_spelled_it() -> None:
    async with client_of(engine_saying()) as client:
        for name in ("max_tokens", "n", "conversation"):
            error = error_of(await client.post(PATH, json={"input": "x", name: 7}))
            assert error["param"] == name
            assert error["message"].startswith(name)
