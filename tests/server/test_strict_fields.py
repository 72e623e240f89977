"""Objects that the routes read by hand are looked into as deep as they are read: what nobody knows is named by its
path, or refused by a strict server; what clients and SDKs are known to send is a hint.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types import responses as sdk
from openai.types.chat import ChatCompletionAssistantMessageParam, ChatCompletionContentPartTextParam
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_custom_tool_param import Custom as ChatCustom
from openai.types.responses import response_input_param as items
from openai.types.shared_params import FunctionDefinition, Reasoning

from server.protocol.chat import ChatRequest
from server.protocol.chat_messages import Message, TextPart
from server.protocol.chat_tools import Custom, Function
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.fields import MAX_FIELDS, Kinds, Shape, WireModel
from server.protocol.response_fields import ITEMS, TOOL_CHOICE, TOOLS
from server.protocol.responses import ReasoningOptions, ResponsesRequest, TextOptions
from tests.server.agent_engine import AgentEngine, turn
from tests.server.harness import client_of

HEADER = "x-pagemill-ignored"
CHAT, MESSAGES, RESPONSES, TOKENIZE = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"
SCHEMA = {"type": "object", "properties": {"temprature": {"type": "number"}}}
USER = {"role": "user", "content": "Hi."}
# a tool, a call of it, and its result, as each API spells them
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "ok"}
TOOL_USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"odd": 1}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "ok"}]}
FLAT = {"type": "function", "name": "f", "parameters": SCHEMA}
FLAT_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "ok"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER]} | fields


def message(*turns: Any, **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 20, "messages": [USER, *turns]} | fields


def response(*given: Any, **fields: Any) -> dict[str, Any]:
    return {"input": [USER, *given]} | fields


def says(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def hears(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(**more: Any) -> dict[str, Any]:
    return {"type": "text", "text": "x"} | more


def engine() -> AgentEngine:
    return AgentEngine([turn("Hello.")])


MISTYPED = [
    (CHAT, chat(messages=[USER, {"role": "assistant", "tool_calls": [CALL | {"zzz": 1}]}, RESULT]),
     "messages[1].tool_calls[0].zzz", None),
    (CHAT, chat(messages=[
        USER, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}", "argument": 1}}]),
     "messages[1].function_call.argument", "arguments"),
    (CHAT, chat(tools=[FUNCTION], tool_choice={"type": "function", "function": {"name": "f", "nmae": 1}}),
     "tool_choice.function.nmae", "name"),
    (CHAT, chat(tools=[FUNCTION], tool_choice={"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}], "modes": 1}}),
     "tool_choice.allowed_tools.modes", "mode"),
    (CHAT, chat(tools=[{"type": "custom", "custom": {"name": "c", "format": {"type": "text", "gramar": 1}}}]),
     "tools[0].custom.format.gramar", "grammar"),
    (TOKENIZE, chat(messages=[USER, {"role": "assistant", "tool_calls": [CALL | {"functions": 1}]}, RESULT]),
     "messages[1].tool_calls[0].functions", "function"),
    (MESSAGES, message(system=[text(cache_controll={})]), "system[0].cache_controll", "cache_control"),
    (MESSAGES, message(hears(text(citation=1))), "messages[1].content[0].citation", "citations"),
    (MESSAGES, message(says(text()), USER | {"contents": 1}), "messages[2].contents", "content"),
    (MESSAGES, message(says(TOOL_USE | {"inputs": 1}), hears(TOOL_RESULT)), "messages[1].content[0].inputs", "input"),
    (MESSAGES, message(says(TOOL_USE), hears(TOOL_RESULT | {"error": True})), "messages[2].content[0].error",
     "is_error"),
    (MESSAGES, message(says(TOOL_USE), hears(TOOL_RESULT | {"content": [text(texts=1)]})),
     "messages[2].content[0].content[0].texts", "text"),
    (MESSAGES, message(says({"type": "thinking", "thinking": "x", "signature": "s", "signatures": 1})),
     "messages[1].content[0].signatures", "signature"),
    (MESSAGES, message(hears({"type": "search_result", "title": "T", "source": "s", "content": [text()], "titel": 1})),
     "messages[1].content[0].titel", "title"),
    (MESSAGES, message(tools=[{"name": "f", "input_schema": SCHEMA, "descripton": "x"}]), "tools[0].descripton",
     "description"),
    (MESSAGES, message(thinking={"type": "enabled", "budget_token": 1}), "thinking.budget_token", "budget_tokens"),
    (MESSAGES, message(tool_choice={"type": "auto", "disable_parallel_tool_uses": True}),
     "tool_choice.disable_parallel_tool_uses", "disable_parallel_tool_use"),
    ("/v1/messages/count_tokens", message(hears(text(txt=1))), "messages[1].content[0].txt", "text"),
    (RESPONSES, response(USER | {"contents": 1}), "input[1].contents", "content"),
    (RESPONSES, response(hears({"type": "input_text", "text": "x", "anotations": []})),
     "input[1].content[0].anotations", "annotations"),
    (RESPONSES, response(FLAT_CALL | {"argument": 1}, OUTPUT), "input[1].argument", "arguments"),
    (RESPONSES, response(FLAT_CALL, OUTPUT | {"ouput": 1}), "input[2].ouput", "output"),
    (RESPONSES, response({"type": "reasoning", "summary": [], "contents": []}), "input[1].contents", "content"),
    (RESPONSES, response({"type": "additional_tools", "tools": [FLAT | {"stict": True}]}), "input[1].tools[0].stict",
     "strict"),
    (RESPONSES, response(tools=[FLAT | {"parameter": {}}]), "tools[0].parameter", "parameters"),
    (RESPONSES, response(tools=[{"type": "custom", "name": "c", "format": {"type": "text", "sintax": 1}}]),
     "tools[0].format.sintax", "syntax"),
    (RESPONSES, response(tools=[{"type": "namespace", "name": "n", "tools": [FLAT | {"nam": 1}]}]),
     "tools[0].tools[0].nam", "name"),
    (RESPONSES, response(tools=[FLAT], tool_choice={"type": "function", "name": "f", "namespaces": 1}),
     "tool_choice.namespaces", "namespace"),
    (RESPONSES, response(tools=[FLAT], tool_choice={
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f", "nam": 1}]}),
     "tool_choice.tools[0].nam", "name"),
    ("/v1/responses/input_tokens", response(FLAT_CALL | {"nme": 1}, OUTPUT), "input[1].nme", "name"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "near"), MISTYPED)
async def test_what_nobody_knows_is_named_or_refused(path: str, body: Any, param: str, near: str | None) -> None:
    async with client_of(engine()) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert re.sub(r"\d+", "", param) in answer.headers[HEADER].split(", ")
    served = engine()
    async with client_of(served, strict_fields=True) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    told = f'Unknown parameter: "{param}".' + (f' Did you mean "{near}"?' if near else "")
    assert error["message"] == told
    if path.startswith(MESSAGES):
        assert answer.json()["type"] == "error"
        assert error["type"] == "invalid_request_error"
    else:
        assert (error["param"], error["code"]) == (param, "unknown_parameter")
    assert served.admitted == []


async def test_a_mistyped_name_is_told_before_what_it_lacks() -> None:
    body = message(hears({"type": "text", "txt": "x"}))
    async with client_of(engine()) as client:
        assert "You must provide" in (await client.post(MESSAGES, json=body)).json()["error"]["message"]
    async with client_of(engine(), strict_fields=True) as client:
        assert 'Did you mean "text"?' in (await client.post(MESSAGES, json=body)).json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (CHAT, {"mesages": [USER]}, 'parameter messages. Is it misspelled as "mesages"?'),
        (CHAT, {"messages": [{"roll": "user", "rol": "user"}]}, 'messages[0].role. Is it misspelled as "rol"?'),
        (MESSAGES, message(thinking={"typ": "enabled"}), 'thinking.type. Is it misspelled as "typ"?'),
        (TOKENIZE, {"messages": [{"x" * 100: 1}]}, "parameter messages[0].role."),
    ],
)
async def test_what_is_missing_may_be_misspelled(path: str, body: Any, told: str) -> None:
    async with client_of(engine()) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith(told)


MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
HINTED = [
    (CHAT, chat(messages=[
        {"role": "system", "content": [text(**MARK)]},
        hears(text(prompt_cache_breakpoint={"mode": "explicit"})),
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "parsed": {"a": 1}, "tool_calls": [
            {"index": 0} | CALL | {"function": CALL["function"] | {"parsed_arguments": {}}}]},  # type: ignore[dict-item]
        RESULT,
        USER,
    ], tools=[FUNCTION | MARK], tool_choice="auto", prompt_cache_options={"mode": "auto"}, verbosity="low")),
    (MESSAGES, message(
        says(text(citations=[], **MARK), TOOL_USE | MARK | {"caller": {"type": "direct"}}),
        hears(TOOL_RESULT | MARK | {"content": [text(**MARK), {"type": "tool_reference", "tool_name": "f", **MARK}]}),
        says({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}, "caller": {"type": "direct"}},
             {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"url": "u"}]},
             {"type": "redacted_thinking", "data": "x"}, text()),
        USER | {"id": "m"},
        system=[text(**MARK)],
        tools=[
            {"name": "f", "input_schema": SCHEMA, "defer_loading": True, "eager_input_streaming": True, **MARK},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8, "allowed_domains": ["a"]},
            {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 10_000},
        ],
        thinking={"type": "adaptive", "display": "summarized"}, metadata={"user_id": "u"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high", "task_budget": {"type": "tokens", "total": 20_000}}, betas=["x"],
        **MARK,
    )),
    (RESPONSES, response(
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "phase": "commentary", "content": [
            {"type": "output_text", "text": "x", "annotations": [{"url": "u"}], "logprobs": [{}]}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "g",
         "status": "completed"},
        FLAT_CALL | {"id": "fc", "status": "completed", "parsed_arguments": {}},
        OUTPUT | {"id": "o", "status": "completed"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}},
        USER,
        tools=[FLAT | {"defer_loading": True, "strict": False}, {"type": "web_search", "search_context_size": "low"},
               {"type": "mcp", "server_label": "l", "server_url": "u", "require_approval": "never"}],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        client_metadata={"a": "b"}, reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low"},
        service_tier="auto", max_tool_calls=3,
    )),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), HINTED)
async def test_what_clients_are_known_to_send_is_never_refused(path: str, body: Any) -> None:
    async with client_of(engine(), strict_fields=True) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER]


async def test_values_that_are_free_are_not_looked_into() -> None:
    """Schemas, arguments, variables of the template: their names are the client's."""
    schema = SCHEMA | {"additionalProperties": False}
    bodies = [
        (CHAT, chat(tools=[FUNCTION], chat_template_kwargs={"odd": 1}, metadata={"odd": "1"},
                    response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})),
        (MESSAGES, message(says(TOOL_USE), hears(TOOL_RESULT), tools=[{"name": "f", "input_schema": SCHEMA}])),
        (RESPONSES, response(tools=[FLAT], metadata={"odd": "1"})),
    ]  # fmt: skip
    async with client_of(engine(), strict_fields=True) as client:
        for path, body in bodies:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (MESSAGES, message(hears(text(**{f"f{k}": 1 for k in range(MAX_FIELDS)}))), "messages[1].content[0]"),
        (RESPONSES, response(USER | {f"f{k}": 1 for k in range(MAX_FIELDS)}), "input[1]"),
    ],
)
async def test_a_loose_object_has_so_many_fields(path: str, body: Any, param: str) -> None:
    async with client_of(engine()) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{param} must have at most {MAX_FIELDS} fields")


# -- the SDK ------------------------------------------------------------------------------------------------------


def item(kind: str) -> Shape:
    return ITEMS.shapes[kind]


def inner(read: Shape, field: str, kind: str) -> Shape:
    kinds = read.fields[field]
    assert isinstance(kinds, Kinds)
    return kinds.shapes[kind]


SDK = [
    (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    (chat_params.CompletionCreateParamsBase, ChatRequest),
    (sdk.response_create_params.ResponseCreateParamsBase, ResponsesRequest),
    (sdk.InputTokenCountParams, ResponsesRequest),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
    (ChatCompletionAssistantMessageParam, Message),
    (ChatCompletionContentPartTextParam, TextPart),
    (FunctionDefinition, Function),
    (ChatCustom, Custom),
    (Reasoning, ReasoningOptions),
    (sdk.ResponseTextConfigParam, TextOptions),
    (sdk.EasyInputMessageParam, item("message")),
    (items.Message, item("message")),
    (sdk.ResponseOutputMessageParam, item("message")),
    (sdk.ResponseInputTextParam, inner(item("message"), "content", "input_text")),
    (sdk.ResponseOutputTextParam, inner(item("message"), "content", "output_text")),
    (sdk.ResponseOutputRefusalParam, inner(item("message"), "content", "refusal")),
    (sdk.ResponseReasoningItemParam, item("reasoning")),
    (sdk.ResponseFunctionToolCallParam, item("function_call")),
    (items.FunctionCallOutput, item("function_call_output")),
    (sdk.ResponseCustomToolCallParam, item("custom_tool_call")),
    (sdk.ResponseCustomToolCallOutputParam, item("custom_tool_call_output")),
    (items.AdditionalTools, item("additional_tools")),
    (items.ItemReference, item("item_reference")),
    (sdk.FunctionToolParam, TOOLS.shapes["function"]),
    (sdk.CustomToolParam, TOOLS.shapes["custom"]),
    (sdk.NamespaceToolParam, TOOLS.shapes["namespace"]),
    (sdk.ToolChoiceFunctionParam, TOOL_CHOICE.shapes["function"]),
    (sdk.ToolChoiceCustomParam, TOOL_CHOICE.shapes["custom"]),
    (sdk.ToolChoiceAllowedParam, TOOL_CHOICE.shapes["allowed_tools"]),
]


@pytest.mark.parametrize(("documented", "read"), SDK)
def test_every_field_of_the_sdk_is_known(documented: Any, read: type[WireModel] | Shape) -> None:
    fields = read.fields if isinstance(read, Shape) else read.model_fields
    assert set(documented.__annotations__) - set(fields) - read.hints == set()


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"types": "text", "text": "x"}]}]},
            "types",
        ),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"tpye": "text"}]}]}, "tpye"),
        ("/v1/messages", {"max_tokens": 1, "system": [{"type": "text", "texts": "x"}], "messages": [USER]}, "texts"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"types": "input_text", "text": "x"}]}]}, "types"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "txt": "x"}]}]}, "txt"),
        ("/v1/responses", {"input": "x", "tools": [{"types": "function", "name": "f"}]}, "types"),
    ],
)
async def test_what_a_part_lacks_may_be_misspelled(path: str, body: dict[str, Any], meant: str) -> None:
    """Also where unknown fields are accepted."""
    async with client_of(AgentEngine([turn("x")])) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert f'misspelled as "{meant}"?' in answer.json()["error"]["message"]
