"""/v1/chat/completions over a fake engine."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.protocol.chat import ChatRequest
from server.protocol.parsing import Limits
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import client_of, error_of, stream

PATH = "/v1/chat/completions"
TOKENIZER = small_tokenizer()
USER = {"role": "user", "content": "Name a colour."}


def engine_saying(text: str = "blue é😀", **options: Any) -> FakeEngine:
    return FakeEngine(says(text, TOKENIZER), tokenizer=TOKENIZER, **options)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 3),
    stop=st.sampled_from([None, "é", ["lu", "zz"]]),
    max_tokens=st.sampled_from([None, 1, 5, 40]),
    logprobs=st.booleans(),
)
async def test_stream_equals_plain(seed: int, logprobs: bool, **fields: Any) -> None:
    body: dict[str, Any] = {"messages": [USER], "logprobs": logprobs, **fields}
    body |= {"top_logprobs": 2} if logprobs else {}
    async with client_of(engine_saying(splits=random.Random(seed))) as client:
        plain = (await client.post(PATH, json=body)).json()
        events = await stream(client, PATH, body | {"stream_options": {"include_usage": True}})
    for choice in plain["choices"]:
        index = choice["index"]
        assert events.text(index) == choice["message"]["content"]
        assert events.finish(index) == choice["finish_reason"]
        roles = [k for k, c in enumerate(events.choices(index)) if "role" in c["delta"]]
        assert roles == [0]
        if logprobs:
            streamed = [e for c in events.choices(index) if c["logprobs"] for e in c["logprobs"]["content"]]
            assert streamed == choice["logprobs"]["content"]
    assert events.usage == plain["usage"]
    assert {chunk["object"] for chunk in events.chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in events.chunks}) == 1


async def test_plain_answer() -> None:
    engine = engine_saying()
    async with client_of(engine) as client:
        answer = (await client.post(PATH, json={"model": "fake-model", "messages": [USER]})).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "blue é😀", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    rendered = "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n"
    wanted = TOKENIZER.encode(rendered, add_special_tokens=False, allow_special=True)
    assert list(engine.admitted[0].prompts[0]) == wanted
    assert answer["usage"]["prompt_tokens"] == len(wanted)
    assert engine.admitted[0].params.max_tokens is None


async def test_logprob_bytes_join_to_the_text() -> None:
    async with client_of(engine_saying()) as client:
        body = {"messages": [USER], "logprobs": True, "top_logprobs": 2, "max_tokens": 9}
        choice = (await client.post(PATH, json=body)).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    raw = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert raw.decode("utf-8", "replace") == choice["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


async def test_text_parts_are_the_string() -> None:
    engine = engine_saying()
    part = {"type": "text", "text": "Name a colour."}
    async with client_of(engine) as client:
        for content in ("Name a colour.", [part], [part, part]):
            response = await client.post(PATH, json={"messages": [{"role": "user", "content": content}]})
            assert response.status_code == 200
    one, same, two = (admitted.prompts for admitted in engine.admitted)
    assert one == same
    assert TOKENIZER.decode(two[0]).count("Name a colour.") == 2


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SEARCH = {"type": "web_search", "search_context_size": "low"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}],
        [USER, {"role": "assistant", "content": ""}, USER],
        [{"role": "system", "content": ""}, USER],
        [{"role": "developer", "content": "d"}, USER],
        [USER, USER],
        [{"role": "assistant", "content": "A"}],
        [{"role": "tool", "content": "x", "tool_call_id": "c"}],
        [USER | {"name": None, "tool_calls": None}],
        [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "12 C"}],
        [USER, {"role": "assistant", "tool_calls": [CALL]}],
        [USER, {"role": "assistant", "content": "x", "tool_calls": []}, USER],
        *(
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": broken}}]}]
            for broken in ("{", "", "null", "[1]", None, {"a": 1}, 5)
        ),
    ],
)
async def test_served_messages(messages: list[Any]) -> None:
    async with client_of(engine_saying()) as client:
        response = await client.post(PATH, json={"messages": messages})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([USER, None], "messages[1]"),
        ([USER, "x"], "messages[1]"),
        ([{"content": "no role"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "banana", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": {"a": 1}}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "nonsense", "text": "x"}]}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content"),
        ([{"role": "user", "content": ["plain"]}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a"}}]}],
            "messages[0].content",
        ),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0].content"),
    ],
)
async def test_refused_messages(messages: Any, param: str) -> None:
    engine = engine_saying()
    async with client_of(engine) as client:
        error = error_of(await client.post(PATH, json={"messages": messages}))
    assert error["param"] == param
    assert engine.admitted == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [5]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL, SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"hello": 5}}, "logit_bias"),
    ],
)
async def test_refused_fields(fields: dict[str, Any], param: str) -> None:
    engine = engine_saying()
    async with client_of(engine) as client:
        error = error_of(await client.post(PATH, json={"messages": [USER]} | fields))
    assert error["param"] == param
    assert engine.admitted == []


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u-1", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x"},
        {"prompt_cache_key": "k", "modalities": ["text"], "response_format": {"type": "text"}, "verbosity": "low"},
        {"parallel_tool_calls": False, "reasoning_effort": "low", "tools": [], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
        {"tools": [SEARCH, TOOL]},
        {"response_format": {"type": "json_object"}},
        {"chat_template_kwargs": {"enable_thinking": False, "odd": None}, "reasoning_effort": "none"},
        {"no_such_field": 1, "metadata": {"deep": [[[[[[1]]]]]]}},
        dict.fromkeys(["n", "stop", "logprobs", "top_logprobs", "seed", "stream", "stream_options", "logit_bias",
                       "temperature", "top_p", "max_tokens", "tools", "tool_choice", "response_format",
                       "parallel_tool_calls", "function_call", "functions"]),
    ],
)  # fmt: skip
async def test_served_fields(fields: dict[str, Any]) -> None:
    async with client_of(engine_saying()) as client:
        response = await client.post(PATH, json={"messages": [USER]} | fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({"max_tokens": 40, "max_completion_tokens": 5}, 5), ({"max_tokens": 3}, 3), ({"max_completion_tokens": 4}, 4)],
)
async def test_the_smaller_limit_rules(fields: dict[str, Any], limit: int) -> None:
    async with client_of(engine_saying()) as client:
        answer = (await client.post(PATH, json={"messages": [USER]} | fields)).json()
    assert answer["usage"]["completion_tokens"] == limit
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_too_long_a_conversation() -> None:
    async with client_of(engine_saying(max_model_len=64)) as client:
        body = {"messages": [{"role": "user", "content": "word " * 40}]}
        error = error_of(await client.post(PATH, json=body))
        huge = error_of(await client.post(PATH, json={"messages": [{"role": "user", "content": "w" * 100_000}]}))
    for told in (error, huge):
        assert (told["code"], told["param"]) == ("context_length_exceeded", "messages")
        assert "64" in told["message"]


def test_calls_from_before_tools_are_calls() -> None:
    old = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "one"},
    ]
    new = [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": old[0]["function_call"]}]},
        {"role": "tool", "name": "f", "content": "one"},
    ]

    def told(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        body = ChatRequest.model_validate({"messages": [USER, *messages]})
        body.check()
        return [message.for_template() for message in body.messages]

    assert told(old) == told(new)


async def test_a_limit_beyond_the_context_is_cut_to_it() -> None:
    async with client_of(engine_saying("w" * 500, max_model_len=64)) as client:
        answer = (await client.post(PATH, json={"messages": [USER], "max_completion_tokens": 32_000})).json()
    assert answer["usage"]["total_tokens"] == 64
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_without_a_chat_template() -> None:
    tokenizer = small_tokenizer(chat_template=None)
    async with client_of(FakeEngine(says("x", tokenizer), tokenizer=tokenizer)) as client:
        error = error_of(await client.post(PATH, json={"messages": [USER]}))
    assert error["code"] == "no_chat_template"


async def test_stream_options_that_ask_for_nothing() -> None:
    async with client_of(engine_saying()) as client:
        for options in ({}, None, {"include_usage": False}, {"include_usage": None}):
            events = await stream(client, PATH, {"messages": [USER], "stream_options": options})
            assert all("usage" not in chunk and chunk["choices"] for chunk in events.chunks)


async def test_the_clients_request_id_is_only_a_label() -> None:
    async with client_of(engine_saying()) as client:
        body = {"messages": [USER], "stream": True}
        response = await client.post(PATH, json=body, headers={"X-Request-Id": "z" * 6000})
    first = json.loads(response.text.split("\n\n")[0].removeprefix("data: "))
    assert len(first["id"]) < 60


async def test_token_ids_of_prompt_and_choices() -> None:
    engine = FakeEngine(says("Hé", TOKENIZER), tokenizer=TOKENIZER)
    body = {"messages": [{"role": "user", "content": "x"}], "n": 2, "return_token_ids": True}
    async with client_of(engine) as client:
        plain = (await client.post(PATH, json=body)).json()
        events = await stream(client, PATH, body)
    prompt = list(engine.admitted[0].prompts[0])
    assert plain["prompt_token_ids"] == prompt
    told = [chunk["prompt_token_ids"] for chunk in events.chunks if "prompt_token_ids" in chunk]
    assert told == [prompt]
    for choice in plain["choices"]:
        streamed = [t for c in events.choices(choice["index"]) for t in c.get("token_ids", ())]
        assert streamed == choice["token_ids"]
        assert TOKENIZER.decode(streamed) == "Hé"


async def test_prompt_logprobs_stand_beside_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.front.MAX_PROMPT_LOGPROBS", 100)
    engine = FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER)
    body = {"messages": [{"role": "user", "content": "ab"}], "n": 2, "prompt_logprobs": 1}
    async with client_of(engine) as client:
        answer = (await client.post(PATH, json=body)).json()
        assert "prompt_logprobs" not in (await client.post(PATH, json=body | {"prompt_logprobs": None})).json()
        for wrong in ({"stream": True}, {"prompt_logprobs": 21}, {"prompt_logprobs": 20}):
            assert error_of(await client.post(PATH, json=body | wrong))["param"] == "prompt_logprobs"
    prompt = engine.admitted[0].prompts[0]
    assert engine.admitted[0].params.prompt_logprobs == 1
    told = answer["prompt_logprobs"]
    assert (told[0], len(told)) == (None, len(prompt))
    for token_id, entry in zip(prompt[1:], told[1:], strict=True):
        assert entry[str(token_id)]["decoded_token"] == TOKENIZER.token_bytes(token_id).decode()


@pytest.mark.parametrize(
    ("nums_parts", "param"),
    [([5], "messages[0].content"), ([4] * 4, None), ([1, 4, 4], None), ([9, 9, 9, 9], "messages")],
)
async def test_content_parts_are_counted(
    nums_parts: list[int], param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.front.LIMITS", Limits(messages=4))
    part = {"type": "text", "text": "a"}
    messages = [{"role": "user", "content": [part] * count} for count in nums_parts]
    engine = FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER)
    async with client_of(engine) as client:
        response = await client.post(PATH, json={"messages": messages})
    assert (error_of(response)["param"] if param else response.status_code) == (param or 200)
