"""Bytes, however they are cut, become the same events; connections are reused and their end is noticed."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client import Target, send
from loadtest.record import EventSplitter, RequestRecord, decode
from loadtest.transport import HttpError, RawTransport, ResponseParser, TransportError
from loadtest.workloads import PlannedRequest

EVENTS = [b'{"a": 1}', '{"b": "é"}'.encode(), b"[DONE]"]
STREAM = b": keep-alive\n\n" + b"".join(b"data: " + event + b"\n\n" for event in EVENTS)


def chunked(pieces: list[bytes]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 20))
def test_events_survive_any_cut(cuts: list[int], chunk: int) -> None:
    wire = chunked([STREAM[start : start + chunk] for start in range(0, len(STREAM), chunk)])
    parser, splitter, events = ResponseParser(), EventSplitter(), []
    position = 0
    for size in [*cuts, len(wire)]:
        for piece in parser.feed(wire[position : position + size]):
            events += splitter.feed(piece)
        position += size
    assert events == EVENTS
    assert parser.complete
    assert parser.status == 200


def test_splitter_reads_carriage_returns_and_long_events() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"event: x\r\ndata: 1\r\ndata: 2\r\n\r\ndata:3\n\n") == [b"1\n2", b"3"]
    assert splitter.feed(b"data: half") == []
    assert splitter.feed(b" done\n\n") == [b"half done"]


def test_parser_lengths_continue_and_nonsense() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 No\r\nContent-Length: 3\r\n\r\nab") == [b"ab"]
    assert not parser.complete
    assert parser.feed(b"c") == [b"c"]
    assert (parser.status, parser.complete) == (404, True)
    with pytest.raises(HttpError):
        ResponseParser().feed(b"SSH-2.0-x\r\n\r\n")


async def respond_once(answers: list[bytes], *, close: bool = True) -> tuple[asyncio.Server, str, list[int]]:
    """A server that answers the k-th request of its life with answers[k] and then closes."""
    opened: list[int] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(1)
        while answers:
            head = await reader.readuntil(b"\r\n\r\n")
            length = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
            await reader.readexactly(length[0] if length else 0)
            writer.write(answers.pop(0))
            await writer.drain()
            if close:
                break
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", opened


def plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def test_connections_are_reused_and_a_stale_one_is_replaced() -> None:
    server, url, opened = await respond_once([plain(b"one"), plain(b"two")], close=False)
    transport = RawTransport(url)
    async with server:
        assert await transport.get("/") == (200, b"one")
        assert await transport.get("/") == (200, b"two")
        assert len(opened) == 1
        await transport.close()
    server, url, opened = await respond_once([plain(b"one"), plain(b"two")], close=True)
    transport = RawTransport(url)
    async with server:
        assert await transport.get("/") == (200, b"one")
        await asyncio.sleep(0.05)
        assert await transport.get("/") == (200, b"two")
        assert len(opened) == 2
        await transport.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (chunked([STREAM])[:-8], "connection lost"),
        (chunked([STREAM[:-15]]), "stream cut off"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\n{}", "http 503"),
        (b"gopher\r\n\r\n", "not HTTP"),
        (chunked([b'data: {"error": {"message": "x"}}\n\n', b"data: [DONE]\n\n"]), "error event"),
        (chunked([b"data: {oops\n\n"]), "unreadable answer: JSONDecodeError"),
        (chunked([b'data: {"choices": []}\n\ndata: [DONE]\n\n']), "no finish_reason"),
    ],
)
async def test_errors_have_kinds(answer: bytes, error: str) -> None:
    server, url, _ = await respond_once([answer])
    record = RequestRecord(0)
    async with server:
        transport = RawTransport(url)
        await send(transport, Target("m"), b"{}", record)
        decode(record)
        await transport.close()
    assert record.error == error
    assert record.finished_s > record.sent_s


async def test_nobody_listens_and_nobody_answers() -> None:
    with pytest.raises(TransportError, match="connect"):
        await RawTransport("http://127.0.0.1:9").get("/")
    server, url, _ = await respond_once([b"", b""], close=False)
    record = RequestRecord(0)
    async with server:
        transport = RawTransport(url)
        await send(transport, Target("m", timeout_s=0.05), b"{}", record)
        await transport.close()
    assert record.error == "timeout"


@pytest.mark.parametrize("style", ["whole", "each", "whole at the last end"])
def test_usage_of_several_choices(style: str) -> None:
    """Whether a server counts the answer or each choice, the sum is the same."""
    record = RequestRecord(0, planned_tokens=4, n=2, status=200)
    for index in (0, 1):
        record.events += [
            (float(k), json.dumps({"choices": [{"index": index, "text": "a"}]}).encode()) for k in range(3)
        ]
        end = {"choices": [{"index": index, "text": "a", "finish_reason": "length"}]}
        if style == "each" or (style == "whole at the last end" and index == 1):
            end["usage"] = {"prompt_tokens": 5, "completion_tokens": 4 if style == "each" else 8}
        record.events.append((9.0, json.dumps(end).encode()))
    if style == "whole":
        whole = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 8}}
        record.events.append((9.0, json.dumps(whole).encode()))
    decode(record)
    assert (record.error, record.prompt_tokens, record.output_tokens) == ("", 5, 8)


def test_bodies() -> None:
    request = PlannedRequest(0, (5, 6), 7, n=2, temperature=0.5, seed=9)
    body = json.loads(Target("m", extra={"min_tokens": 7}, omit=frozenset({"ignore_eos"})).body(request))
    assert body == {
        "model": "m", "prompt": [5, 6], "max_tokens": 7, "temperature": 0.5, "n": 2, "seed": 9, "stream": True,
        "stream_options": {"include_usage": True}, "min_tokens": 7,
    }  # fmt: skip
    plain_chat = Target("m", "chat", stream=False).body(PlannedRequest(0, "hi", 7))
    assert json.loads(plain_chat) == {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7, "temperature": 0.0,
        "stream": False, "ignore_eos": True,
    }  # fmt: skip
