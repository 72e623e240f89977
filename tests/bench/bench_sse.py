"""Event-loop CPU per streamed token: the server side of many streams, with an engine that costs nothing.

    python -m tests.bench.bench_sse [--streams 64] [--tokens 400] [--stop] [--chat]
    python -m tests.bench.bench_sse --streams 256 --step-ms 25.6      an engine of 10,000 tokens/s

A server process (uvicorn with our connection class, the whole app, a fake engine that delivers one token to every
stream per step) and a client process that reads. Reported: CPU seconds of the server process per streamed token, the
client's part not counted, the same without the fake engine's own part, and the tokens per second that arrived beside
those that the engine offered.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import socket
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any

import uvicorn
import uvloop

from engine.outputs import FinishReason, SequenceOutput
from engine.sampling_params import SamplingParams
from engine.stream import GenerationStream
from server.app import create_app
from server.connections import ConnectionLimits, ServerConfig
from server.settings import Settings
from tests.server.fake_engine import FakeEngine, small_tokenizer


class StepEngine(FakeEngine):
    """All streams advance together, one token per step, as one delivery of the real engine does."""

    def __init__(self, num_streams: int, step_s: float) -> None:
        super().__init__(lambda prompt, p, c: (), tokenizer=small_tokenizer(), max_model_len=1 << 20)
        self._num_streams = num_streams
        self._step_s = step_s
        self._open: list[tuple[GenerationStream, int]] = []
        self.put_s = 0.0  # CPU spent in handing over, the engine's share of the loop

    async def _run(self, stream: GenerationStream, prompts: Any, params: SamplingParams) -> None:
        self._open.append((stream, params.max_tokens or 1))
        if len(self._open) < self._num_streams:
            return
        streams, self._open = self._open, []
        limit = streams[0][1]
        for number in range(1, limit + 1):
            await asyncio.sleep(self._step_s)
            began = time.perf_counter()
            reason: FinishReason | None = "length" if number == limit else None
            output = SequenceOutput(0, 0, token_ids=(97 + number % 26,), logprobs=(-0.5,), finish_reason=reason)
            for open_stream, _ in streams:
                open_stream.put((output,))
            self.put_s += time.perf_counter() - began


def serve(listener: socket.socket, num_streams: int, step_s: float, pipe: Pipe) -> None:
    """The server process; sends (CPU seconds, of them handing over) whenever the pipe asks."""
    engine = StepEngine(num_streams, step_s)
    app = create_app(Settings(), engine)
    limits = ConnectionLimits(10_000, 65536, 60.0, 1 << 20, 60.0)
    config = ServerConfig(app, limits, app.state.metrics, lifespan="off", log_config=None, access_log=False)

    async def answer() -> None:
        while await asyncio.to_thread(pipe.recv):
            usage = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send((usage.ru_utime + usage.ru_stime, engine.put_s))

    async def main() -> None:
        asker = asyncio.create_task(answer())
        await uvicorn.Server(config).serve(sockets=[listener])
        asker.cancel()

    uvloop.run(main())


async def read_stream(port: int, path: str, body: bytes) -> int:
    """Bytes of one answer, read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    received = await reader.read()
    writer.close()
    assert b"[DONE]" in received[-64:], received[-300:]
    return len(received)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--stop", action="store_true", help="with a stop string")
    parser.add_argument("--chat", action="store_true")
    args = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    port = listener.getsockname()[1]
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=serve, args=(listener, args.streams, args.step_ms / 1000, theirs)
    )
    child.start()
    fields = f'"stream":true,"max_tokens":{args.tokens},"ignore_eos":true'
    fields += ',"stop":["never said"]' if args.stop else ""
    source = '"messages":[{"role":"user","content":"hi"}]' if args.chat else '"prompt":"hi"'
    path = "/v1/chat/completions" if args.chat else "/v1/completions"

    async def load() -> int:
        body = ("{" + fields + "," + source + "}").encode()
        return sum(await asyncio.gather(*[read_stream(port, path, body) for _ in range(args.streams)]))

    def cpu() -> tuple[float, float]:
        ours.send(True)
        total, put = ours.recv()
        return float(total), float(put)

    asyncio.run(load())  # warm
    before, put_before = cpu()
    began = time.perf_counter()
    num_bytes = asyncio.run(load())
    wall = time.perf_counter() - began
    after, put_after = cpu()
    child.terminate()
    child.join()
    count = args.streams * args.tokens
    total, handing = (after - before) / count * 1e6, (put_after - put_before) / count * 1e6
    offered = args.streams * 1000 / args.step_ms
    print(
        f"{count / wall:.0f} of {offered:.0f} tokens/s arrived; {args.streams} streams x {args.tokens} tokens "
        f"in {wall:.2f} s: {total:.1f} us CPU per token "
        f"({handing:.1f} of them handing over), {num_bytes / count:.0f} bytes per token"
    )


if __name__ == "__main__":
    main()
