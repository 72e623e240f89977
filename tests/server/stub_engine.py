"""An engine without a model, for tests of what stands around it: one token per `interval_s` on every open stream,
with switches for each way to misbehave. Bytes are its tokens. Run as a script it serves, as `pagemill serve` would.

Faithful where the server looks: phases, gauges through listeners, drain, death, QueueFull, NotServing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from uvloop import new_event_loop

from engine.config import StartError
from engine.outputs import Delivery, ModelInfo, NotServing, Phase, SequenceOutput
from engine.progress import Progress
from engine.sampling_params import SamplingParams, StructuredOutput
from engine.stats import CacheStats, Picture, RequestStats, SequenceView, StepStats
from engine.stream import GenerationStream, Key
from engine.terms import NO_TERMS, Terms
from engine.tokenizer import Tokenizer

EOS_ID = 256
TEXT = b"pagemill "
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_token_ids=[EOS_ID], chat_templates={"default": TEMPLATE})


class StubEngine:
    def __init__(
        self,
        *,
        interval_s: float = 0.01,
        load_s: float = 0.0,
        start_error: str | None = None,
        die_after_s: float | None = None,
        ready: bool = False,
    ) -> None:
        self.tokenizer_ = byte_tokenizer()
        self.interval_s = interval_s
        self.load_s = load_s
        self.start_error = start_error
        self.die_after_s = die_after_s
        self.hung = False
        self.progress = Progress()
        self.phase = Phase.READY if ready else Phase.STARTING
        self.num_aborted = 0
        self.num_resets = 0
        self._loaded = ready
        self._listeners: list[Callable[[Delivery], None]] = []
        self._ids = itertools.count(1)
        self._open: dict[int, dict[Key, tuple[SamplingParams, list[int], int, float]]] = {}
        self._streams: dict[int, GenerationStream] = {}
        self._dead = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._steps = itertools.count(1)
        self._output = self.tokenizer_.encode(TEXT.decode())

    # -- life

    async def start(self) -> None:
        if self.load_s:
            self.progress.enter("weights")
            self.progress.done, self.progress.total = 1 << 30, 4 << 30
        await asyncio.sleep(self.load_s)
        if self.start_error:
            self.phase = Phase.DEAD
            raise StartError(self.start_error)
        self._loaded = True
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY
        if self.die_after_s is not None:
            asyncio.get_running_loop().call_later(self.die_after_s, self.die)

    def die(self) -> None:
        self.phase = Phase.DEAD
        self._end_all("The engine died while computing this request.")
        self._dead.set()

    async def wait_dead(self) -> None:
        await self._dead.wait()

    async def drain(self, grace_s: float) -> None:
        self.phase = Phase.DRAINING
        until = time.monotonic() + grace_s
        while self._streams and time.monotonic() < until:  # noqa: ASYNC110  # a stub may poll
            await asyncio.sleep(0.01)
        self._end_all("The server is shutting down.")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # -- facts

    @property
    def model_info(self) -> ModelInfo:
        if not self._loaded:
            raise NotServing("The model is still loading.")
        return ModelInfo(
            name="stub", source="nowhere", architecture="Stub", max_model_len=4096, vocab_size=EOS_ID + 1,
            eos_token_ids=(EOS_ID,), dtype="float32", num_parameters=0, num_blocks=256, block_size=16,
            kv_bytes_per_token=1024, num_threads=1, numeric_profile={"device": "none"}, system_fingerprint="fp_stub",
            load_seconds={"nothing": 0.0},
        )  # fmt: skip

    @property
    def tokenizer(self) -> Tokenizer:
        if not self._loaded:
            raise NotServing("The model is still loading.")
        return self.tokenizer_

    def add_listener(self, callback: Callable[[Delivery], None]) -> None:
        self._listeners.append(callback)

    # -- requests

    def reset_prefix_cache(self) -> None:
        if self.phase is not Phase.READY:
            raise NotServing("The engine is not serving.")
        self.num_resets += 1

    def paint(self) -> None:
        if self._loaded and self.phase is not Phase.DEAD:
            open_ = [(stream_id, key, state) for stream_id, each in self._open.items() for key, state in each.items()]
            views = tuple(
                SequenceView(stream_id, *key, length, length, 0, len(produced), params.max_tokens or 4096, 1, 0, 0.0)
                for stream_id, key, (params, produced, length, _) in open_
            )
            cells = bytes([2] * len(views) + [0] * (256 - len(views)))
            self._tell(Delivery(step=self._stats(0), picture=Picture(cells, 1, running=views)))

    async def compile(self, structured: StructuredOutput, client: str = "") -> bool:
        """Bytes come as they come: no form is held."""
        return True

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        label: str = "",
        terms: Terms = NO_TERMS,
        adapter: str = "",
    ) -> GenerationStream:
        if self.phase is not Phase.READY:
            raise NotServing(f"The engine is {self.phase.value}.")
        lengths = {index: len(prompt) for index, prompt in enumerate(prompts)}
        stream = GenerationStream(next(self._ids), lengths, params.n, on_abort=self._abort, label=label)
        now = time.monotonic()
        self._streams[stream.stream_id] = stream
        self._open[stream.stream_id] = {
            (prompt, choice): (params, [], length, now)
            for prompt, length in lengths.items()
            for choice in range(params.n)
        }
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        return stream

    def _abort(self, stream: GenerationStream, sequence: Key | None) -> None:
        self.num_aborted += 1
        gone = self._open.get(stream.stream_id, {})
        for key in [sequence] if sequence else list(gone):
            gone.pop(key, None)
        self._forget(stream.stream_id)
        self._tell(Delivery(step=self._stats(0)))

    async def _run(self) -> None:
        while self._streams:
            await asyncio.sleep(self.interval_s)
            finished: list[RequestStats] = []
            count = 0
            for stream_id, sequences in list(self._open.items()):
                outputs = tuple(self._advance(key, state, finished) for key, state in list(sequences.items()))
                count += len(outputs)
                for output in outputs:
                    if output.finish_reason:
                        del sequences[output.prompt_index, output.choice_index]
                self._streams[stream_id].put(outputs)
                self._forget(stream_id)
            self._tell(Delivery(step=self._stats(count), finished=tuple(finished)))

    def _advance(
        self, key: Key, state: tuple[SamplingParams, list[int], int, float], finished: list[RequestStats]
    ) -> SequenceOutput:
        params, produced, length, arrival = state
        token = self._output[len(produced) % len(self._output)]
        produced.append(token)
        limit = params.max_tokens if params.max_tokens is not None else 4096 - length
        done = len(produced) >= limit
        if done:
            now = time.monotonic()
            finished.append(RequestStats("length", length, 0, len(produced), 0, arrival, arrival, arrival, now))
        return SequenceOutput(*key, (token,), (-0.5,), finish_reason="length" if done else None)

    def _forget(self, stream_id: int) -> None:
        if not self._open.get(stream_id):
            self._open.pop(stream_id, None)
            self._streams.pop(stream_id, None)

    def _end_all(self, message: str) -> None:
        for stream in list(self._streams.values()):
            stream.fail(message)
        self._open.clear()
        self._streams.clear()

    def _stats(self, num_tokens: int) -> StepStats:
        running = sum(map(len, self._open.values()))
        cache = CacheStats(num_blocks=256, num_used_blocks=running, live_slots=running * 16)
        return StepStats(next(self._steps), running, 0, running, 0, num_tokens, cache=cache)

    def _tell(self, delivery: Delivery) -> None:
        for listener in self._listeners:
            listener(delivery)


def main() -> None:
    """python -m tests.server.stub_engine PORT [--switches]: the real life cycle around a stub."""
    from server import front, lifecycle, logs, settings  # as cli.py: after the arguments

    parser = argparse.ArgumentParser()
    parser.add_argument("port")
    parser.add_argument("--interval", type=float, default=0.01)
    parser.add_argument("--load", type=float, default=0.0)
    parser.add_argument("--start-error", default=None)
    parser.add_argument("--die-after", type=float, default=None)
    parser.add_argument("--hung", action="store_true")
    parser.add_argument("--ping", type=float, default=front.KEEP_ALIVE_S)
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    values = dict(item.split("=", 1) for item in arguments.set)
    chosen = settings.load({"port": arguments.port, **values})
    logs.configure(chosen.log_level, chosen.log_format)
    front.KEEP_ALIVE_S = arguments.ping

    def make() -> StubEngine:
        engine = StubEngine(
            interval_s=arguments.interval,
            load_s=arguments.load,
            start_error=arguments.start_error,
            die_after_s=arguments.die_after,
        )
        engine.hung = arguments.hung
        return engine

    try:
        code = lifecycle.serve(chosen, make, lifecycle.bind(chosen), new_event_loop if arguments.uvloop else None)
    except StartError as error:
        print(f"pagemill: {error}", file=sys.stderr)
        code = 1
    lifecycle.leave(code)


if __name__ == "__main__":
    main()
