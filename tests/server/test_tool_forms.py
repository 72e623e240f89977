"""What the compiler finds wrong with a request's tools, told by its place; and which calls are held to a format."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.config import StructuredConfig
from engine.sampling_params import StructuredOutput
from engine.structured import GrammarStore
from server.protocol.chat_tools import MAX_FORMATS
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import client_of, error_of

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HEADER = "x-pagemill-ignored"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}{% for m in messages %}{{ m.content }}\n{% endfor %}"
)
TAGS = TEMPLATE.replace("<tool_call>", "<tool_call><function=<parameter=")
TOKENIZER, TAGS_TOKENIZER = small_tokenizer(chat_template=TEMPLATE), small_tokenizer(chat_template=TAGS)
USER = {"role": "user", "content": "x"}
TAGGED = {"type": "object", "properties": {"n": {"type": "integer"}, "tags": {"type": "array", "uniqueItems": True}}}
PLAIN = {"type": "object", "properties": {"n": {"type": "integer"}}}
UNIQUE = 'The schema of the tool "f" uses "uniqueItems" at properties.tags, which cannot be enforced.'
BROKEN = 'start: "a" b'
CHAT_DEFINITION = "custom.format.grammar.definition"


def function(schema: Any = TAGGED, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def custom(definition: Any = BROKEN, syntax: str = "lark", name: str = "c") -> dict[str, Any]:
    grammar = {"syntax": syntax, "definition": definition}
    return {"type": "custom", "custom": {"name": name, "format": {"type": "grammar", "grammar": grammar}}}


def flat(tool: dict[str, Any]) -> dict[str, Any]:
    """As /v1/responses spells it."""
    made = {"type": tool["type"], **tool[tool["type"]]}
    if tool["type"] == "custom":
        made["format"] = {"type": "grammar", **made["format"]["grammar"]}
    return made


def compiling(tokenizer: Any) -> tuple[FakeEngine, GrammarStore]:
    """Says "x", whatever it is held to, but compiles as the engine does."""
    engine = FakeEngine(says("x", tokenizer), tokenizer=tokenizer, max_model_len=4096)
    store = GrammarStore(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids, StructuredConfig())
    engine.compile = store.compile  # type: ignore[method-assign]
    return engine, store


@pytest.fixture(params=["json", "tags"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    engine, store = compiling(TOKENIZER if request.param == "json" else TAGS_TOKENIZER)
    async with client_of(engine) as client:
        yield client
    store.close()


async def chat(client: httpx.AsyncClient, *tools: Any, **body: Any) -> httpx.Response:
    return await client.post(CHAT, json={"messages": [USER], "tools": tools, "max_tokens": 4} | body)


# -- definitions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "none", "required", {"type": "custom", "custom": {"name": "c"}}])
async def test_a_broken_grammar_is_refused_forced_or_not(client: httpx.AsyncClient, choice: Any, stream: bool) -> None:
    error = error_of(await chat(client, function(PLAIN), custom(), tool_choice=choice, stream=stream))
    assert error["param"] == f"tools[1].{CHAT_DEFINITION}"
    assert error["message"] == f'{error["param"]} is not usable: line 1, column 8: unknown name: "b".'


async def test_a_broken_pattern_too(client: httpx.AsyncClient) -> None:
    error = error_of(await chat(client, custom("(a", "regex")))
    assert error["param"] == f"tools[0].{CHAT_DEFINITION}"
    assert "a regular expression in it cannot be read: unclosed group." in error["message"]


async def test_responses_name_their_own_fields(client: httpx.AsyncClient) -> None:
    search, good = {"type": "web_search"}, flat(custom('"a"', "regex", "good"))
    names = {"type": "namespace", "name": "n", "tools": [flat(function(PLAIN)), flat(custom())]}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "c"}]}
    for tools, choice, param in (
        ([search, good, flat(custom())], "auto", "tools[2].format.definition"),
        ([names], "auto", "tools[0].tools[1].format.definition"),
        ([good, flat(custom())], allowed, "tools[1].format.definition"),
    ):
        body = {"input": "x", "tools": tools, "tool_choice": choice}
        error = error_of(await client.post(RESPONSES, json=body))
        assert error["param"] == param
        assert error["message"].startswith(f"{param} is not usable: ")


async def test_a_grammar_that_fits_no_call_is_refused_only_where_calls_are_held_to_it(
    client: httpx.AsyncClient,
) -> None:
    lark = 'start: "(" start ")" | /.*/ "\\n"'
    error = error_of(await chat(client, custom(lark), tool_choice="required"))
    assert error["param"] == f"tools[0].{CHAT_DEFINITION}"
    assert "where the input is a JSON string: it has rules that refer to themselves" in error["message"]
    answer = await chat(client, custom(lark))
    assert (answer.status_code, answer.headers[HEADER]) == (200, "tools.format")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "yaml"}, "format.type"),
        ({}, "format.type"),
        ({"type": "grammar"}, "format.grammar"),
        ({"type": "grammar", "grammar": "a"}, "format.grammar"),
        ({"type": "grammar", "grammar": {"definition": "a"}}, "format.grammar.syntax"),
        ({"type": "grammar", "grammar": {"syntax": "bnf", "definition": "a"}}, "format.grammar.syntax"),
        ({"type": "grammar", "grammar": {"syntax": "lark"}}, "format.grammar.definition"),
        ({"type": "grammar", "grammar": {"syntax": "lark", "definition": ""}}, "format.grammar.definition"),
        ({"type": "grammar", "grammar": {"syntax": "lark", "definition": 5}}, "format.grammar.definition"),
    ],
)
async def test_a_malformed_format(client: httpx.AsyncClient, given: Any, param: str) -> None:
    error = error_of(await chat(client, {"type": "custom", "custom": {"name": "c", "format": given}}))
    assert error["param"] == f"tools[0].custom.{param}"


async def test_formats_are_counted(client: httpx.AsyncClient) -> None:
    tools = [custom("a", "regex", f"c{i}") for i in range(MAX_FORMATS + 1)]
    assert f"At most {MAX_FORMATS} tools" in error_of(await chat(client, *tools))["message"]


async def test_what_is_held_to_its_format_is_not_named(client: httpx.AsyncClient) -> None:
    tools = [custom("[a-z]+", "regex"), function(PLAIN) | {"function": {"name": "f", "strict": True}}]
    free = await chat(client, *tools)
    assert free.headers[HEADER] == "tools.strict, tools.format"
    form = {"type": "json_object"}
    for held in ({"tool_choice": "required"}, {"response_format": form}):
        answer = await chat(client, *tools, **held)
        assert answer.status_code == 200
        assert HEADER not in answer.headers


# -- schemas ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_is_refused_by_its_tool_and_place(client: httpx.AsyncClient, stream: bool) -> None:
    error = error_of(await chat(client, function(PLAIN, "g"), function(), tool_choice="required", stream=stream))
    assert (error["param"], error["message"]) == ("tools[1].function.parameters", UNIQUE)
    choice = {"type": "function", "function": {"name": "f"}}
    error = error_of(await chat(client, custom("a", "regex"), function(), tool_choice=choice))
    assert (error["param"], error["message"]) == ("tools[1].function.parameters", UNIQUE)


async def test_dialects_name_the_schema_as_they_spell_it(client: httpx.AsyncClient) -> None:
    tools = [{"type": "web_search"}, flat(function())]
    body = {"input": "x", "tools": tools, "tool_choice": "required"}
    error = error_of(await client.post(RESPONSES, json=body))
    assert (error["param"], error["message"]) == ("tools[1].parameters", UNIQUE)
    tool = {"name": "f", "input_schema": TAGGED}
    body = {"messages": [USER], "max_tokens": 4, "tools": [tool], "tool_choice": {"type": "any"}}
    refused = await client.post(MESSAGES, json=body)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, UNIQUE)


async def test_a_schema_is_not_looked_at_where_nothing_is_held_to_it(client: httpx.AsyncClient) -> None:
    assert (await chat(client, function())).status_code == 200


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"not": {}}}}, '"f" uses "not" at properties.a, which cannot be enforced.'),
        ({"not": {}}, '"f" uses "not" at its top level, which cannot be enforced.'),
        ({"properties": {"a": {"$ref": "#/$defs/no"}}}, '"f" '),
        ({"properties": {"a": {"type": "integer", "multipleOf": 0}}}, '"f" is not usable: its multipleOf'),
        ({"type": "array"}, "tool f must be a schema of type object."),
    ],
)
async def test_every_complaint_is_a_sentence(client: httpx.AsyncClient, schema: Any, words: str) -> None:
    error = error_of(await chat(client, function(PLAIN, "g"), function(schema), tool_choice="required"))
    assert error["param"] == "tools[1].function.parameters"
    assert words in error["message"]
    assert "\n" not in error["message"]


async def test_a_form_and_tools_are_told_apart(client: httpx.AsyncClient) -> None:
    def form(schema: Any) -> Any:
        return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}

    error = error_of(await chat(client, function(), response_format=form(PLAIN)))
    assert (error["param"], error["message"]) == ("tools[0].function.parameters", UNIQUE)
    error = error_of(await chat(client, function(PLAIN), response_format=form(TAGGED)))
    path = "response_format.json_schema.schema"
    told = f'{path} is not usable: it uses "uniqueItems" at properties.tags, which cannot be enforced.'
    assert (error["param"], error["message"]) == (path, told)


# -- clients ------------------------------------------------------------------------------------------------------


async def test_clients_are_told_apart_by_key_or_address() -> None:
    engine, store = compiling(TOKENIZER)
    asking: list[str] = []

    async def compile(structured: StructuredOutput, client: str = "") -> bool:
        asking.append(client)
        return await store.compile(structured, client)

    engine.compile = compile  # type: ignore[method-assign]
    body = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"choice": ["x"]}}
    async with client_of(engine, api_key=("one", "two")) as client:
        for headers in ({"authorization": "Bearer one"}, {"x-api-key": "two"}, {"authorization": "Bearer one"}):
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert asking[0] == asking[2] != asking[1]
    asking.clear()
    async with client_of(engine) as client:  # keys that nobody checks tell nothing
        for headers in ({"authorization": "Bearer one"}, {"authorization": "Bearer two"}):
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert asking[0] == asking[1]
    store.close()


async def test_of_two_tools_of_one_name_the_first_is_named() -> None:
    engine = FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER, max_model_len=4096)
    async with client_of(engine) as client:
        tools = [function(PLAIN, "g"), function(PLAIN), function({"type": "object"})]
        response = await client.post(CHAT, json={"messages": [USER], "tools": tools})
    assert response.status_code == 200
    assert response.headers[HEADER] == "tools[1]"
    prompt = TOKENIZER.decode(engine.admitted[0].prompts[0])
    assert prompt.count('"f"') == 1
