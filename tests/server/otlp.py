"""A collector of traces: takes OTLP over HTTP on a free port, as collectors do, and keeps the spans."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Span:
    """ids in hex; times are Unix nanoseconds; status: 0 unset, 1 ok, 2 error."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    start_ns: int
    end_ns: int
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any] = field(repr=False)


class Collector:
    """status: what it answers. paths: where spans were sent."""

    def __init__(self) -> None:
        self.status = 200
        self.paths: list[str] = []
        self.num_posts = 0
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.num_posts += 1
                if collector.status == 200:
                    collector.paths.append(self.path)
                    collector.spans += parsed(body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def requests(self) -> list[Span]:
        """The server spans, by their start."""
        return sorted((span for span in self.spans if span.kind == 2), key=lambda span: span.start_ns)

    def parts(self, span: Span) -> list[Span]:
        """Its children, by their start."""
        below = [each for each in self.spans if each.parent_id == span.span_id]
        return sorted(below, key=lambda each: (each.start_ns, each.end_ns))

    def wait_for(self, count: int) -> None:
        """Until that many server spans have come."""
        until = time.monotonic() + 20
        while len(self.requests()) < count:
            assert time.monotonic() < until, self.spans
            time.sleep(0.01)


def parsed(body: bytes) -> list[Span]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # the extra

    request = ExportTraceServiceRequest.FromString(body)
    return [
        Span(
            name=span.name,
            kind=span.kind,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            trace_state=span.trace_state,
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            status=span.status.code,
            attributes=facts(span.attributes),
            resource=facts(group.resource.attributes),
        )
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def facts(attributes: Any) -> dict[str, Any]:
    return {each.key: value(each.value) for each in attributes}


def value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(each) for each in any_value.array_value.values]
    return getattr(any_value, kind)
