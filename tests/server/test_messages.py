"""/v1/messages over a fake engine: events and plain answers, fields, errors, counting."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.outputs import NotServing, QueueFull
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import client_of
from tests.server.messages_events import MessageEvents, error_of, stream

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
# hermes calls, think tags with a switch, as the Qwen models write them
TEMPLATE = (
    '{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }} as <tool_call>\n{"name": ..., "arguments": ...}\n'
    "</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    """{{ '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}"""
    "{{ '}\\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TOKENIZER = small_tokenizer()
THINKER = small_tokenizer(chat_template=TEMPLATE)
USER = {"role": "user", "content": "Name a colour."}
BASE = {"model": "fake-model", "max_tokens": 300, "messages": [USER]}
TOOL = {"name": "Read", "description": "Reads.", "input_schema": {"type": "object", "properties": {"path": {}}}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
CALL = {"type": "tool_use", "id": "t", "name": "Read", "input": {}}
TURN = (
    "<think>\nTwo files, é😀.\n</think>\n\nLooking.\n"
    '<tool_call>\n{"name": "Read", "arguments": {"path": "a b"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "Read", "arguments": {}}\n</tool_call>'
)
TEXTS = [TURN, "blue", "", " \n", "\n\nblue ", "<think>\n\n</think>\n\nblue", "<think>never ends", TURN[:-30]]


def engine_saying(text: str = "blue é😀", **options: Any) -> FakeEngine:
    return FakeEngine(says(text, TOKENIZER), tokenizer=TOKENIZER, **options)


def thinker_saying(text: str = TURN, **options: Any) -> FakeEngine:
    return FakeEngine(says(text, THINKER), tokenizer=THINKER, max_model_len=2048, **options)


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.admitted[-1].prompts[0], skip_special_tokens=False)


def without_id(message: dict[str, Any]) -> dict[str, Any]:
    """Ids are made anew for each answer."""
    content = [{**block, "id": None, "signature": None} for block in message["content"]]
    return message | {"id": None, "content": content}


async def test_plain_answer() -> None:
    engine = engine_saying()
    async with client_of(engine) as client:
        response = await client.post(PATH + "?beta=true", json=BASE)
    message = response.json()
    assert message["id"].startswith("msg_")
    assert response.headers["request-id"] == response.headers["x-request-id"]
    prompt = len(engine.admitted[0].prompts[0])
    usage = {"input_tokens": prompt - 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2}
    assert message == {
        "id": message["id"], "type": "message", "role": "assistant", "model": "fake-model",
        "content": [{"type": "text", "text": "blue é😀"}], "stop_reason": "end_turn", "stop_sequence": None,
        "usage": usage | {"output_tokens": 11, "output_tokens_details": {"thinking_tokens": 0}},
    }  # fmt: skip
    assert prompt_of(engine) == "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    text=st.sampled_from(TEXTS),
    max_tokens=st.sampled_from([1, 30, 60, 100, 300]),
    stop_sequences=st.sampled_from([[], ["Look"], ["lu", "zz"]]),
    display=st.sampled_from(["summarized", "omitted"]),
)  # fmt: skip
async def test_stream_equals_plain(seed: int, text: str, display: str, **fields: Any) -> None:
    body = BASE | {"tools": [TOOL], "thinking": {"type": "adaptive", "display": display}, **fields}
    async with client_of(thinker_saying(text, splits=random.Random(seed))) as client:
        plain = (await client.post(PATH, json=body)).json()
        events = await stream(client, body)
    assert events.error is None
    assert without_id(events.message) == without_id(plain)


async def test_thinking_words_and_calls_are_blocks_of_their_own() -> None:
    async with client_of(thinker_saying()) as client:
        events = await stream(client, BASE | {"tools": [TOOL]})
    thinking, text, first, second = events.message["content"]
    assert (thinking["type"], thinking["thinking"].strip()) == ("thinking", "Two files, é😀.")
    assert thinking["signature"]
    assert (text["type"], text["text"].strip()) == ("text", "Looking.")
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "Read", {"path": "a b"})
    assert second["input"] == {}
    assert first["id"] != second["id"]
    assert all(call["id"].startswith("toolu_") for call in (first, second))
    assert (events.message["stop_reason"], events.message["stop_sequence"]) == ("tool_use", None)
    usage = events.message["usage"]
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]


async def test_a_turn_that_comes_back_is_what_the_model_wrote() -> None:
    engine = thinker_saying()
    async with client_of(engine) as client:
        message = (await client.post(PATH, json=BASE | {"tools": [TOOL]})).json()
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "x"}
            for block in message["content"]
            if block["type"] == "tool_use"
        ]
        messages = [USER, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": results}]
        before = prompt_of(engine)
        await client.post(PATH, json=BASE | {"tools": [TOOL], "messages": messages})
    assert prompt_of(engine).startswith(before + TURN.rstrip() + "<|im_end|>")


@pytest.mark.parametrize("display", ["summarized", "omitted"])
async def test_thinking_that_is_not_shown_is_remembered(display: str) -> None:
    engine = thinker_saying()
    body = BASE | {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": display}}
    async with client_of(engine) as client:
        content = (await client.post(PATH, json=body)).json()["content"]
        assert (content[0]["thinking"] == "") == (display == "omitted")
        again = [USER, {"role": "assistant", "content": content}, USER]
        await client.post(PATH, json=body | {"messages": again})
    assert "<think>\nTwo files, é😀.\n</think>" in prompt_of(engine)


@pytest.mark.parametrize(
    ("kind", "off"), [("enabled", False), ("adaptive", False), ("between_tools", False), ("disabled", True)]
)
async def test_thinking_is_switched_in_the_template(kind: str, off: bool) -> None:
    engine = thinker_saying("blue")
    async with client_of(engine) as client:
        await client.post(PATH, json=BASE | {"thinking": {"type": kind}})
    assert prompt_of(engine).endswith("<think>\n\n</think>\n\n") == off


@pytest.mark.parametrize(
    ("fields", "reason", "matched"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["zz", "e é"]}, "stop_sequence", "e é"),
        ({"stop_sequences": []}, "end_turn", None),
        ({"max_tokens": 100_000, "ignore_eos": True}, "model_context_window_exceeded", None),
    ],
)
async def test_stop_reasons(fields: dict[str, Any], reason: str, matched: str | None) -> None:
    text = "blue é" + "x" * (600 if "ignore_eos" in fields else 1)
    async with client_of(engine_saying(text)) as client:
        plain = (await client.post(PATH, json=BASE | fields)).json()
        streamed = (await stream(client, BASE | fields)).message
    for message in (plain, streamed):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, matched)


async def test_system_prompt_and_what_clients_put_before_it() -> None:
    engine = engine_saying()
    prompts = []
    async with client_of(engine) as client:
        for turn in range(2):
            billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{turn}; cch={turn};"}
            system = [billing, {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
            response = await client.post(PATH, json=BASE | {"system": system})
            prompts.append(prompt_of(engine))
    assert prompts[0] == prompts[1]
    assert prompts[0].startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n")
    assert response.headers["x-pagemill-ignored"] == "system[].cache_control, x-anthropic-billing-header"


async def test_the_last_words_of_the_assistant_are_continued() -> None:
    engine = engine_saying()
    messages = [USER, {"role": "assistant", "content": "The sky is"}]
    async with client_of(engine) as client:
        message = (await client.post(PATH, json=BASE | {"messages": messages})).json()
    assert prompt_of(engine).endswith("<|im_start|>assistant\nThe sky is")
    assert message["content"] == [{"type": "text", "text": "blue é😀"}]


@pytest.mark.parametrize(
    ("content", "tail"),
    [
        ([], ""),
        ("", ""),
        ([{"type": "thinking", "thinking": "A hue.", "signature": "s"}, {"type": "text", "text": "It is"}], "It is"),
    ],
)
async def test_odd_beginnings_are_continued(content: Any, tail: str) -> None:
    engine = thinker_saying("blue")
    async with client_of(engine) as client:
        response = await client.post(PATH, json=BASE | {"messages": [USER, {"role": "assistant", "content": content}]})
    assert response.status_code == 200, response.text
    assert prompt_of(engine).endswith(tail)
    assert "<|im_end|>" not in prompt_of(engine).rpartition("assistant")[2]
    assert response.json()["content"] == [{"type": "text", "text": "blue"}]


@pytest.mark.parametrize(
    ("choice", "forced", "shown"),
    [
        (None, False, True),
        ({"type": "auto"}, False, True),
        ({"type": "none"}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "Read"}, True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, True),
    ],
)
async def test_tool_choice(choice: dict[str, Any] | None, forced: bool, shown: bool) -> None:
    call = '<tool_call>\n{"name": "Read", "arguments": {"path": "a"}}\n</tool_call>'
    engine = thinker_saying(call)
    async with client_of(engine) as client:
        body = BASE | {"tools": [TOOL], "tool_choice": choice}
        message = (await client.post(PATH, json=body)).json()
    assert (engine.admitted[0].params.structured is not None) == forced
    assert ("Reads." in prompt_of(engine)) == shown
    if not forced:  # the words of a forced call are its format's
        assert (message["stop_reason"] == "tool_use") == shown


async def test_one_call_where_no_more_are_wanted() -> None:
    async with client_of(thinker_saying()) as client:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        message = (await client.post(PATH, json=BASE | {"tools": [TOOL], "tool_choice": choice})).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]


async def test_tools_that_run_elsewhere_are_dropped_and_named() -> None:
    engine = thinker_saying("blue")
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    async with client_of(engine) as client:
        response = await client.post(PATH, json=BASE | {"tools": [search, TOOL]})
        named = BASE | {"tools": [search, TOOL], "tool_choice": {"type": "tool", "name": "web_search"}}
        error = error_of(await client.post(PATH, json=named))
    assert response.status_code == 200
    assert "tools.web_search_20250305" in response.headers["x-pagemill-ignored"]
    assert "web_search" not in prompt_of(engine)
    assert "tool_choice" in error["message"]


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ({"type": "bash_20250124", "name": "bash"}, {"command": "ls"}),
        ({"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}, {"command": "view", "path": "/"}),
        ({"type": "memory_20250818", "name": "memory"}, {"command": "delete", "path": "/memories/a"}),
    ],
)
async def test_tools_that_clients_run_are_told_with_their_input(tool: dict[str, Any], said: dict[str, Any]) -> None:
    engine = thinker_saying(f"<tool_call>\n{json.dumps({'name': tool['name'], 'arguments': said})}\n</tool_call>")
    async with client_of(engine) as client:
        response = await client.post(PATH, json=BASE | {"tools": [tool], "tool_choice": {"type": "any"}})
    assert "x-pagemill-ignored" not in response.headers
    assert f'"name": "{tool["name"]}"' in prompt_of(engine)
    (call,) = response.json()["content"]
    assert (call["name"], call["input"]) == (tool["name"], said)


SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
async def test_output_formats_are_grammars(fields: dict[str, Any]) -> None:
    engine = engine_saying('{"title": "x"}')
    async with client_of(engine) as client:
        assert (await client.post(PATH, json=BASE | fields)).status_code == 200
    structured = engine.admitted[0].params.structured
    assert structured is not None
    assert (structured.kind, json.loads(structured.source)) == ("json", SCHEMA)


CLAUDE_CODE = {
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "xhigh"},
    "service_tier": "auto",
    "temperature": 1,
}


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        (CLAUDE_CODE, "metadata, context_management, service_tier"),
        ({"thinking": {"type": "enabled", "budget_tokens": 31999}}, "thinking.budget_tokens"),
        ({"cache_control": {"type": "ephemeral"}, "container": "c", "mcp_servers": []}, None),
        ({"no_such_field": 1}, "no_such_field"),
        (dict.fromkeys(["system", "tools", "tool_choice", "thinking", "stop_sequences", "temperature", "top_k",
                        "top_p", "stream", "metadata", "output_config", "output_format", "service_tier"]), ""),
        ({"tools": [TOOL | {"type": "custom", "cache_control": {}, "input_examples": [{}], "strict": True}]}, None),
        ({"tools": [], "tool_choice": {"type": "auto"}}, ""),
        ({"messages": [USER, {"role": "assistant", "content": []}, USER]}, ""),
        ({"messages": [{"role": "user", "content": ""}]}, ""),
        ({"seed": 5, "min_p": 0.1, "logit_bias": {"5": 1}, "cache_salt": "s"}, ""),
    ],
)  # fmt: skip
async def test_served_fields(fields: dict[str, Any], ignored: str | None) -> None:
    async with client_of(engine_saying()) as client:
        response = await client.post(PATH, json=BASE | fields, headers={"anthropic-beta": "a,b"})
    assert response.status_code == 200, response.text
    told = response.headers.get("x-pagemill-ignored", "")
    assert told if ignored is None else sorted(told.split(", ")) == sorted(ignored.split(", "))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [USER, {"role": "assistant", "content": [CALL]}]}, "messages must not end with a tool_use"),
        ({"system": 5}, "system"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": "many"}, "top_k"),
        ({"stream": "yes"}, "stream"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 100}, "stop_sequences"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": "{}"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "often"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "Write"}, "tools": [TOOL]}, "tool_choice"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"chat_template_kwargs": 5, "thinking": {"type": "enabled"}}, "chat_template_kwargs"),
        ({"compaction": {"type": "summary"}}, "compaction is not supported"),
        ({"thread": {"type": "create"}}, "thread is not supported"),
        ({"tools": [TOOL, TOOL]}, 'tools[1].name is that of an earlier tool: "Read"'),
        ({"tools": [TOOL | {"name": "x" * 300}]}, "tools[0].name must be a name of 1 to 256"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, 'this server cannot run "web_search_20250305"'),
        (
            {"tools": [SEARCH, TOOL], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice.name is that of",
        ),
        ({"stop_sequences": ["a" * 5000]}, "stop strings of 4096 characters"),
        ({"output_format": {"type": "json_schema", "schema": {"const": "bad"}}}, "output_format.schema is bad"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"const": "bad"}}}},
            "output_config.format.schema is bad",
        ),
    ],
)
async def test_refused_fields(fields: dict[str, Any], told: str) -> None:
    engine = engine_saying()
    async with client_of(engine) as client:
        for body in (BASE | fields, BASE | {"stream": True} | fields):
            error = error_of(await client.post(PATH, json=body))
            assert error["type"] == "invalid_request_error"
            assert told in error["message"]
    assert engine.admitted == []


async def test_strict_fields() -> None:
    async with client_of(engine_saying(), strict_fields=True) as client:
        error = error_of(await client.post(PATH, json=BASE | {"temprature": 1}))
        assert (await client.post(PATH, json=BASE | {"metadata": {}})).status_code == 200
    assert '"temperature"' in error["message"]


async def test_max_tokens_0_computes_the_prompt_only() -> None:
    engine = engine_saying()
    async with client_of(engine) as client:
        message = (await client.post(PATH, json=BASE | {"max_tokens": 0})).json()
    assert engine.admitted[0].params.max_tokens == 0
    assert message["stop_reason"] == "max_tokens"


async def test_a_prompt_that_is_too_long() -> None:
    """In the words by which agents know that they must shorten their conversation."""
    async with client_of(engine_saying(max_model_len=64)) as client:
        for content, told in (("word " * 40, "> 63 maximum"), ("w" * 100_000, "characters")):
            body = BASE | {"messages": [{"role": "user", "content": content}]}
            error = error_of(await client.post(PATH, json=body))
            assert error["message"].startswith("prompt is too long: ")
            assert told in error["message"]


async def test_counting() -> None:
    engine = engine_saying(max_model_len=64)
    body = {key: value for key, value in BASE.items() if key != "max_tokens"} | {"system": "Be kind."}
    async with client_of(engine) as client:
        short = await client.post(COUNT + "?beta=true", json=body)
        usage = (await client.post(PATH, json=body | {"max_tokens": 5})).json()["usage"]
        long = await client.post(COUNT, json=body | {"messages": [{"role": "user", "content": "word " * 40}]})
        error_of(await client.post(COUNT, json={"messages": []}))
        error_of(await client.post(COUNT, json=body | {"model": "other"}), 404)
    assert short.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert long.json()["input_tokens"] > 64
    assert len(engine.admitted) == 1


async def test_counting_tools() -> None:
    async with client_of(thinker_saying()) as client:
        counts = [(await client.post(COUNT, json=BASE | {"tools": tools})).json() for tools in ([], [TOOL])]
    assert counts[1]["input_tokens"] > counts[0]["input_tokens"]


@pytest.mark.parametrize("header", [{"x-api-key": "key"}, {"authorization": "Bearer key"}])
async def test_keys(header: dict[str, str]) -> None:
    async with client_of(engine_saying(), api_key=("key",)) as client:
        assert (await client.post(PATH, json=BASE, headers=header)).status_code == 200
        wrong = {name: value + "s" for name, value in header.items()}
        for refused in ({}, wrong):
            error = error_of(await client.post(PATH, json=BASE, headers=refused), 401)
            assert error["type"] == "authentication_error"


async def test_every_failure_has_that_apis_shape() -> None:
    engine = engine_saying()
    async with client_of(engine, max_body_size=1000) as client:
        for path in (PATH, COUNT):
            for body in (b"{:", b"", b"[]", b"{}", b'{"messages": NaN}'):
                assert error_of(await client.post(path, content=body))["type"] == "invalid_request_error"
            assert error_of(await client.post(path, json=BASE | {"model": "x"}), 404)["type"] == "not_found_error"
            assert error_of(await client.get(path), 405)["type"] == "invalid_request_error"
            huge = await client.post(path, json=BASE | {"system": "x" * 2000})
            assert error_of(huge, 413)["type"] == "request_too_large"
        assert error_of(await client.post(PATH + "/batches", json={}), 404)["type"] == "not_found_error"
        version = {"anthropic-version": "2023-06-01"}
        assert error_of(await client.get("/v1/models/x", headers=version), 404)["type"] == "not_found_error"
        for refusal, status, kind in (
            (QueueFull("Full.", retry_after_s=7), 429, "rate_limit_error"),
            (NotServing("Draining."), 503, "overloaded_error"),
            (RuntimeError("secret"), 500, "api_error"),
        ):
            engine.refusal = refusal
            for stream_it in (False, True):
                response = await client.post(PATH, json=BASE | {"stream": stream_it})
                assert error_of(response, status)["type"] == kind
                assert "secret" not in response.text
    assert (await _openai_error()).keys() == {"error"}


async def _openai_error() -> dict[str, Any]:
    async with client_of(engine_saying()) as client:
        return dict((await client.post("/v1/chat/completions", json={})).json())


async def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    engine = engine_saying()
    engine.fail_after = 2
    async with client_of(engine) as client:
        events = await stream(client, BASE)
        plain = error_of(await client.post(PATH, json=BASE), 500)
    assert events.error is not None
    assert events.error["error"]["type"] == plain["type"] == "api_error"
    assert events.message["stop_reason"] is None


async def test_a_silent_stream_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.front.KEEP_ALIVE_S", 0.01)
    engine = engine_saying(pause_s=0.05)
    async with client_of(engine) as client:
        events = await stream(client, BASE | {"max_tokens": 3})
    assert events.num_pings > 1
    assert events.message["stop_reason"] == "max_tokens"


async def test_many_at_once_do_not_mix() -> None:
    engine = thinker_saying(splits=random.Random(7))
    async with client_of(engine) as client:
        found = await asyncio.gather(*(stream(client, BASE | {"tools": [TOOL]}) for _ in range(8)))
    contents = [without_id(events.message)["content"] for events in found]
    assert all(content == contents[0] for content in contents)
    assert len({events.message["id"] for events in found}) == 8


def test_the_reader_of_events_sees_what_is_out_of_order() -> None:
    with pytest.raises(AssertionError):
        MessageEvents('event: message_stop\ndata: {"type":"message_stop"}\n\n')


async def test_stop_sequences_do_not_count_in_calls() -> None:
    body = BASE | {"tools": [TOOL], "stop_sequences": ["path"]}
    async with client_of(thinker_saying(TURN + "the path ends here")) as client:
        message = (await client.post(PATH, json=body)).json()
    assert [block["input"] for block in message["content"] if block["type"] == "tool_use"] == [{"path": "a b"}, {}]
    assert message["content"][-1] == {"type": "text", "text": "the"}
    assert message["stop_reason"] == "tool_use"
    async with client_of(thinker_saying(TURN)) as client:
        forced = await client.post(PATH, json=body | {"tool_choice": {"type": "any"}})
    assert forced.json()["stop_reason"] == "tool_use"


async def test_a_call_that_breaks_off_is_no_use_of_a_tool() -> None:
    for choice in ("auto", "any"):
        async with client_of(thinker_saying(TURN[: TURN.index(' b"')])) as client:
            body = BASE | {"tools": [TOOL], "tool_choice": {"type": choice}}
            message = (await client.post(PATH, json=body)).json()
        assert message["content"][-1]["type"] == "tool_use"
        assert message["stop_reason"] == "end_turn"
