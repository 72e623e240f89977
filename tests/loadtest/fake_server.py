"""An OpenAI-compatible server whose every delay is known and whose every token is stamped with the moment it left.

It speaks HTTP/1.1 by hand over asyncio, with chunked server-sent events, so that nothing of the client is used twice.
"""

from __future__ import annotations

import asyncio
import json
import os
from argparse import ArgumentParser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any


@dataclass
class Served:
    """One request as the server saw it. sent_s: choice -> moments at which its tokens were written."""

    body: dict[str, Any]
    received_s: float
    sent_s: dict[int, list[float]] = field(default_factory=dict)
    finished_s: float = 0.0
    disconnected: bool = False


@dataclass
class FakeServer:
    """first_s, gap_s: seconds before the first and before every further token. slots: requests served at once
    (None: any number). statuses: answers these instead, one per request, while there are some."""

    first_s: float = 0.005
    gap_s: float = 0.003
    slots: int | None = None
    statuses: list[int] = field(default_factory=list)
    cut_after: int | None = None  # closes the connection after so many token events
    dies_of_n: bool = False  # ends its process when it is asked for several choices
    leak: bool = False  # forgets to free the block of a request whose client went away
    served: list[Served] = field(default_factory=list)
    running: int = 0
    used_blocks: int = 0
    finished_choices: int = 0
    errors: dict[int, int] = field(default_factory=dict)
    port: int = 0
    token_total: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def start(self, port: int = 0) -> AsyncIterator[FakeServer]:
        self._slots = asyncio.Semaphore(self.slots or 10_000)
        self._connections: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in list(self._connections):
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._one(reader, writer):
                    pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        length = next(
            (int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-l")), 0
        )
        raw = await reader.readexactly(length)
        if method == "GET":
            self._answer(writer, 200, self._get(path))
            return True
        body = _valid_body(path, raw)
        if self.statuses or body is None:
            status = self.statuses.pop(0) if self.statuses else 400
            self.errors[status] = self.errors.get(status, 0) + 1
            self._answer(writer, status, json.dumps({"error": {"message": "no", "type": "x"}}).encode())
            return True
        if self.dies_of_n and body.get("n", 1) > 1:
            os._exit(1)
        return await self._generate(path, body, writer)

    def _answer(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    def _get(self, path: str) -> bytes:
        if path == "/v1/models":
            return json.dumps({"object": "list", "data": [{"id": "fake", "max_model_len": 4096}]}).encode()
        return self.metrics().encode() if path == "/metrics" else b"{}"

    def metrics(self) -> str:
        return (
            "# HELP pagemill_num_requests_running Running.\n# TYPE pagemill_num_requests_running gauge\n"
            f"pagemill_num_requests_running {self.running}.0\npagemill_num_requests_waiting 0.0\n"
            f"pagemill_kv_cache_usage_perc {self.used_blocks / 1000}\n"
            f"pagemill_live_slot_steps_total {self.token_total * 15}.0\n"
            f"pagemill_used_slot_steps_total {self.token_total * 16}.0\n"
            f"pagemill_generation_tokens_total {self.token_total}.0\n"
            f'pagemill_request_success_total{{finished_reason="length"}} {self.finished_choices}.0\n'
            + "".join(f'pagemill_errors_total{{code="{code}"}} {count}.0\n' for code, count in self.errors.items())
        )

    async def _generate(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        served = Served(body, perf_counter())
        self.served.append(served)
        self.used_blocks += 1
        freed = False
        try:
            async with self._slots:
                self.running += 1
                try:
                    await (self._stream if body.get("stream") else self._plain)("chat" in path, served, writer)
                finally:
                    self.running -= 1
            self.finished_choices += body.get("n", 1)
            self.used_blocks -= 1
            freed = True
        except ConnectionError:
            served.disconnected = True
        finally:
            if not freed and not self.leak:
                self.used_blocks -= 1
        served.finished_s = perf_counter()
        return not served.disconnected and self.cut_after is None

    async def _stream(self, chat: bool, served: Served, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        n, tokens = served.body.get("n", 1), served.body["max_tokens"]
        if chat:
            self._event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
        for token in range(tokens):
            await asyncio.sleep(self.gap_s if token else self.first_s)
            if self.cut_after is not None and token >= self.cut_after:
                writer.close()
                return
            if writer.transport.is_closing():
                raise ConnectionError
            for index in range(n):
                piece = {"delta": {"content": " a"}} if chat else {"text": " a"}
                served.sent_s.setdefault(index, []).append(perf_counter())
                self._event(writer, {"choices": [{"index": index, **piece, "finish_reason": None}]})
                self.token_total += 1
        for index in range(n):
            piece = {"delta": {}} if chat else {"text": ""}
            self._event(writer, {"choices": [{"index": index, **piece, "finish_reason": "length"}]})
        if (served.body.get("stream_options") or {}).get("include_usage"):
            self._event(writer, {"choices": [], "usage": self._usage(served)})
        self._event(writer, None)
        writer.write(b"0\r\n\r\n")

    async def _plain(self, chat: bool, served: Served, writer: asyncio.StreamWriter) -> None:
        n, tokens = served.body.get("n", 1), served.body["max_tokens"]
        await asyncio.sleep(self.first_s + self.gap_s * (tokens - 1))
        if writer.transport.is_closing():
            raise ConnectionError
        self.token_total += n * tokens
        text = " a" * tokens
        choices = [
            {"index": index, "finish_reason": "length", **({"message": {"content": text}} if chat else {"text": text})}
            for index in range(n)
        ]
        self._answer(writer, 200, json.dumps({"choices": choices, "usage": self._usage(served)}).encode())

    def _usage(self, served: Served) -> dict[str, Any]:
        prompt = served.body.get("prompt", "")
        words = " ".join(message["content"] for message in served.body.get("messages", ())) or prompt
        count = len(words.split()) if isinstance(words, str) else len(words)
        completion = served.body["max_tokens"] * served.body.get("n", 1)
        return {
            "prompt_tokens": count,
            "completion_tokens": completion,
            "total_tokens": count + completion,
            "prompt_tokens_details": {"cached_tokens": 3},
        }

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any] | None) -> None:
        payload = b"[DONE]" if event is None else json.dumps({"object": "x", "model": "fake", **event}).encode()
        data = b"data: " + payload + b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _valid_body(path: str, raw: bytes) -> dict[str, Any] | None:
    """The request, or None if it is nonsense."""
    try:
        body = json.loads(raw)
        prompt = body["messages"] if "chat" in path else body["prompt"]
        whole = isinstance(prompt, list if "chat" in path else (str, list)) and len(prompt) > 0
        whole = whole and (
            "chat" in path or isinstance(prompt, str) or all(isinstance(token, int) for token in prompt)
        )
        numbers = (body["max_tokens"], body.get("n", 1), 1 + body.get("temperature", 0))
        return body if whole and min(numbers) >= 1 and max(numbers) < 100_000 else None
    except (ValueError, TypeError, KeyError):
        return None


async def _serve(port: int, server: FakeServer) -> None:
    async with server.start(port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first", type=float, default=0.005)
    parser.add_argument("--gap", type=float, default=0.003)
    parser.add_argument("--dies-of-n", action="store_true")
    flags = parser.parse_args()
    asyncio.run(_serve(flags.port, FakeServer(flags.first, flags.gap, dies_of_n=flags.dies_of_n)))
