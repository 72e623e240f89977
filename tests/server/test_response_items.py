"""Items of /v1/responses: what clients send, as it is kept, and as messages for the template."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from server.protocol.errors import ApiError
from server.protocol.response_items import Reader, cut, cuts, references, seal, to_messages, unseal

LISTED: TypeAdapter[Any] = TypeAdapter(ResponseItem)
CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "12 C"}
CUSTOM = {"type": "custom_tool_call", "call_id": "call_2", "name": "p", "input": 'say "hi"\n'}
CUSTOM_OUTPUT = {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
USER = {"role": "user", "content": "hi"}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def messages(items: Any) -> list[dict[str, Any]]:
    return to_messages(Reader({}).read(items))


def test_a_string_is_the_users() -> None:
    assert messages("hi") == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "content",
    [
        "hi",
        [{"type": "input_text", "text": "hi"}],
        [{"type": "text", "text": "hi"}],
        [{"type": "output_text", "text": "hi"}],
        [{"type": "refusal", "refusal": "hi"}],
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant"])
def test_messages(role: str, content: Any) -> None:
    assert messages([{"role": role, "content": content}]) == [{"role": role, "content": "hi"}]
    assert messages([{"type": "message", "role": role, "content": content, "phase": "commentary"}])[0]["role"] == role


def test_a_turn_becomes_one_message_again() -> None:
    turn = [THOUGHT, said("Let me see."), CALL, CUSTOM]
    got = messages([USER, *turn, OUTPUT, CUSTOM_OUTPUT, said("12 degrees."), USER])
    assert [message["role"] for message in got] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    spoke = got[1]
    assert spoke["reasoning_content"] == "hm"
    assert spoke["content"] == "Let me see."
    assert [call["id"] for call in spoke["tool_calls"]] == ["call_1", "call_2"]
    assert spoke["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert spoke["tool_calls"][1]["custom"] == {"name": "p", "input": 'say "hi"\n'}
    assert got[2] == {"role": "tool", "tool_call_id": "call_1", "content": "12 C"}


def test_where_a_new_turn_begins() -> None:
    assert [m.get("content") for m in messages([said("a"), said("b")])] == ["a", "b"]
    thought_again = messages([THOUGHT, CALL, THOUGHT, said("b")])
    assert [sorted(message) for message in thought_again] == [
        ["reasoning_content", "role", "tool_calls"],
        ["content", "reasoning_content", "role"],
    ]
    assert len(messages([CALL, said("then")])) == 1


def test_namespaces_are_flattened() -> None:
    got = messages([CALL | {"namespace": "files", "name": "read"}])
    assert got[0]["tool_calls"][0]["function"]["name"] == "files__read"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a"}], "summary": []}, "a"),
        ({"content": None, "summary": [{"type": "summary_text", "text": "s"}]}, "s"),
        ({"summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": seal("whole ü")}, "whole ü"),
        ({"summary": [], "encrypted_content": "gAAAAnotours"}, None),
        ({"summary": [], "encrypted_content": "pagemill:!!!"}, None),
        ({"summary": []}, None),
    ],
)
def test_thinking_comes_back(fields: dict[str, Any], text: str | None) -> None:
    got = messages([USER, {"type": "reasoning", "id": "rs"} | fields, said("x")])
    assert got[1].get("reasoning_content") == text
    assert len(messages([USER, {"type": "reasoning", "id": "rs"} | fields])) == (1 if text is None else 2)


def test_seal() -> None:
    assert unseal(seal("thinking 😀")) == "thinking 😀"
    assert unseal(None) == unseal("pagemill:\udcff") == ""


def test_items_are_kept_as_the_sdk_lists_them() -> None:
    given = [
        USER,
        {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        said("x"),
        THOUGHT,
        CALL,
        OUTPUT,
        CUSTOM,
        CUSTOM_OUTPUT | {"output": [{"type": "input_text", "text": "o"}]},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "c"}]},
    ]
    kept = Reader({}).read(given)
    for item in kept:
        assert LISTED.validate_python(item).id
    assert kept[2]["id"] == "msg_1"
    assert len({item["id"] for item in kept}) == len(kept)
    assert Reader({}).read(kept) == kept  # what is listed may be sent again
    assert to_messages(kept) == messages(kept)


def test_ids_of_the_clients_are_told_from_ours() -> None:
    reader = Reader({})
    items = reader.read([USER | {"id": "mine"}, USER, CALL | {"id": "x" * 500}, OUTPUT | {"id": "out"}, said("x")])
    assert reader.chosen == {"mine", "out", "msg_1"}
    assert len({item["id"] for item in items} - reader.chosen) == 2


def test_what_cannot_be_used_is_named() -> None:
    reader = Reader({})
    items = reader.read([USER, {"type": "web_search_call", "id": "ws", "status": "completed"}, said("x")])
    assert len(items) == 2
    assert reader.dropped == ["input.web_search_call"]


def test_thoughts_of_one_turn_are_joined_as_those_of_one_item() -> None:
    thoughts = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in "abc"]
    parts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text} for text in "abc"]}
    assert messages([USER, *thoughts, said("x")]) == messages([USER, parts, said("x")])
    assert messages([USER, parts, said("x")])[1]["reasoning_content"] == "a\nb\nc"


def test_references() -> None:
    given = [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_2"}, USER, CALL | {"id": "fc"}, {"id": "msg_2"}]
    assert references(given) == ["msg_1", "msg_2", "msg_2"]
    assert references([{"type": "item_reference", "role": "user", "id": "msg_1"}]) == ["msg_1"]  # as it is read
    assert references("msg_1") == []
    kept = said("kept")
    assert Reader({"msg_1": kept}).read([given[0]]) == [kept]
    with pytest.raises(ApiError) as missing:
        Reader({}).read(given)
    assert (missing.value.status, missing.value.param) == (404, "input[0].id")


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (5, "input[0]"),
        ({}, "input[0].id"),
        ({"type": 5}, "input[0].type"),
        ({"type": "banana"}, "input[0].type"),
        ({"type": "compaction", "encrypted_content": "x"}, "input[0].type"),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": 5}, "input[0].content"),
        ({"role": "user", "content": ["x"]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "input[0].content[0]",
        ),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "input[0].name"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "input[0].arguments"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "input[0].arguments"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input[0].input"),
        ({"type": "function_call_output", "call_id": "c"}, "input[0].output"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
        ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}, "input[0].output[0]"),
        ({"type": "reasoning", "summary": [5]}, "input[0].summary[0]"),
        ({"type": "additional_tools", "tools": 5}, "input[0].tools"),
    ],
)
def test_refused_items(item: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        Reader({}).read([item])
    assert refused.value.param == param


def test_cuts() -> None:
    items = Reader({}).read([{"role": "developer", "content": "d"}, USER, CALL, OUTPUT, USER, said("x"), USER])
    assert cuts(items) == [4, 6]
    assert [item.get("role") for item in cut(items, 4)] == ["developer", "user", "assistant", "user"]
