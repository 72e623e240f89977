"""/openapi.json names every route, the schema of each body and the shape of errors."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.routing import Route

from server.app import ROUTERS
from server.routes.dashboard import EVENTS_PATH, PAGE_PATHS
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import client_of

TOKENIZER = small_tokenizer()
USER = {"role": "user", "content": "a"}


def engine() -> FakeEngine:
    return FakeEngine(says("x", TOKENIZER), tokenizer=TOKENIZER)


async def described() -> dict[str, Any]:
    async with client_of(engine()) as client:
        response = await client.get("/openapi.json")
        assert (await client.get("/openapi.json")).content == response.content
    assert response.status_code == 200
    return dict(response.json())


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


async def test_every_route_is_described() -> None:
    paths = (await described())["paths"]
    for route in (route for router in ROUTERS for route in router.routes):
        assert isinstance(route, Route)
        if route.path in ("/openapi.json", *PAGE_PATHS, EVENTS_PATH) or route.path.startswith("/admin/"):
            continue
        operations = paths[route.path.replace(":path}", "}")]
        for method in (route.methods or set()) - {"HEAD"}:
            operation = operations[method.lower()]
            assert {"4XX", "5XX"} <= set(operation["responses"])
            assert ("requestBody" in operation) == (method == "POST" and not route.path.endswith("/cancel"))


async def test_a_page_of_items_has_parameters() -> None:
    paths = (await described())["paths"]
    parameters = paths["/v1/responses/{response_id}/input_items"]["get"]["parameters"]
    assert [each["name"] for each in parameters] == ["response_id", "limit", "order", "after", "include[]"]


async def test_a_response_can_be_streamed() -> None:
    operation = (await described())["paths"]["/v1/responses/{response_id}"]["get"]
    names = [each["name"] for each in operation["parameters"]]
    assert names == ["response_id", "stream", "starting_after", "include[]"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


async def test_every_reference_leads_somewhere() -> None:
    document = await described()
    found = references(document)
    assert len(found) > 10
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]


async def test_schemas_say_what_is_taken() -> None:
    schemas = (await described())["components"]["schemas"]
    chat = schemas["ChatRequest"]
    assert chat["required"] == ["messages"]
    assert chat["properties"]["top_p"] | {"title": ""} == {
        "anyOf": [{"type": "number"}, {"type": "null"}], "minimum": 0, "maximum": 1, "title": "",
    }  # fmt: skip
    assert chat["properties"]["user"] == {"description": "Accepted; without effect."}
    assert {"type": "string"} in schemas["ChatRequest.Message"]["properties"]["content"]["anyOf"]
    assert len(schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]) == 4


async def test_schemas_say_what_is_read_of_loose_objects() -> None:
    schemas = (await described())["components"]["schemas"]
    content = schemas["MessagesRequest"]["properties"]["messages"]["items"]["properties"]["content"]
    *blocks, other = content["anyOf"][0]["items"]["anyOf"]
    fields = {block["properties"]["type"]["const"]: set(block["properties"]) for block in blocks}
    assert fields["tool_result"] >= {"tool_use_id", "content", "is_error", "cache_control"}
    assert "properties" not in other
    *items, _ = schemas["ResponsesRequest"]["properties"]["input"]["anyOf"][1]["items"]["anyOf"]
    assert "function_call_output" in {item["properties"]["type"]["const"] for item in items}
    form = schemas["ChatRequest"]["properties"]["response_format"]["anyOf"][0]
    assert set(form["properties"]["json_schema"]["properties"]) == {"name", "schema", "strict", "description"}
    assert schemas["MessagesRequest"]["properties"]["system"]["anyOf"][0] == {"type": "string"}


async def test_it_is_guarded() -> None:
    async with client_of(engine(), api_key=("key",)) as client:
        assert (await client.get("/openapi.json")).status_code == 401
        assert (await client.get("/openapi.json", headers={"Authorization": "Bearer key"})).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value", "most"),
    [
        ("/v1/completions", "prompt", ["a"], 1024),
        ("/v1/completions", "n", 1, 128),
        ("/v1/completions", "stop", ["a"], 64),
        ("/v1/completions", "stop", "a", 4096),
        ("/v1/chat/completions", "messages", [USER], 4096),
        ("/v1/chat/completions", "tools", [{"type": "function", "function": {"name": "f"}}], 1024),
    ],
)
async def test_what_one_request_may_hold_is_bounded(path: str, field: str, value: Any, most: int) -> None:
    served = engine()
    body = {"prompt": "a", "max_tokens": 1} if path == "/v1/completions" else {"messages": [USER], "max_tokens": 1}
    async with client_of(served) as client:
        refused = await client.post(path, json=body | {field: value * (most + 1)})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field
        assert served.admitted == []
        if field != "messages":  # so many are more than the context of this model
            assert (await client.post(path, json=body | {field: value * most})).status_code == 200
