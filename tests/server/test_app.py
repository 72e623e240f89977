"""The whole app in process, around a stub engine: what no single part shows."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.outputs import Phase
from server.app import ROUTERS, create_app
from server.routes.dashboard import PAGE_PATHS
from server.settings import load
from tests.server.harness import eventually
from tests.server.process import ROOT
from tests.server.stub_engine import StubEngine

ROUTES = sorted({(method, route.path) for router in ROUTERS for route in router.routes for method in route.methods})


def client_of(engine: StubEngine, **flags: Any) -> httpx.AsyncClient:
    app = create_app(load(flags), engine)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(StubEngine(interval_s=0.001, ready=True)) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert ".py" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/no/such/path", 404),
        ("POST", "/v1/no-such-path", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/completions/", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/docs", 404),
        ("POST", "/openapi.json", 405),
    ],
)
async def test_errors_have_one_shape(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    response = await client.send(client.build_request(method, "http://test" + path))
    assert response.status_code == status
    error_of(response)
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "body", [b"{:", b"", b"[]", b'"x"', b"null", b"{}", b'{"model": }', b"\xff\xfe", b"[" * 100_000]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_malformed_bodies_are_the_clients_fault(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    response = await client.post(path, content=body)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


async def test_a_body_above_the_limit_is_413() -> None:
    async with client_of(StubEngine(ready=True), max_body_size="1KiB") as client:
        response = await client.post("/v1/completions", json={"prompt": "x" * 2000})
        assert response.status_code == 413
        error_of(response)


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_is_guarded_but_the_open_ones(method: str, path: str) -> None:
    async with client_of(StubEngine(ready=True), api_key="hunter2") as client:
        response = await client.request(method, path.replace("{", "").replace("}", ""))
        if path in ("/health", *PAGE_PATHS):
            assert response.status_code == 200
        else:
            assert response.status_code == 401
            if path.startswith("/v1/messages"):
                assert response.json()["error"]["type"] == "authentication_error"
            else:
                error_of(response)
        assert "hunter2" not in response.text


async def test_metrics_can_be_open_beside_keys() -> None:
    async with client_of(StubEngine(ready=True), api_key="k", metrics_auth=False) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/metrics/")).status_code == 401


async def test_cors_is_off_unless_asked_for_and_then_needs_no_key_to_ask() -> None:
    ask = {"Origin": "http://page.test", "Access-Control-Request-Method": "POST"}
    async with client_of(StubEngine(ready=True)) as client:
        response = await client.options("/v1/completions", headers=ask)
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers
        assert (await client.post("/v1/completions", headers={"Origin": "http://page.test"})).status_code == 403
    async with client_of(StubEngine(ready=True), cors_origins="http://page.test", api_key="k") as client:
        response = await client.options("/v1/completions", headers=ask)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://page.test"
        assert (await client.options("/v1/completions", headers=ask | {"Origin": "http://x.test"})).status_code == 400


async def test_every_answer_tells_browsers_what_they_may_do_with_it(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/v1/models", "/no/such/path", "/metrics"):
        headers = (await client.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("phase", "hung", "status", "word"),
    [
        (Phase.STARTING, False, 503, "starting"),
        (Phase.READY, False, 200, "ready"),
        (Phase.READY, True, 503, "hung"),
        (Phase.DRAINING, False, 503, "draining"),
        (Phase.DRAINING, True, 503, "draining"),
        (Phase.DEAD, False, 503, "dead"),
    ],
)
async def test_health(phase: Phase, hung: bool, status: int, word: str) -> None:
    engine = StubEngine(ready=True)
    engine.phase, engine.hung = phase, hung
    async with client_of(engine) as client:
        response = await client.get("/health")
    assert (response.status_code, response.json()) == (status, {"status": word})


async def test_version_spells_out_the_numeric_profile() -> None:
    async with client_of(StubEngine(ready=True)) as client:
        facts = (await client.get("/version")).json()
    assert facts["system_fingerprint"] == "fp_stub"
    assert facts["numeric_profile"] == {"device": "none"}
    assert facts["batch_invariant"] is True
    async with client_of(StubEngine()) as client:
        assert "torch" in (await client.get("/version")).json(), "answers while the model loads"


async def test_version_says_when_answers_may_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StubEngine(ready=True)
    depends = replace(engine.model_info, batch_invariant=False)
    monkeypatch.setattr(StubEngine, "model_info", depends)
    async with client_of(engine) as client:
        assert (await client.get("/version")).json()["batch_invariant"] is False


async def metrics_of(client: httpx.AsyncClient) -> dict[tuple[str, tuple[str, ...]], float]:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def test_token_counters_rise_by_what_usage_says(client: httpx.AsyncClient) -> None:
    before = await metrics_of(client)
    usage = []
    for body in ({"prompt": ["a", "bcd"], "n": 2}, {"prompt": "x", "stop": "mill"}, {"prompt": "y", "max_tokens": 1}):
        response = await client.post("/v1/completions", json={"max_tokens": 12, **body})
        assert response.status_code == 200
        usage.append(response.json()["usage"])
    after = await metrics_of(client)

    def risen(name: str) -> float:
        return after["pagemill_" + name, ()] - before["pagemill_" + name, ()]

    assert risen("generation_tokens_total") == sum(u["completion_tokens"] for u in usage)
    assert risen("prompt_tokens_total") == sum(u["prompt_tokens"] for u in usage)
    assert risen("time_to_first_token_seconds_count") == 6
    assert risen("e2e_request_latency_seconds_count") == 6
    assert risen("inter_token_latency_seconds_count") > 0
    assert after["pagemill_request_success_total", ("length",)] == 5
    assert after["pagemill_request_success_total", ("stop",)] == 1


async def test_no_client_text_becomes_a_label(client: httpx.AsyncClient) -> None:
    before = await metrics_of(client)
    for index in range(40):
        await client.post("/v1/completions", json={"model": f"rand-{index}", "prompt": "x"})
        await client.get(f"/no/such/{index}")
    after = await metrics_of(client)
    assert set(after) - set(before) == {("pagemill_errors_total", ("404",))}


async def test_a_plain_request_whose_client_leaves_is_aborted() -> None:
    engine = StubEngine(ready=True)
    async with client_of(engine) as client:
        task = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4000}))
        await eventually(lambda: engine._open)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: engine.num_aborted == 1)
        assert (await metrics_of(client))["pagemill_num_requests_running", ()] == 0


def test_the_app_does_not_import_torch() -> None:
    program = (
        "import sys, server.app, server.lifecycle; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
