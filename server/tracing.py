"""OpenTelemetry traces: one server span per request, below it a span for each part of its time. Only with
--otlp-traces-endpoint and the extra `otel`; without it nothing here is imported and no request is looked at twice.

Spans are made on the event loop from times that are known anyway, and leave through the library's own queue, thread
and exporter: a collector that does not answer costs the spans and one log line. Names and attributes are those of
OpenTelemetry's conventions for HTTP servers and generative AI; where these have none, those that vLLM's traces have.
No text of a request or an answer is in them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Scope

from engine.config import StartError
from engine.sampling_params import SamplingParams
from server.protocol.errors import CLIENT_CLOSED

logger = logging.getLogger("pagemill.server")

TRACES_PATH = "/v1/traces"
FLUSH_S = 3.0  # what is left leaves within this time at the end, or not at all
GIVE_UP_S = 0.5  # an attempt that was given up has this long to say so
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))
OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}  # every other route: chat
GENERATION_FAILED = "generation_failed"  # in the background: there is no status that would tell
PARTS = ("prepare", "queue", "prefill", "decode")
LOUD = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal", "opentelemetry.sdk.trace")


class Tracing:
    """One application's. endpoint: where a collector takes OTLP over HTTP. quiet_paths: not traced."""

    def __init__(self, endpoint: str, version: str, quiet_paths: Collection[str]) -> None:
        """Raises StartError where the extra is not installed."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            told = f"--otlp-traces-endpoint needs the extra otel: pip install 'pagemill[otel]' ({error})."
            raise StartError(told) from None
        for name in LOUD:  # a line for every batch that is not taken; `_Exporter` says it once
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.api: Any = trace
        self._quiet_paths = frozenset(quiet_paths)
        self._propagator: Any = TraceContextTextMapPropagator()
        self._exporter = _Exporter(OTLPSpanExporter(endpoint=traces_url(endpoint)), endpoint)
        resource = Resource.create({"service.name": "pagemill", "service.version": version})
        self._provider: Any = TracerProvider(resource=resource, shutdown_on_exit=False)  # `close` has a time limit
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer: Any = self._provider.get_tracer("pagemill", version)

    def begin(self, scope: Scope, arrival_s: float) -> Trace | None:
        """A request arrived at `arrival_s` (time.monotonic). None: it is not traced, or its sender's traceparent says
        that this trace is not recorded."""
        if scope["path"] in self._quiet_paths:
            return None
        epoch_ns = time.time_ns() - time.monotonic_ns()
        span = self.tracer.start_span(
            _method(scope),
            context=self._propagator.extract(_context_headers(scope)),
            kind=self.api.SpanKind.SERVER,
            start_time=epoch_ns + int(arrival_s * 1e9),
        )
        return Trace(self, span, arrival_s, epoch_ns) if span.is_recording() else None

    def close(self) -> None:
        """Send what is left, for at most FLUSH_S. Blocks."""
        closing = threading.Thread(target=self._provider.shutdown, name="pagemill-traces", daemon=True)
        closing.start()
        closing.join(FLUSH_S)
        self._exporter.give_up()
        closing.join(GIVE_UP_S)


class Trace:
    """One request's span. It ends with the HTTP answer, or with the generation where that outlasts it."""

    __slots__ = ("_admitted_s", "_arrival_s", "_epoch_ns", "_error", "_failed", "_num_open", "_span", "_tracing")

    def __init__(self, tracing: Tracing, span: Any, arrival_s: float, epoch_ns: int) -> None:
        """epoch_ns: Unix time where time.monotonic() is 0; one for all of the trace, so that its times fit."""
        self._tracing = tracing
        self._span = span
        self._arrival_s = arrival_s
        self._epoch_ns = epoch_ns
        self._admitted_s: float | None = None
        self._error = ""
        self._failed = False
        self._num_open = 1

    @property
    def id(self) -> str:
        """That of the whole trace, 32 hexadecimal digits."""
        return format(self._span.get_span_context().trace_id, "032x")

    def admitted(self, route: str, model: str, params: SamplingParams, response_id: str, asked_s: float) -> None:
        """The engine has taken it, asked at `asked_s`; `generated` must follow. model: as the answer names it."""
        self._num_open += 1
        self._admitted_s = asked_s
        operation = OPERATIONS.get(route, "chat")
        self._span.update_name(f"{operation} {model}")
        facts: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "pagemill",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        }
        if operation != "embeddings":
            facts |= _asked(params) | {"gen_ai.response.id": response_id}
        self._span.set_attributes(facts)

    def generated(
        self,
        num_prompt_tokens: int,
        num_completion_tokens: int,
        num_cached_tokens: int,
        reasons: Sequence[str],
        *,
        scheduled_s: float | None,
        first_s: float | None,
        last_s: float | None,
        failed: bool,
    ) -> None:
        """All of it is there, or nothing more comes. reasons: why each choice ended. The times are time.monotonic(),
        None where it did not come so far: the first row, first token and last token of any choice."""
        facts: dict[str, Any] = {
            "gen_ai.usage.input_tokens": num_prompt_tokens,
            "gen_ai.usage.output_tokens": num_completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": num_cached_tokens,
            "gen_ai.response.finish_reasons": list(reasons),
        }
        admitted_s = self._admitted_s
        if scheduled_s is not None and admitted_s is not None:
            facts["gen_ai.latency.time_in_queue"] = scheduled_s - admitted_s
        if first_s is not None:
            facts["gen_ai.latency.time_to_first_token"] = first_s - self._arrival_s
        self._span.set_attributes(facts)
        self._failed = failed
        self._split((admitted_s, scheduled_s, first_s, last_s))
        self._release()

    def failed_with(self, status: int) -> None:
        """The answer had begun, so its status line does not tell. status: what it would have been."""
        self._error = str(status)

    def finish(self, scope: Scope, status: int, *, is_complete: bool) -> None:
        """The HTTP answer is over. is_complete: the client got all of it."""
        route, method = getattr(scope.get("route"), "path", ""), _method(scope)
        facts: dict[str, Any] = {
            "http.request.method": method,
            "http.response.status_code": status,
            "url.scheme": scope.get("scheme", "http"),
            "pagemill.request_id": str(scope.get("state", {}).get("request_id", "")),
        }
        if route:
            facts["http.route"] = route
        if self._admitted_s is None:
            self._span.update_name(f"{method} {route}".rstrip())
        account = scope.get("state", {}).get("account")
        if account is not None:
            facts["pagemill.client"] = account.client.name
        self._span.set_attributes(facts)
        if status == CLIENT_CLOSED or (status < 400 and not is_complete):
            self._error = self._error or "client_disconnected"
        elif status >= 400:
            self._error = str(status)
        self._release()

    def _split(self, marks: Sequence[float | None]) -> None:
        """A child for each part of the time that it came through. marks: where each of PARTS ended."""
        context = self._tracing.api.set_span_in_context(self._span)
        start_s = self._arrival_s
        for name, mark in zip(PARTS, marks, strict=True):
            if mark is None:
                return
            end_s = max(start_s, mark)
            child = self._tracing.tracer.start_span(name, context=context, start_time=self._unix_ns(start_s))
            child.end(self._unix_ns(end_s))
            start_s = end_s

    def _unix_ns(self, monotonic_s: float) -> int:
        return self._epoch_ns + int(monotonic_s * 1e9)

    def _release(self) -> None:
        self._num_open -= 1
        if self._num_open:
            return
        api, error = self._tracing.api, self._error or (GENERATION_FAILED if self._failed else "")
        if error:
            self._span.set_attribute("error.type", error)
        if error == GENERATION_FAILED or error.startswith("5"):  # what a client did wrong is no error of the server
            self._span.set_status(api.Status(api.StatusCode.ERROR))
        self._span.end(self._unix_ns(time.monotonic()))


class _Exporter:
    """The library's, which says once that the collector does not take what it is sent, and once that it does again."""

    def __init__(self, inner: Any, endpoint: str) -> None:
        self._inner = inner
        parts = urlsplit(endpoint)
        self._shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # without a password
        self._is_failing = False
        self._is_closed = False

    def export(self, spans: Sequence[Any]) -> Any:
        result = self._inner.export(spans)
        is_failing = result.name != "SUCCESS"
        if is_failing and not self._is_failing:
            logger.warning("%s does not take traces: they are dropped until it does", self._shown)
        elif self._is_failing and not is_failing:
            logger.info("%s takes traces again", self._shown)
        self._is_failing = is_failing
        return result

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return bool(self._inner.force_flush(timeout_millis))

    def shutdown(self) -> None:
        self.give_up()

    def give_up(self) -> None:
        """No more attempts."""
        if not self._is_closed:
            self._is_closed = True
            self._inner.shutdown()


def traces_url(endpoint: str) -> str:
    """The collector's address with the path where it takes traces, unless another is given."""
    parts = urlsplit(endpoint)
    return parts._replace(path=TRACES_PATH).geturl() if parts.path in ("", "/") else endpoint


def _method(scope: Scope) -> str:
    method: str = scope["method"]
    return method if method in METHODS else "_OTHER"


def _context_headers(scope: Scope) -> dict[str, list[str]]:
    """The W3C context; two contexts are none."""
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        if name in (b"traceparent", b"tracestate"):
            found.setdefault(name.decode(), []).append(value.decode("latin-1"))
    return found if len(found.get("traceparent", ())) == 1 else {}


def _asked(params: SamplingParams) -> dict[str, Any]:
    """What the client, or the model's defaults, asked of the sampler."""
    facts: dict[str, Any] = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
    }
    return {name: value for name, value in facts.items() if value is not None}
