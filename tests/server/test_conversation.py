"""Chat with tools, thinking and forms over a fake engine: streamed and plain mean the same, whatever the cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling_params import ReasoningMarks
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import Events, client_of, error_of, stream

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> answer with <tool_call>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% elif enable_thinking %}<think>\n{% endif %}{% endif %}"
)
TOKENIZER = small_tokenizer(chat_template=TEMPLATE)
PLAIN_TOKENIZER = small_tokenizer()
USER = {"role": "user", "content": "Weather in Oslo?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "get_time"}}
CUSTOM = {"type": "custom", "custom": {"name": "run", "description": "Runs code."}}


def call_text(name: str = "get_weather", **arguments: Any) -> str:
    wire = {"name": name, "arguments": arguments or {"city": "Oslo é😀", "days": 2}}
    return f"<tool_call>\n{json.dumps(wire, ensure_ascii=False)}\n</tool_call>"


def engine_saying(text: str, **options: Any) -> FakeEngine:
    tokenizer = options.pop("tokenizer", TOKENIZER)
    return FakeEngine(says(text, tokenizer), tokenizer=tokenizer, max_model_len=4096, **options)


def message_of(events: Events, index: int) -> dict[str, Any]:
    """A stream's deltas put together as SDKs do."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for choice in events.choices(index):
        delta = choice["delta"]
        for key in ("role", "content", "reasoning_content"):
            if key in delta:
                message[key] = message.get(key, "") + delta[key]
        for part in delta.get("tool_calls", ()):
            if part["index"] not in calls:
                assert part["id"]
                assert part["index"] == len(calls)
                calls[part["index"]] = {key: part[key] for key in ("id", "type", part["type"])}
            else:
                assert set(part) <= {"index", "function", "custom"}
                call = calls[part["index"]]
                key = "input" if call["type"] == "custom" else "arguments"
                call[call["type"]][key] += part[call["type"]][key]
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message.get("tool_calls", ())]
    kept = {key: value for key, value in message.items() if key in ("role", "reasoning_content") and value}
    return kept | {"content": message.get("content") or "", "tool_calls": calls}


TEXTS = [
    "Just words, é😀.",
    "<think>Let me see é😀</think>It is cold.",
    "  <think>\nhmm\n</think>\n\n" + call_text(),
    "I look it up.\n" + call_text() + "\n" + call_text("get_time"),
    call_text("run", input='a "quoted"\nline\\é😀') + call_text(),
    "<think>never ends " + call_text(),
    "<tool_call>\n{broken",
    "<thin",
    "",
]


@settings(max_examples=120, deadline=None)
@given(
    text=st.sampled_from(TEXTS),
    seed=st.integers(0, 100_000),
    n=st.integers(1, 2),
    max_tokens=st.sampled_from([None, 3, 25, 60]),
    tools=st.sampled_from([[], [WEATHER, TIME], [WEATHER, TIME, CUSTOM]]),
    thinking=st.sampled_from([None, True, False]),
    parallel=st.booleans(),
    logprobs=st.booleans(),
    stop=st.sampled_from([None, "cold", "é"]),
)
async def test_streamed_and_plain_mean_the_same(
    text: str, seed: int, tools: list[Any], thinking: bool | None, parallel: bool, logprobs: bool, **fields: Any
) -> None:
    body: dict[str, Any] = {"messages": [USER], "tools": tools, "logprobs": logprobs, **fields}
    body |= {"chat_template_kwargs": {"enable_thinking": thinking}, "parallel_tool_calls": parallel}
    body |= {"top_logprobs": 1} if logprobs else {}
    async with client_of(engine_saying(text, splits=random.Random(seed))) as client:
        plain = (await client.post(PATH, json=body)).json()
        events = await stream(client, PATH, body | {"stream_options": {"include_usage": True}})
    assert events.usage == plain["usage"]
    for choice in plain["choices"]:
        index, message = choice["index"], choice["message"]
        assert without_ids(message_of(events, index)) == without_ids(message)
        assert events.finish(index) == choice["finish_reason"]
        assert [k for k, c in enumerate(events.choices(index)) if "role" in c["delta"]] == [0]
        assert (choice["finish_reason"] == "tool_calls") <= bool(message.get("tool_calls"))
        if not parallel:
            assert len(message.get("tool_calls", ())) <= 1
        if logprobs:
            told = [c["logprobs"] for c in events.choices(index) if c["logprobs"]]
            for key in choice["logprobs"]:
                assert [e for each in told for e in each[key] or ()] == (choice["logprobs"][key] or [])


async def answer(text: str, body: dict[str, Any], **options: Any) -> tuple[dict[str, Any], FakeEngine]:
    engine = engine_saying(text, **options)
    async with client_of(engine) as client:
        response = await client.post(PATH, json={"messages": [USER]} | body)
    assert response.status_code == 200, response.text
    return response.json(), engine


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.admitted[0].prompts[0], skip_special_tokens=False)


async def test_calls_of_a_plain_answer() -> None:
    told, engine = await answer("I look.\n" + call_text() + call_text("get_time"), {"tools": [WEATHER, TIME]})
    (choice,) = told["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"].strip() == "I look."
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function"
    assert first["function"]["name"] == "get_weather"
    assert json.loads(first["function"]["arguments"]) == {"city": "Oslo é😀", "days": 2}
    assert first["id"] != second["id"]
    assert '"name": "get_weather"' in prompt_of(engine)
    assert engine.admitted[0].params.structured is None


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, 1),
        ({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "parallel_tool_calls": True}, 2),
        ({"tool_choice": "required"}, 2),
    ],
)
async def test_a_named_tool_is_called_once(fields: dict[str, Any], count: int) -> None:
    told, _ = await answer(call_text() + call_text(), {"tools": [WEATHER], **fields})
    assert len(told["choices"][0]["message"]["tool_calls"]) == count


async def test_content_is_null_beside_calls_alone() -> None:
    told, _ = await answer(call_text(), {"tools": [WEATHER]})
    assert told["choices"][0]["message"]["content"] is None


async def test_without_tools_marks_are_words() -> None:
    for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        told, engine = await answer(call_text(), body)
        assert told["choices"][0]["message"]["content"] == call_text()
        assert told["choices"][0]["finish_reason"] == "stop"
        assert "get_weather" not in prompt_of(engine)


async def test_thinking_is_told_apart_and_counted() -> None:
    thought = "<think>let me see</think>"
    told, engine = await answer(thought + "Cold.", {"logprobs": True})
    (choice,) = told["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("let me see", "Cold.")
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(thought)}
    assert b"".join(bytes(e["bytes"]) for e in choice["logprobs"]["reasoning_content"]).decode() == thought
    assert b"".join(bytes(e["bytes"]) for e in choice["logprobs"]["content"]).startswith(b"Cold.")
    assert engine.admitted[0].params.reasoning == ReasoningMarks("<think>", "</think>", opened=False)


@pytest.mark.parametrize(
    ("body", "opened", "ending"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True}}, True, "<think>\n"),
        ({"reasoning_effort": "high"}, True, "<think>\n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None, "<think></think>"),
        ({"reasoning_effort": "none"}, None, "<think></think>"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True, "<think>\n"),
        ({"chat_template_kwargs": {"enable_thinking": None}}, False, "assistant\n"),
        ({"messages": [{"role": "user", "content": "what is <think>"}]}, False, "assistant\n"),
    ],
)
async def test_the_prompt_tells_whether_thinking_is_open(
    body: dict[str, Any], opened: bool | None, ending: str
) -> None:
    told, engine = await answer("ab</think>cd", body)
    assert prompt_of(engine).endswith(ending)
    marks = engine.admitted[0].params.reasoning
    assert (marks.opened if marks else None) == opened
    message = told["choices"][0]["message"]
    assert message["content"] == ("cd" if opened else "ab</think>cd")
    assert message.get("reasoning_content") == ("ab" if opened else None)


@pytest.mark.parametrize("field", ["reasoning", "both"])
async def test_the_name_of_thinking_is_a_setting(field: str) -> None:
    async with client_of(engine_saying("<think>a</think>b"), reasoning_field=field) as client:
        plain = (await client.post(PATH, json={"messages": [USER]})).json()["choices"][0]["message"]
        events = await stream(client, PATH, {"messages": [USER]})
    wanted = {"reasoning", "reasoning_content"} if field == "both" else {"reasoning"}
    assert {key for key in plain if key.startswith("reasoning")} == wanted
    assert {key for c in events.choices(0) for key in c["delta"] if key.startswith("reasoning")} == wanted


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_earlier_thinking_reaches_the_template(name: str) -> None:
    said = {"role": "assistant", "content": "Cold.", name: "hmm"}
    _, engine = await answer("x", {"messages": [USER, said, USER]})
    assert "<think>hmm</think>Cold." in prompt_of(engine)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ("get_weather", "get_time")),
        ({"type": "function", "function": {"name": "get_time"}}, ("get_time",)),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
            {"type": "function", "function": {"name": "get_time"}}]}}, ("get_time",)),
    ],
)  # fmt: skip
async def test_a_forced_call_is_held_to_a_grammar(choice: Any, names: tuple[str, ...]) -> None:
    body = {"tools": [WEATHER, TIME], "tool_choice": choice, "chat_template_kwargs": {"enable_thinking": True}}
    _, engine = await answer("x", body)
    params = engine.admitted[0].params
    assert params.structured is not None
    assert all((name in params.structured.source) == (name in names) for name in ("get_weather", "get_time"))
    assert params.reasoning == ReasoningMarks("<think>", "</think>", opened=True)


async def test_a_form_reaches_the_engine() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    _, engine = await answer("{}", {"response_format": form})
    structured = engine.admitted[0].params.structured
    assert structured is not None
    assert json.loads(structured.source) == SCHEMA


async def test_a_form_beside_tools_leaves_room_for_calls() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    told, engine = await answer(call_text(), {"response_format": form, "tools": [TIME]})
    structured = engine.admitted[0].params.structured
    assert structured is not None
    assert json.loads(structured.source) == SCHEMA
    assert "get_time" in structured.calls
    assert told["choices"][0]["finish_reason"] == "tool_calls"
    async with client_of(engine) as client:
        body = {"messages": [USER], "tools": [TIME], "structured_outputs": {"grammar": 'start: "a"'}}
        assert error_of(await client.post(PATH, json=body))["param"] == "structured_outputs.grammar"
        assert (await client.post(PATH, json=body | {"tool_choice": "none"})).status_code == 200


async def test_custom_tools_take_free_text() -> None:
    code = 'print("é😀")\n'
    told, engine = await answer(call_text("run", input=code), {"tools": [CUSTOM]})
    (call,) = told["choices"][0]["message"]["tool_calls"]
    assert call == {"id": call["id"], "type": "custom", "custom": {"name": "run", "input": code}}
    assert "Runs code." in prompt_of(engine)
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]
    _, engine = await answer("x", {"messages": history, "tools": [CUSTOM]})
    assert '"input": "print(' in prompt_of(engine)


async def test_a_message_is_continued() -> None:
    said = {"role": "assistant", "content": "It is  "}
    body = {"messages": [USER, said], "continue_final_message": True, "add_generation_prompt": False}
    told, engine = await answer("cold", body)
    assert prompt_of(engine).endswith("<|im_start|>assistant\nIt is  ")
    assert told["choices"][0]["message"]["content"] == "cold"
    opened = {"role": "assistant", "content": "<think>so"}
    told, _ = await answer(" it</think>cold", body | {"messages": [USER, opened]})
    message = told["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (" it", "cold")


async def test_no_generation_prompt() -> None:
    _, engine = await answer("x", {"add_generation_prompt": False})
    assert prompt_of(engine).endswith("<|im_end|>\n")


async def test_a_template_without_tools_is_told_of_them_in_words() -> None:
    history = [
        {"role": "system", "content": "Be brief."}, USER,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {
            "name": "get_weather", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "12 C"},
    ]  # fmt: skip
    told, engine = await answer(call_text(), {"messages": history, "tools": [WEATHER]}, tokenizer=PLAIN_TOKENIZER)
    assert told["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    prompt = prompt_of(engine)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert prompt.count("<|im_start|>system") == 1
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in prompt
    assert "<|im_start|>user\n<tool_response>\n12 C\n</tool_response>" in prompt


async def test_a_named_format_is_told_as_well() -> None:
    engine = engine_saying(call_text(), tokenizer=PLAIN_TOKENIZER)
    async with client_of(engine, tool_call_parser="hermes") as client:
        told = (await client.post(PATH, json={"messages": [USER], "tools": [WEATHER]})).json()
    assert told["choices"][0]["finish_reason"] == "tool_calls"
    assert "You can call functions." in prompt_of(engine)


async def test_without_a_format_calls_are_words() -> None:
    async with client_of(engine_saying(call_text()), tool_call_parser="none") as client:
        body = {"messages": [USER], "tools": [WEATHER]}
        told = (await client.post(PATH, json=body)).json()["choices"][0]
    assert told["message"]["content"] == call_text()


async def test_tools_that_cannot_be_run_are_dropped_and_named() -> None:
    search = {"type": "web_search", "user_location": {"type": "approximate"}}
    engine = engine_saying("x")
    async with client_of(engine) as client:
        for more in ({}, {"stream": True}):
            response = await client.post(PATH, json={"messages": [USER], "tools": [search, WEATHER]} | more)
            assert response.status_code == 200
            assert response.headers["x-pagemill-ignored"] == "tools.web_search"
        body = {"messages": [USER], "tools": [search, WEATHER], "tool_choice": {"type": "web_search"}}
        assert error_of(await client.post(PATH, json=body))["param"] == "tool_choice"
    assert "web_search" not in prompt_of(engine)


FORCED = {"tools": [WEATHER], "tool_choice": "required"}


@pytest.mark.parametrize("form", [{}, {"response_format": {"type": "json_object"}}])
@pytest.mark.parametrize("stop", ["city", "Oslo", ": ", "{", "</tool_call>", "\n"])
async def test_stop_strings_do_not_count_in_calls(stop: str, form: dict[str, Any]) -> None:
    text = "<think>the city</think>\n\n" + call_text() + call_text("get_time")
    for splits in (None, random.Random(stop)):
        told, engine = await answer(text, {"tools": [WEATHER, TIME], "stop": stop, **form}, splits=splits)
        (choice,) = told["choices"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]]
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [
            ("get_weather", {"city": "Oslo é😀", "days": 2}),
            ("get_time", {"city": "Oslo é😀", "days": 2}),
        ]
        assert choice["finish_reason"] == "tool_calls"
        assert engine.admitted[0].params.stop == (stop,)


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        ("In this city. " + call_text(), "In this", 0),
        (call_text() + "So the city", "So the", 1),
        ("<think>a city</think>\n\nNo ci" + call_text() + "ty", "No city", 1),  # in no stretch of content
        ("A <tool_call> city", "A <tool_call>", 0),
        ("<tool_call>\n{ city", "<tool_call>\n{", 0),
    ],
)
async def test_stop_strings_count_around_calls(text: str, content: str, count: int) -> None:
    for splits in (None, random.Random(text)):
        told, _ = await answer(text, {"tools": [WEATHER], "stop": [" city", "zz"]}, splits=splits)
        (choice,) = told["choices"]
        assert choice["message"]["content"] == content
        assert len(choice["message"].get("tool_calls", ())) == count
        assert choice["finish_reason"] == ("tool_calls" if count else "stop")


async def test_nothing_stops_a_forced_call() -> None:
    told, engine = await answer(call_text(), FORCED | {"stop": ["city"], "stop_token_ids": [1]})
    assert json.loads(told["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])["days"] == 2
    assert told["choices"][0]["finish_reason"] == "tool_calls"
    assert (engine.admitted[0].params.stop, engine.admitted[0].params.stop_token_ids) == ((), ())
    async with client_of(engine_saying("")) as client:
        body = {"messages": [USER], "stop": ["a"] * 65, **FORCED}
        assert error_of(await client.post(PATH, json=body))["param"] == "stop"


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_call_that_breaks_off_is_no_finished_call(choice: str) -> None:
    text = call_text() + call_text("get_time")
    for cut, calls, reason in (
        (-2, 2, "tool_calls"),
        (-len("}\n</tool_call>") - 1, 2, "stop"),
        (len(call_text()), 1, "tool_calls"),
    ):
        told, _ = await answer(text[:cut], {"tools": [WEATHER, TIME], "tool_choice": choice})
        assert len(told["choices"][0]["message"]["tool_calls"]) == calls
        assert told["choices"][0]["finish_reason"] == reason
    custom = call_text("run", input="one two")
    for cut, reason in ((-2, "tool_calls"), (-len("}}\n</tool_call>"), "stop"), (-len('o"}}\n</tool_call>'), "stop")):
        told, _ = await answer(custom[:cut], {"tools": [CUSTOM], "tool_choice": choice})
        assert told["choices"][0]["message"]["tool_calls"][0]["custom"]["input"] in ("one two", "one tw")
        assert told["choices"][0]["finish_reason"] == reason


async def test_the_first_of_two_calls_is_whole_where_only_one_is_wanted() -> None:
    text = call_text() + call_text("get_time")[:-20]
    told, _ = await answer(text, {"tools": [WEATHER, TIME], "parallel_tool_calls": False})
    assert len(told["choices"][0]["message"]["tool_calls"]) == 1
    assert told["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_forced_call_that_is_cut_leaves_no_marks() -> None:
    text = call_text() + "\n" + call_text("get_time")
    for max_tokens in range(1, len(text.encode())):
        body = FORCED | {"tools": [WEATHER, TIME], "max_tokens": max_tokens}
        engine = engine_saying(text)
        async with client_of(engine) as client:
            plain = (await client.post(PATH, json={"messages": [USER]} | body)).json()["choices"][0]
            if max_tokens % 7 == 0:
                events = await stream(client, PATH, {"messages": [USER]} | body)
                assert without_ids(message_of(events, 0)) == without_ids(plain["message"])
        assert not plain["message"]["content"]
        if plain["finish_reason"] == "tool_calls":
            break
        assert plain["finish_reason"] == "length"
    else:
        raise AssertionError("it was never whole")
