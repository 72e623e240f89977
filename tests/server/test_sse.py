"""Clients that leave, silence, and what one write holds; spoken to as ASGI, without a socket in between."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from engine.outputs import Phase
from server.app import create_app
from server.middleware import SHORTCUT
from server.protocol.completion_writer import CompletionWriter
from server.settings import Settings
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import Events, eventually

TOKENIZER = small_tokenizer()


class Client:
    """One request spoken to the app by hand: it can leave, and it can take its time to read."""

    has_shortcut = False  # whether pieces of a stream may come past ASGI

    def __init__(self, engine: FakeEngine, path: str, body: dict[str, Any], **settings: Any) -> None:
        self.app = create_app(Settings(**settings), engine)
        self.gone = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.sent: list[dict[str, Any]] = []
        self.wrote = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        self._scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [],
            "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        if self.has_shortcut:
            self._scope["state"] = {SHORTCUT: self}

    async def run(self) -> None:
        await self.app(self._scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.may_read.wait()
        self.sent.append(message)
        self.wrote.set()

    @property
    def is_open(self) -> bool:
        return self.may_read.is_set() and bool(self.sent)

    def write(self, body: bytes) -> None:
        assert self.is_open
        self.sent.append({"type": "http.response.body", "body": body, "more_body": True, "past": True})
        self.wrote.set()

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message.get("body")]

    async def metric(self, name: str) -> float:
        text = self.app.state.metrics.render().decode()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"pagemill_{name} "))


@pytest.fixture(autouse=True, params=[False, True], ids=["through ASGI", "past it"])
def shortcut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(Client, "has_shortcut", request.param)
    return bool(request.param)


def engine_saying(text: str, pause_s: float = 0.005) -> FakeEngine:
    return FakeEngine(says(text, TOKENIZER), tokenizer=TOKENIZER, pause_s=pause_s, max_model_len=4096)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(path: str, stream: bool) -> None:
    engine = engine_saying("x" * 2000)
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2000, "stream": stream}
    client = Client(engine, path, body)
    task = asyncio.create_task(client.run())
    await eventually(lambda: engine.num_delivered_tokens >= 5)
    client.gone.set()
    await asyncio.wait_for(task, 2)
    assert engine.closed == [1]
    assert engine.num_delivered_tokens < 50
    assert await client.metric("client_disconnects_total") == 1
    assert await client.metric("http_in_flight") == 0
    assert 0 < await client.metric("generation_tokens_total") <= engine.num_delivered_tokens
    assert await client.metric('request_success_total{finished_reason="abort"}') == 1


async def test_a_client_that_leaves_while_a_write_waits() -> None:
    engine = engine_saying("x" * 2000)
    client = Client(engine, "/v1/completions", {"prompt": "a", "max_tokens": 2000, "stream": True})
    task = asyncio.create_task(client.run())
    await client.wrote.wait()
    client.may_read.clear()
    await asyncio.sleep(0.05)
    client.gone.set()
    await asyncio.wait_for(task, 2)
    assert engine.closed == [1]


async def test_what_came_while_a_write_waited_leaves_as_one_chunk() -> None:
    engine = engine_saying("abcdefghij" * 3)
    client = Client(engine, "/v1/completions", {"prompt": "a", "max_tokens": 100, "stream": True})
    task = asyncio.create_task(client.run())
    await eventually(lambda: client.bodies)
    client.may_read.clear()
    await asyncio.sleep(0.3)
    client.may_read.set()
    await task
    events = Events(b"".join(client.bodies).decode())
    assert events.text() == "abcdefghij" * 3
    assert len(events.chunks) < 10
    assert engine.closed == []


async def test_logprobs_keep_their_chunks_apart() -> None:
    engine = engine_saying("abcdefghij", pause_s=0)
    body = {"prompt": "a", "max_tokens": 8, "stream": True, "logprobs": 1}
    client = Client(engine, "/v1/completions", body)
    client.may_read.clear()
    task = asyncio.create_task(client.run())
    await asyncio.sleep(0.05)
    client.may_read.set()
    await task
    chunks = Events(b"".join(client.bodies).decode()).choices(0)
    assert [chunk["logprobs"]["tokens"] for chunk in chunks] == [[char] for char in "abcdefgh"]


async def test_silence_is_broken_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.front.KEEP_ALIVE_S", 0.05)
    engine = engine_saying("ab", pause_s=0.25)
    client = Client(engine, "/v1/completions", {"prompt": "a", "stream": True})
    await client.run()
    assert client.bodies.count(b": ping\n\n") >= 3
    assert Events(b"".join(client.bodies).decode()).text() == "ab"
    monkeypatch.setattr("server.front.KEEP_ALIVE_S", 0)
    quiet = Client(engine, "/v1/completions", {"prompt": "a", "stream": True})
    await quiet.run()
    assert b": ping\n\n" not in quiet.bodies


async def test_a_stream_that_talks_needs_no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.front.KEEP_ALIVE_S", 0.15)
    client = Client(engine_saying("abcdefghij" * 4), "/v1/completions",
                    {"prompt": "a", "stream": True, "max_tokens": 100})  # fmt: skip
    await client.run()
    assert b": ping\n\n" not in client.bodies


async def test_the_last_write_ends_the_answer() -> None:
    client = Client(engine_saying("ab"), "/v1/completions", {"prompt": "a", "stream": True})
    await client.run()
    assert [message.get("more_body", True) for message in client.sent[1:]] == [True, True, False]
    assert client.bodies[-1].endswith(b"data: [DONE]\n\n")
    headers = dict(client.sent[0]["headers"])
    assert headers[b"cache-control"] == b"no-cache"
    assert b"content-length" not in headers


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_cut_by_a_shutdown_are_told_so(stream: bool) -> None:
    engine = engine_saying("x" * 100)
    engine.fail_after = 5
    client = Client(engine, "/v1/completions", {"prompt": "a", "max_tokens": 100, "stream": stream})
    task = asyncio.create_task(client.run())
    await eventually(lambda: engine.admitted)
    engine.phase = Phase.DRAINING
    await task
    if stream:
        *_, last, done = b"".join(client.bodies).decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert client.sent[0]["status"] == 503
        error = json.loads(client.bodies[0])["error"]
    assert error["code"] == "server_shutting_down"
    assert await client.metric('request_success_total{finished_reason="error"}') == 1


async def test_metrics_count_what_usage_says() -> None:
    engine = engine_saying("one. two. three", pause_s=0)
    body = {"prompt": ["a", "bc"], "n": 2, "max_tokens": 50, "stop": ". "}
    client = Client(engine, "/v1/completions", body)
    await client.run()
    usage = json.loads(client.bodies[0])["usage"]
    assert usage["completion_tokens"] == 4 * len("one. ")
    assert await client.metric("prompt_tokens_total") == usage["prompt_tokens"] == 3
    assert await client.metric("generation_tokens_total") == usage["completion_tokens"]
    assert await client.metric("prompt_tokens_cached_total") == usage["prompt_tokens_details"]["cached_tokens"] == 4
    assert await client.metric("time_to_first_token_seconds_count") == 4
    assert await client.metric("inter_token_latency_seconds_count") == 4 * (len("one. ") - 1)
    assert await client.metric('request_success_total{finished_reason="stop"}') == 4


@pytest.mark.parametrize(
    ("num_tokens", "logprobs", "beside"), [(10, 2, False), (400, 2, True), (400, None, False), (2100, None, True)]
)
async def test_a_long_plain_answer_is_rendered_beside_the_event_loop(
    num_tokens: int, logprobs: int | None, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    render, threads = CompletionWriter.answer, []

    def answer(*arguments: Any) -> bytes:
        threads.append(threading.current_thread())
        return render(*arguments)

    monkeypatch.setattr(CompletionWriter, "answer", answer)
    body = {"prompt": "a", "max_tokens": num_tokens, "logprobs": logprobs}
    client = Client(engine_saying("x" * num_tokens, pause_s=0), "/v1/completions", body)
    await asyncio.wait_for(client.run(), 20)
    choice = json.loads(client.bodies[0])["choices"][0]
    assert choice["text"] == "x" * num_tokens
    assert logprobs is None or len(choice["logprobs"]["tokens"]) == num_tokens
    assert [thread is not threading.main_thread() for thread in threads] == [beside]


@pytest.mark.parametrize(("num_echoed", "beside"), [(10, False), (100, True)])
async def test_only_the_echo_of_a_long_prompt_is_rendered_beside_the_event_loop(
    num_echoed: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    render, threads = CompletionWriter.event, []

    def event(*arguments: Any) -> bytes:
        threads.append(threading.current_thread())
        return render(*arguments)

    monkeypatch.setattr(CompletionWriter, "event", event)
    body = {"prompt": "p" * num_echoed, "max_tokens": 20, "logprobs": 0, "echo": True, "stream": True}
    client = Client(engine_saying("abcdefghij" * 2), "/v1/completions", body)
    await asyncio.wait_for(client.run(), 20)
    assert Events(b"".join(client.bodies).decode()).text() == "p" * num_echoed + "abcdefghij" * 2
    assert (threads[0] is not threading.main_thread()) == beside
    assert threads[-1] is threading.main_thread()


CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100, "stream": True}


async def test_most_of_a_stream_goes_past_asgi_where_it_can(shortcut: bool) -> None:
    for path, body in (("/v1/completions", {"prompt": "a", "stream": True}), ("/v1/chat/completions", CHAT)):
        client = Client(engine_saying("abcdefghij" * 3), path, body | {"max_tokens": 100})
        await client.run()
        past = [message for message in client.sent if message.get("past")]
        assert len(past) >= 25 if shortcut else not past
        events = Events(b"".join(client.bodies).decode())
        assert events.text() == "abcdefghij" * 3
        assert events.finish() == "stop"


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stop_string_ends_the_stream_whichever_way_it_goes(n: int) -> None:
    body = {"prompt": "a", "n": n, "max_tokens": 100, "stop": ["gh"], "stream": True}
    body["stream_options"] = {"include_usage": True}
    engine = engine_saying("abcdefghij" * 3)
    client = Client(engine, "/v1/completions", body)
    await asyncio.wait_for(client.run(), 5)
    events = Events(b"".join(client.bodies).decode())
    for index in range(n):
        assert events.text(index) == "abcdef"
        assert events.finish(index) == "stop"
    assert events.usage is not None
    assert events.usage["completion_tokens"] == 8 * n
    assert sorted(engine.finished) == [(0, index) for index in range(n)]
    assert client.bodies[-1].endswith(b"data: [DONE]\n\n")


async def test_pieces_that_cannot_be_rendered_end_the_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    render, pieces = CompletionWriter.event, []

    def event(writer: CompletionWriter, index: int, piece: Any) -> bytes:
        pieces.append(piece)
        if len(pieces) == 5:
            raise RuntimeError("secret detail of the inside")
        return render(writer, index, piece)

    monkeypatch.setattr(CompletionWriter, "event", event)
    engine = engine_saying("x" * 2000)
    client = Client(engine, "/v1/completions", {"prompt": "a", "max_tokens": 2000, "stream": True})
    await asyncio.wait_for(client.run(), 5)
    *told, last, done = b"".join(client.bodies).decode().strip().split("\n\n")
    assert len(told) == 4
    assert done == "data: [DONE]"
    error = json.loads(last.removeprefix("data: "))["error"]
    assert "secret" not in json.dumps(error)
    assert engine.closed == [1]
    assert engine.num_delivered_tokens < 50
    assert await client.metric('errors_total{code="500"}') == 1


async def test_the_token_that_waits_for_its_character_sends_nothing() -> None:
    client = Client(engine_saying("a\u20acb"), "/v1/completions", {"prompt": "a", "stream": True})
    await client.run()
    texts = [c["text"] for c in Events(b"".join(client.bodies).decode()).choices(0)]
    assert texts[:3] == ["a", "\u20ac", "b"]
