"""CPU of the server per streamed token: many streams, and a model that costs nothing.

    python -m tests.bench.bench_sse [--streams 64] [--tokens 400] [--stop] [--chat]
    python -m tests.bench.bench_sse --streams 256 --step-ms 25.6      a model of 10,000 tokens/s

A server process (uvicorn with our connection class, the whole app, the real engine around a runner that gives every
row one token per step) and a client process that reads. Reported: CPU seconds of the server process per streamed
token, without its engine thread (that is a step's own cost, which grows with the model's) and with it, and the tokens
per second that arrived beside those that the model could have offered.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import resource
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from types import SimpleNamespace
from typing import Any

import uvicorn
import uvloop

from engine.async_engine import AsyncEngine
from engine.batch import RowOutput, ScheduledBatch, StepOutput
from engine.config import EngineConfig, SchedulerConfig
from engine.kv.manager import KVCacheManager
from engine.outputs import ModelInfo
from engine.scheduler import Scheduler
from server.app import create_app
from server.connections import ConnectionLimits, ServerConfig
from server.settings import Settings
from tests.server.fake_engine import small_tokenizer


@dataclass(frozen=True)
class Done:
    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class PacedRunner:
    """A step takes `step_s` from the end of the one before, whatever is in it; a step that is late is not made up
    for."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._due = 0.0

    def launch(self, batch: ScheduledBatch) -> Done:
        self._due = max(self._due + self._step_s, time.monotonic())
        time.sleep(max(0.0, self._due - time.monotonic()))
        token = 97 + batch.step_id % 26
        rows = tuple([RowOutput((token,), (-0.5,)) if r.logits_from is not None else RowOutput() for r in batch.rows])
        return Done(StepOutput(batch.step_id, rows))


def paced_parts(num_streams: int, num_tokens: int, step_s: float) -> tuple[EngineConfig, Any]:
    """An engine's configuration and what stands for its loaded model."""
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=num_streams, max_num_batched_tokens=1 << 15))
    tokenizer, max_model_len = small_tokenizer(), num_tokens + 256
    num_blocks = num_streams * (max_model_len // 16 + 1)
    info = ModelInfo(
        "fake", "nowhere", "fake", max_model_len, tokenizer.vocab_size, tokenizer.eos_token_ids, "float32", 1,
        num_blocks, 16, 1, 1,
    )  # fmt: skip
    scheduler = Scheduler(config.scheduler, KVCacheManager(num_blocks, 16), max_model_len)
    runner = PacedRunner(step_s)
    return config, SimpleNamespace(runner=runner, scheduler=scheduler, info=info, tokenizer=tokenizer, grammars=None)


def engine_cpu() -> float:
    thread = next(thread for thread in threading.enumerate() if thread.name == "pagemill-engine")
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def serve(listener: socket.socket, num_streams: int, num_tokens: int, step_s: float, pipe: Pipe) -> None:
    """The server process; sends (CPU seconds, of them the engine thread's) whenever the pipe asks."""
    config, parts = paced_parts(num_streams, num_tokens, step_s)
    engine = AsyncEngine(config, lambda config: parts)
    app = create_app(Settings(), engine)
    limits = ConnectionLimits(10_000, 65536, 60.0, 1 << 20, 60.0)
    server = ServerConfig(app, limits, app.state.metrics, lifespan="off", log_config=None, access_log=False)

    async def answer() -> None:
        while await asyncio.to_thread(pipe.recv):
            usage = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send((usage.ru_utime + usage.ru_stime, engine_cpu()))

    async def main() -> None:
        await engine.start()
        gc.freeze()  # as lifecycle.py does
        asker = asyncio.create_task(answer())
        await uvicorn.Server(server).serve(sockets=[listener])
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
        target=serve, args=(listener, args.streams, args.tokens, args.step_ms / 1000, theirs)
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
        total, engine = ours.recv()
        return float(total), float(engine)

    asyncio.run(load())  # warm
    before, engine_before = cpu()
    began = time.perf_counter()
    num_bytes = asyncio.run(load())
    wall = time.perf_counter() - began
    after, engine_after = cpu()
    child.terminate()
    child.join()
    count = args.streams * args.tokens
    total, engine = (after - before) / count * 1e6, (engine_after - engine_before) / count * 1e6
    offered = args.streams * 1000 / args.step_ms
    print(
        f"{count / wall:.0f} of {offered:.0f} tokens/s arrived; {args.streams} streams x {args.tokens} tokens "
        f"in {wall:.2f} s: {total - engine:.1f} us CPU per token, {total:.1f} with the engine thread, "
        f"{num_bytes / count:.0f} bytes per token"
    )


if __name__ == "__main__":
    main()
