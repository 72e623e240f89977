"""Fields that nobody reads are named in a header, logged once, and refused by a strict server."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from server.protocol import parsing
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import client_of, error_of

TOKENIZER = small_tokenizer()
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "a"}
HEADER = "x-pagemill-ignored"


def engine() -> FakeEngine:
    return FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER)


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (CHAT, {"messages": [USER], "temprature": 1}, "temprature"),
        (CHAT, {"messages": [USER | {"mood": 1}, USER | {"mood": 2}]}, "messages[].mood"),
        (CHAT, {"messages": [USER], "user": "u", "store": True, "metadata": {"a": "b"}}, "user, store, metadata"),
        (CHAT, {"messages": [USER], "stream_options": {"include_obfuscation": True}, "stream": True},
         "stream_options.include_obfuscation"),
        (CHAT, {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]},
         "messages[].content[].cache_control"),
        (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "odd": 1}}]},
         "tools[].function.odd"),
        (COMPLETIONS, {"prompt": "a", "prompt_cache_key": "k", "stream": True}, "prompt_cache_key"),
        (COMPLETIONS, {"prompt": "a", "x\r\ny: é": 1}, "x??y:??"),
        ("/tokenize", {"prompt": "a", "odd": 1}, "odd"),
        ("/detokenize", {"tokens": [1], "odd": 1}, "odd"),
    ],
)  # fmt: skip
async def test_ignored_fields_are_named(path: str, body: dict[str, Any], names: str) -> None:
    async with client_of(engine()) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == names


async def test_nulls_and_known_fields_are_not_named() -> None:
    async with client_of(engine()) as client:
        for body in ({"messages": [USER], "odd": None, "user": None}, {"messages": [USER], "temperature": 0}):
            assert HEADER not in (await client.post(CHAT, json=body)).headers


async def test_a_name_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagemill.server"):
        async with client_of(engine()) as client:
            for _ in range(3):
                await client.post(CHAT, json={"messages": [USER], "odd": 1, "user": "u"})
    told = [record.fields["field"] for record in caplog.records if "ignored" in record.message]
    assert told == ["odd", "user"]


async def test_many_names_are_bounded() -> None:
    async with client_of(engine()) as client:
        response = await client.post(CHAT, json={"messages": [USER]} | {f"f{k:03}" * 50: 1 for k in range(500)})
    *shown, more = response.headers[HEADER].split(", ")
    assert len(response.headers[HEADER]) < 1024
    assert more == f"and {500 - len(shown)} more"
    assert shown[0] == ("f000" * 50)[:64]


@pytest.mark.parametrize("place", ["body", "message", "part", "tool"])
async def test_an_object_has_so_many_fields(place: str) -> None:
    odd = {f"f{k}": 1 for k in range(1025)}
    part: dict[str, Any] = {"type": "text", "text": "a"}
    message: dict[str, Any] = {"role": "user", "content": [part]}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
    body: dict[str, Any] = {"messages": [message], "tools": [tool]}
    {"body": body, "message": message, "part": part, "tool": tool}[place].update(odd)
    async with client_of(engine()) as client:
        error = error_of(await client.post(CHAT, json=body))
    assert "at most 1024" in error["message"]
    params = {"body": None, "message": "messages[0]", "part": "messages[0].content", "tool": "tools[0]"}
    assert error["param"] == params[place]


async def test_names_are_counted_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "MAX_NAMES", 20)
    text = USER | {"content": "12:34:56 " * 50}
    async with client_of(engine()) as client:
        assert (await client.post(CHAT, json={"messages": [text]})).status_code == 200
        names = ",".join(f'"a{k}" \t:1' for k in range(30))
        error = error_of(await client.post(CHAT, content='{"messages": [], "odd": {' + names + "}}"))
    assert error["message"] == "The body has 32 fields: at most 20 are read."


async def test_nameless_fields_leave_no_gap() -> None:
    async with client_of(engine()) as client:
        response = await client.post(CHAT, json={"messages": [USER], "": 1, "odd": 2})
    assert response.headers[HEADER] == "?, odd"


async def test_loose_objects_are_looked_into() -> None:
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True, "description": "d", "stict": False}
    body = {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": schema, "odd": 1}}
    names = "response_format.json_schema.description, response_format.json_schema.stict, response_format.odd"
    async with client_of(engine()) as client:
        assert (await client.post(CHAT, json=body)).headers[HEADER] == names
    async with client_of(engine(), strict_fields=True) as client:
        error = error_of(await client.post(CHAT, json=body))
        assert error["param"] == "response_format.json_schema.stict"
        assert 'Did you mean "strict"?' in error["message"]
        del schema["stict"], body["response_format"]["odd"]  # type: ignore[attr-defined]
        assert (await client.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "text", "scheme": 1}}}, "text.format.scheme"),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5, "output_config": {
            "format": {"type": "json_schema", "schema": {}, "scheme": 1}}}, "output_config.format.scheme"),
    ],
)  # fmt: skip
async def test_the_formats_of_other_dialects_are_looked_into(path: str, body: Any, field: str) -> None:
    async with client_of(engine()) as client:
        assert (await client.post(path, json=body)).headers[HEADER] == field
    async with client_of(engine(), strict_fields=True) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400
    assert f'Unknown parameter: "{field}". Did you mean "schema"?' in response.text.replace("\\", "")


FUNCTION = {"name": "f", "parameters": {"type": "object"}, "strict": True}
STRICT_TOOLS = [
    (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]}, "required"),
    ("/v1/responses", {"input": "a", "tools": [{"type": "function", **FUNCTION}]}, "required"),
    ("/v1/messages", {"messages": [USER], "max_tokens": 5, "tools": [
        {"name": "f", "input_schema": {"type": "object"}, "strict": True}]}, {"type": "any"}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "force"), STRICT_TOOLS)
async def test_a_strict_tool_that_is_not_forced_is_named(path: str, body: dict[str, Any], force: Any) -> None:
    async with client_of(engine()) as client:
        free = await client.post(path, json=body)
        forced = await client.post(path, json=body | {"tool_choice": force})
    assert free.status_code == forced.status_code == 200
    assert free.headers[HEADER] == "tools.strict"
    assert HEADER not in forced.headers


async def test_a_grammar_that_is_only_told_is_named() -> None:
    tool = {
        "type": "custom",
        "custom": {
            "name": "sh",
            "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "ls [a-z]+"}},
        },
    }
    async with client_of(engine()) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": [USER], "tools": [tool]})
    assert answer.status_code == 200
    assert answer.headers[HEADER] == "tools.format"


@pytest.mark.parametrize(
    ("path", "body", "param", "near"),
    [
        (CHAT, {"messages": [USER], "temprature": 1}, "temprature", '"temperature"'),
        (CHAT, {"messages": [USER, USER | {"contents": 1}]}, "messages[1].contents", '"content"'),
        (CHAT, {"messages": [USER], "stream": True, "stream_options": {"include_usages": True}},
         "stream_options.include_usages", '"include_usage"'),
        (COMPLETIONS, {"prompt": "a", "maxTokens": 1}, "maxTokens", '"max_tokens"'),
        (COMPLETIONS, {"prompt": "a", "zzz": 1}, "zzz", None),
        ("/tokenize", {"prompt": "a", "promt": 1}, "promt", '"prompt"'),
    ],
)  # fmt: skip
async def test_a_strict_server_refuses_unknown_fields(path: str, body: Any, param: str, near: str | None) -> None:
    served = engine()
    async with client_of(served, strict_fields=True) as client:
        error = error_of(await client.post(path, json=body))
    assert (error["param"], error["code"]) == (param, "unknown_parameter")
    assert (near in error["message"]) if near else ("Did you mean" not in error["message"])
    assert served.admitted == []


async def test_a_strict_server_takes_hints() -> None:
    body = {"messages": [USER], "user": "u", "prompt_cache_key": "k", "service_tier": "auto", "odd": None}
    async with client_of(engine(), strict_fields=True) as client:
        response = await client.post(CHAT, json=body)
    assert response.status_code == 200
    assert response.headers[HEADER] == "user, prompt_cache_key, service_tier"


async def test_answers_name_the_request() -> None:
    async with client_of(engine()) as client:
        for path, body in ((CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "a"})):
            response = await client.post(path, json=body)
            assert response.headers["x-request-id"] == response.json()["id"]
            named = await client.post(path, json=body, headers={"x-request-id": "mine"})
            assert named.headers["x-request-id"] == "mine"
            streamed = await client.post(path, json=body | {"stream": True})
            assert f'"id":"{streamed.headers["x-request-id"]}"' in streamed.text
