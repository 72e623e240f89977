"""What a request says about the form of its text: which fields, which bounds, and who is told what."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engine.sampling_params import StructuredOutput
from server.app import create_app
from server.parsers.grammar import enforceable
from server.protocol.completions import CompletionRequest
from server.protocol.errors import InvalidRequest
from server.protocol.parsing import parse
from server.protocol.structured import structured_output
from server.settings import Settings
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import client_of, error_of, eventually

TOKENIZER = small_tokenizer()
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}


def read(**fields: Any) -> StructuredOutput | None:
    return structured_output(parse(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest))


def named(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "response_format"),
        ({"response_format": named(SCHEMA)}, "json", "response_format.json_schema.schema"),
        (
            {"response_format": named(SCHEMA, strict=True, description="d")},
            "json",
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json", "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, "json", "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "é"]}}, "choice", "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", "structured_outputs.grammar"),
        ({"guided_json": SCHEMA}, "json", "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json", "guided_json"),
        ({"guided_regex": "a+"}, "regex", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, "lark", "guided_grammar"),
    ],
)
def test_every_spelling_is_read(fields: dict[str, Any], kind: str, param: str) -> None:
    structured = read(**fields)
    assert structured is not None
    assert (structured.kind, structured.param) == (kind, param)
    if kind == "json":
        assert json.loads(structured.source) == SCHEMA


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_no_form_is_none(fields: dict[str, Any]) -> None:
    assert read(**fields) is None


def test_equal_forms_are_one_whatever_field_they_came_from() -> None:
    assert read(guided_regex="a+") == read(structured_outputs={"regex": "a+"})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": 5}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": named(SCHEMA, name="a b")}, "response_format.json_schema.name"),
        ({"response_format": named(SCHEMA, name="n" * 65)}, "response_format.json_schema.name"),
        ({"response_format": named(SCHEMA, strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": named(None)}, "response_format.json_schema.schema"),
        ({"response_format": named([1])}, "response_format.json_schema.schema"),
        ({"response_format": named(nested(300))}, "response_format"),
        ({"response_format": named("{}")}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"yaml": 1}}, "structured_outputs.yaml"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 10_001}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_malformed_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_bad_grammar_is_a_plain_400_also_for_a_stream(streamed: bool) -> None:
    engine = FakeEngine(says("text", TOKENIZER), tokenizer=TOKENIZER)
    body = {"prompt": "x", "guided_regex": "bad", "stream": streamed}
    async with client_of(engine) as client:
        error = error_of(await client.post("/v1/completions", json=body))
        metrics = (await client.get("/metrics")).text
    assert error["param"] == "guided_regex"
    assert not engine.admitted
    assert "pagemill_grammar_failures_total 1.0" in metrics


async def test_the_form_reaches_the_engine_compiled_first() -> None:
    engine = FakeEngine(says("a", TOKENIZER), tokenizer=TOKENIZER)
    async with client_of(engine) as client:
        for _ in range(2):
            assert (await client.post("/v1/completions", json={"prompt": "x", "guided_regex": "a"})).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert engine.compiled == [StructuredOutput("regex", "a")] * 2
    assert [admitted.params.structured for admitted in engine.admitted] == engine.compiled
    assert "pagemill_grammar_cache_hits_total 1.0" in metrics
    assert "pagemill_grammar_compile_seconds_count 1.0" in metrics


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/completions", {"prompt": "x"}, "guided_regex"),
        ("/v1/chat/completions", CHAT, "guided_regex"),
        ("/v1/responses", {"input": "x"}, "text.format.schema"),
        ("/v1/messages", CHAT | {"max_tokens": 9}, None),
    ],
)
async def test_a_form_that_fails_half_way_is_the_clients_fault(
    path: str, body: dict[str, Any], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain a 400 that names the field; in a stream an error event of the same type. None is an error of ours."""
    engine = FakeEngine(says("a long answer", TOKENIZER), tokenizer=TOKENIZER)
    engine.fail_after = 2
    engine.fault_of = "response_format.json_schema.schema" if path == "/v1/responses" else "guided_regex"
    async with client_of(engine) as client:
        refused = await client.post(path, json=body)
        streamed = await client.post(path, json=body | {"stream": True})
        metrics = (await client.get("/metrics")).text
    plain = refused.json()["error"]
    assert refused.status_code == 400
    assert plain["type"] == "invalid_request_error"
    assert plain.get("param") == told
    assert "too complex" in plain["message"]
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    error = next(event["error"] for event in events if "error" in event)
    assert (error["type"], error["message"], error.get("param")) == (plain["type"], plain["message"], told)
    assert 'errors_total{code="400"} 2.0' in metrics
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_formats_that_nobody_can_check_are_annotations() -> None:
    schema = {
        "properties": {
            "format": {"type": "string", "format": "uint64"},
            "day": {"type": "string", "format": "date"},
            "const": {"anyOf": [{"type": "string", "format": "uri-template"}, {"type": "null"}]},
        },
        "const": {"format": "uint64"},
        "type": "object",
    }
    assert enforceable(schema) == {
        "properties": {
            "format": {"type": "string"},
            "day": {"type": "string", "format": "date"},
            "const": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "const": {"format": "uint64"},
        "type": "object",
    }


async def test_who_leaves_while_a_grammar_compiles_is_not_waited_for() -> None:
    engine = FakeEngine(says("a", TOKENIZER), tokenizer=TOKENIZER)
    left: list[bool] = []

    async def compile_for_ever(structured: StructuredOutput, client: str = "") -> bool:
        try:
            await asyncio.Event().wait()
        finally:
            left.append(True)
        return True

    engine.compile = compile_for_ever  # type: ignore[method-assign]
    body = json.dumps({"prompt": "a", "structured_outputs": {"choice": ["a"]}}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return messages.pop() if messages else {"type": "http.disconnect"}

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"},
        "headers": [(b"content-length", str(len(body)).encode())], "server": ("test", 80), "client": ("test", 1),
    }  # fmt: skip
    await create_app(Settings(), engine)(scope, receive, send)
    assert sent[0]["status"] == 499
    await eventually(lambda: left)


async def test_a_client_is_its_key_in_whatever_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, clients = FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER), []

    async def compile(structured: StructuredOutput, client: str = "") -> bool:
        clients.append(client)
        return True

    monkeypatch.setattr(engine, "compile", compile)
    keys = ("sk-one", "sk-two")
    body = {"prompt": "Hi", "max_tokens": 1, "guided_regex": "a+"}
    async with client_of(engine, api_key=keys) as client:
        for headers in (
            {"authorization": "Bearer sk-one"},
            {"authorization": "bearer sk-one"},
            {"x-api-key": "sk-one"},
            {"authorization": "Bearer made-up", "x-api-key": "sk-one"},
            {"authorization": "Basic made-up", "x-api-key": "sk-one"},
            {"authorization": "Bearer sk-two"},
        ):
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert len(set(clients[:-1])) == 1
    assert clients[-1] != clients[0]
    assert all("sk-" not in name for name in clients)
