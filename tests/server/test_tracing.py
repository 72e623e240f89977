"""Traces, as a collector gets them; needs the extra otel."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from engine.config import StartError
from server import middleware, tracing
from server.adapters import LoraModule
from server.app import create_app
from server.settings import Settings, SettingsError, load
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.otlp import Collector, Span
from tests.server.process import free_port, stub_server

HAS_EXTRA = importlib.util.find_spec("opentelemetry.exporter") is not None
needs_extra = pytest.mark.skipif(not HAS_EXTRA, reason="the extra otel is not installed")

SECRET = "never told to anybody"
CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 9, "temperature": 0.5, "top_p": 0.9}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1,b=2"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_EXPORTER_OTLP_HEADERS", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


class Served:
    def __init__(self, app: FastAPI, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        self.app, self.client, self.engine = app, client, engine


@asynccontextmanager
async def served(collector: Collector, **settings: Any) -> AsyncIterator[Served]:
    """An app whose traces are all with the collector when the block has ended."""
    tokenizer = small_tokenizer()
    engine = FakeEngine(says("Hello there", tokenizer), tokenizer=tokenizer, pause_s=0.001)
    app = create_app(Settings(otlp_traces_endpoint=collector.url, **settings), engine)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield Served(app, client, engine)
    await asyncio.to_thread(app.state.tracing.close)


def told(spans: list[Span]) -> str:
    return " ".join(f"{span.name} {span.attributes} {span.resource}" for span in spans)


@needs_extra
async def test_strangers_do_not_drown_the_traces(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "STRANGERS_PER_SECOND", 2)
    async with served(collector, api_key=("key",)) as here:
        for _ in range(100):
            assert (await here.client.get("/v1/models")).status_code == 401
        for _ in range(5):
            (await here.client.get("/v1/models", headers={"Authorization": "Bearer key"})).raise_for_status()
    told = [span.attributes["http.response.status_code"] for span in collector.requests()]
    assert told.count(200) == 5
    assert 2 <= told.count(401) < 50


@needs_extra
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_is_a_span_with_its_parts(collector: Collector, streamed: bool) -> None:
    before = time.time_ns()
    async with served(collector) as here:
        response = await here.client.post("/v1/chat/completions", json=CHAT | {"stream": streamed})
        assert response.status_code == 200
    (span,) = collector.requests()
    assert (span.name, span.parent_id, span.status) == ("chat fake-model", "", 0)
    assert before <= span.start_ns < span.end_ns <= time.time_ns()
    latencies = {key: span.attributes.pop(key) for key in list(span.attributes) if "latency" in key}
    assert set(latencies) == {"gen_ai.latency.time_to_first_token"}, "the fake engine does not tell when it began"
    assert 0 < latencies["gen_ai.latency.time_to_first_token"] < (span.end_ns - span.start_ns) / 1e9
    answer_id = response.headers["x-request-id"]
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pagemill",
        "gen_ai.request.model": "fake-model",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.response.model": "fake-model",
        "gen_ai.response.id": answer_id,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": len(here.engine.admitted[0].prompts[0]),
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "pagemill.request_id": answer_id,
    }
    assert span.resource["service.name"] == "pagemill"
    assert collector.paths[0] == "/v1/traces"
    assert SECRET not in told(collector.spans)
    assert "Hello" not in told(collector.spans)


@needs_extra
async def test_the_parts_of_its_time_follow_each_other(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(collector) as here:
        generate = here.engine.generate

        def begun(*args: Any, **options: Any) -> Any:
            stream = generate(*args, **options)
            stream.scheduled_s = time.monotonic() + 0.001
            time.sleep(0.003)  # the first token comes after it
            return stream

        monkeypatch.setattr(here.engine, "generate", begun)
        await here.client.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 4})
    (span,) = collector.requests()
    parts = collector.parts(span)
    assert [part.name for part in parts] == ["prepare", "queue", "prefill", "decode"]
    assert span.name == "text_completion fake-model"
    assert span.start_ns == parts[0].start_ns
    for one, next_one in pairwise(parts):
        assert one.end_ns == next_one.start_ns
        assert one.trace_id == span.trace_id
    assert parts[-1].end_ns <= span.end_ns
    assert parts[1].end_ns - parts[1].start_ns == pytest.approx(
        1e9 * span.attributes["gen_ai.latency.time_in_queue"], abs=1000
    )


@needs_extra
async def test_a_clients_context_is_kept_and_its_decision_too(collector: Collector) -> None:
    async with served(collector) as here:
        await here.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=SAMPLED)
        unsampled = SAMPLED | {"traceparent": SAMPLED["traceparent"][:-2] + "00"}
        await here.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=unsampled)
        twice = [("traceparent", SAMPLED["traceparent"])] * 2
        for wrong in (twice, [("traceparent", "nonsense")], [("tracestate", "a=1")]):
            await here.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=wrong)
    first, *others = collector.requests()
    assert (first.trace_id, first.parent_id, first.trace_state) == (TRACE, PARENT, "a=1,b=2")
    assert len(others) == 3, "what the client does not record is not recorded; what is no context begins a trace"
    assert TRACE not in {span.trace_id for span in others}
    assert {(span.parent_id, span.trace_state) for span in others} == {("", "")}


@needs_extra
async def test_the_log_line_names_the_trace(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagemill")
    async with served(collector) as here:
        await here.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=SAMPLED)
    (line,) = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert line["trace"] == TRACE


@needs_extra
async def test_a_span_names_the_adapter_as_the_model_that_was_asked(collector: Collector) -> None:
    modules = [LoraModule("sql", "/x")]
    async with served(collector, lora_modules=modules) as here:
        for path, body in (("/v1/completions", {"prompt": "x", "max_tokens": 1}), ("/v1/embeddings", {"input": "x"})):
            (await here.client.post(path, json=body | {"model": "sql"})).raise_for_status()
    spans = collector.requests()
    assert [span.name for span in spans] == ["text_completion sql", "embeddings sql"]
    for span in spans:
        assert span.attributes["gen_ai.request.model"] == span.attributes["gen_ai.response.model"] == "sql"


@needs_extra
async def test_choices_are_told_each(collector: Collector) -> None:
    async with served(collector) as here:
        body = {"prompt": "x", "max_tokens": 30, "n": 2, "seed": 7, "frequency_penalty": 0.25}
        usage = (await here.client.post("/v1/completions", json=body)).json()["usage"]
    (span,) = collector.requests()
    assert span.attributes["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert span.attributes["gen_ai.request.choice.count"] == 2
    assert span.attributes["gen_ai.request.seed"] == 7
    assert span.attributes["gen_ai.request.frequency_penalty"] == 0.25
    assert span.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert span.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]


@needs_extra
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_failure_is_an_error_of_the_span(collector: Collector, streamed: bool) -> None:
    async with served(collector) as here:
        here.engine.fail_after = 2
        response = await here.client.post("/v1/chat/completions", json=CHAT | {"stream": streamed})
        assert response.status_code == (200 if streamed else 500)
    (span,) = collector.requests()
    assert (span.status, span.attributes["error.type"]) == (2, "500")
    assert span.attributes["gen_ai.response.finish_reasons"] == ["error"]
    assert span.attributes["gen_ai.usage.output_tokens"] == 2
    assert "secret detail" not in told(collector.spans)


@needs_extra
@pytest.mark.parametrize(
    ("path", "body", "status", "name"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "POST /v1/completions"),
        ("/v1/completions", {"prompt": "x", "model": SECRET}, 404, "POST /v1/completions"),
        (f"/v1/{SECRET}", {}, 404, "POST"),
    ],
)
async def test_what_a_client_does_wrong_is_told_but_no_error_of_the_server(
    collector: Collector, path: str, body: dict[str, Any], status: int, name: str
) -> None:
    async with served(collector) as here:
        assert (await here.client.post(path, json=body)).status_code == status
    (span,) = collector.requests()
    assert (span.name, span.status, span.attributes["error.type"]) == (name, 0, str(status))
    assert SECRET not in told(collector.spans)


@needs_extra
async def test_what_is_asked_every_second_is_not_traced(collector: Collector) -> None:
    async with served(collector) as here:
        for path in ("/health", "/metrics", "/version", "/"):
            assert (await here.client.get(path)).status_code == 200
        await here.client.get("/v1/models")
    assert [span.name for span in collector.requests()] == ["GET /v1/models"]


@needs_extra
async def test_embeddings_and_responses_in_the_background_are_traced(collector: Collector) -> None:
    async with served(collector) as here:
        embedded = await here.client.post("/v1/embeddings", json={"input": ["one", "two"]})
        assert embedded.status_code == 200
        here.engine.pause_s = 0.02
        begun = await here.client.post("/v1/responses", json={"input": SECRET, "background": True})
        assert begun.json()["status"] == "queued"
        await asyncio.to_thread(collector.wait_for, 2)
    first, second = collector.requests()
    assert first.name == "embeddings fake-model"
    assert first.attributes["gen_ai.usage.input_tokens"] == embedded.json()["usage"]["prompt_tokens"]
    assert (second.name, second.attributes["gen_ai.response.id"]) == ("chat fake-model", begun.json()["id"])
    assert second.attributes["gen_ai.usage.output_tokens"] > 0, "the span waits for the generation"
    assert second.end_ns - second.start_ns > 20e6
    assert SECRET not in told(collector.spans)


# -- the collector -------------------------------------------------------------------------------------------------


@needs_extra
def test_a_client_that_leaves_is_told_and_all_is_sent_at_the_end(collector: Collector, tmp_path: Path) -> None:
    """Over a real connection; the queue is not due before the server ends."""
    switches = ["--set", f"otlp_traces_endpoint={collector.url}", "--interval", "0.02"]
    with stub_server(tmp_path / "log", *switches) as server:
        server.wait_for("ready")
        body = {"prompt": SECRET, "max_tokens": 2000, "stream": True}
        with (
            httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            next(response.iter_lines())
        body |= {"stream": False, "max_tokens": 2}
        assert httpx.post(server.url + "/v1/completions", json=body, trust_env=False).status_code == 200
        server.signal()
        assert server.wait() == 0
    left, complete = collector.requests()
    assert (left.status, left.attributes["error.type"]) == (0, "client_disconnected")
    assert left.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < left.attributes["gen_ai.usage.output_tokens"] < 2000
    assert "error.type" not in complete.attributes
    assert SECRET not in told(collector.spans)


@needs_extra
def test_a_collector_that_is_not_there_costs_one_line_and_no_time(tmp_path: Path) -> None:
    dead = f"http://user:password@127.0.0.1:{free_port()}"
    with stub_server(tmp_path / "log", "--set", f"otlp_traces_endpoint={dead}", "--interval", "0.001") as server:
        server.wait_for("ready")
        with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
            for _ in range(20):
                assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        server.signal()
        assert server.wait(15) == 0
        assert "Traceback" not in server.log
        assert "password" not in server.log
        assert server.log.count("opentelemetry") == 0
        assert server.log.count("does not take traces") == 1


@needs_extra
def test_a_collector_that_refuses_is_told_once_and_once_when_it_takes_again(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagemill")
    collector.status = 400
    traced = tracing.Tracing(collector.url, "0", ())

    def post(count: int) -> None:
        """One request after the other, each sent before the next begins."""
        for _ in range(count):
            before = collector.num_posts
            trace = traced.begin({"path": "/x", "method": "POST", "headers": []}, time.monotonic())
            assert trace is not None
            trace.finish({"method": "POST"}, 200, is_complete=True)
            until = time.monotonic() + 20
            while collector.num_posts == before:
                assert time.monotonic() < until
                time.sleep(0.005)

    post(3)
    collector.status = 200
    post(2)
    traced.close()
    lines = [record.message for record in caplog.records]
    assert [line.partition(" ")[2].split(":")[0] for line in lines] == ["does not take traces", "takes traces again"]
    assert len(collector.requests()) == 2, "what was refused is gone"


@needs_extra
def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "64")
    sent: list[int] = []

    class Slow:
        def export(self, spans: Any) -> Any:
            from opentelemetry.sdk.trace.export import SpanExportResult  # the extra

            sent.append(len(spans))
            time.sleep(0.2)
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None: ...

    traced = tracing.Tracing("http://127.0.0.1:1", "0", ())
    traced._exporter._inner = Slow()
    for _ in range(1000):
        trace = traced.begin({"path": "/x", "method": "POST", "headers": []}, time.monotonic())
        assert trace is not None
        trace.finish({"method": "POST"}, 200, is_complete=True)
    traced.close()
    assert 0 < sum(sent) <= 4 * 64


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1:4318", "grpc://host:4317", "http://", ""])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match="otlp-traces-endpoint"):
        load({"otlp_traces_endpoint": address})


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://host:4318", "http://host:4318/v1/traces"),
        ("https://host/", "https://host/v1/traces"),
        ("http://host:4318/v1/traces", "http://host:4318/v1/traces"),
        ("http://host/team/v1/traces", "http://host/team/v1/traces"),
    ],
)
def test_a_path_is_kept_and_none_means_the_usual_one(given: str, url: str) -> None:
    assert tracing.traces_url(given) == url


def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    tokenizer = small_tokenizer()
    engine = FakeEngine(says("x", tokenizer), tokenizer=tokenizer)
    with pytest.raises(StartError, match=r"pip install 'pagemill\[otel\]'"):
        create_app(Settings(otlp_traces_endpoint="http://127.0.0.1:4318"), engine)


async def test_off_no_request_has_a_trace() -> None:
    tokenizer = small_tokenizer()
    engine = FakeEngine(says("x", tokenizer), tokenizer=tokenizer)
    app = create_app(Settings(), engine)
    assert app.state.tracing is None
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post("/v1/completions", json={"prompt": "x"}, headers=SAMPLED)).status_code == 200


def test_off_nothing_of_it_is_imported() -> None:
    """Others may import OpenTelemetry's interface, which does nothing by itself."""
    seen = "import sys, server.app; print(*(name for name in sys.modules if name.startswith('opentelemetry.')))"
    names = subprocess.run([sys.executable, "-c", seen], check=True, capture_output=True, text=True).stdout.split()
    assert not [name for name in names if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
