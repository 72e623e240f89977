"""GenerationStream: merging, ends, and the counts that admission relies on."""

from __future__ import annotations

import asyncio

import pytest

from engine.outputs import SequenceOutput, TokenLogprobs
from engine.stream import GenerationStream, Key


class Aborts(list[Key | None]):
    def __call__(self, stream: GenerationStream, key: Key | None) -> None:
        self.append(key)


def stream_of(prompt_lens: dict[int, int], n: int = 1) -> tuple[GenerationStream, Aborts]:
    aborts = Aborts()
    return GenerationStream(1, prompt_lens, n, on_abort=aborts), aborts


def output(prompt: int, choice: int, *ids: int, **fields: object) -> SequenceOutput:
    return SequenceOutput(prompt, choice, ids, tuple(-float(i) for i in ids), **fields)  # type: ignore[arg-type]  # forwarded


async def test_what_waits_is_merged_per_sequence() -> None:
    stream, _ = stream_of({0: 5}, n=2)
    top = TokenLogprobs((1,), (-0.5,))
    stream.put((output(0, 0, 1, top_logprobs=(top,)), output(0, 1, 9)))
    stream.put((output(0, 0, 2, top_logprobs=(top,), finish_reason="length"),))
    first = await anext(stream)
    assert [(o.choice_index, o.token_ids, o.logprobs) for o in first] == [
        (0, (1, 2), (-1.0, -2.0)),
        (1, (9,), (-9.0,)),
    ]
    assert first[0].top_logprobs == (top, top)
    assert first[0].finish_reason == "length"
    stream.put((output(0, 1, 8, finish_reason="stop", stop_token_id=8),))
    assert (await anext(stream))[0].stop_token_id == 8
    assert stream.ended
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_waiting_reader_wakes_when_the_stream_is_closed() -> None:
    stream, aborts = stream_of({0: 5})
    reader = asyncio.create_task(anext(stream, None))
    await asyncio.sleep(0)
    stream.close()
    assert await reader is None
    stream.close()
    assert aborts == [None]


async def test_a_finished_sequence_yields_nothing_more_and_leaves_its_siblings() -> None:
    stream, aborts = stream_of({0: 5, 1: 7})
    stream.put((output(0, 0, 1), output(1, 0, 2)))
    stream.finish(0, 0)
    stream.finish(0, 0)
    stream.put((output(0, 0, 3),))
    assert [o.prompt_index for o in await anext(stream)] == [1]
    assert aborts == [(0, 0)]
    assert not stream.ended


async def test_failure_ends_every_open_sequence_with_the_message() -> None:
    stream, _ = stream_of({0: 5}, n=2)
    stream.put((output(0, 0, 1, finish_reason="stop"),))
    stream.fail("gone")
    outputs = {o.choice_index: o for o in await anext(stream)}
    assert outputs[0].error is None
    assert (outputs[1].finish_reason, outputs[1].error) == ("error", "gone")


@pytest.mark.parametrize("how", ["put", "finish", "close", "fail"])
async def test_each_sequence_leaves_the_waiting_state_once(how: str) -> None:
    stream, _ = stream_of({0: 5, 1: 7}, n=2)
    assert stream.take_started() == (0, 0)
    stream.put((output(0, 0, 1),))
    assert stream.take_started() == (1, 5)
    if how == "put":
        stream.put((output(0, 0, 2), output(0, 1, 2), output(1, 0, 2), output(1, 1, 2)))
    elif how == "finish":
        for prompt in (0, 1):
            for choice in (0, 1):
                stream.finish(prompt, choice)
    else:
        stream.close() if how == "close" else stream.fail("gone")
    assert stream.take_started() == (3, 19)
    assert stream.take_started() == (0, 0)


class Sink(list[tuple[int, ...]]):
    """Takes what it is offered while it is open: the token ids of each call, joined."""

    is_open = True
    fault: Exception | None = None

    def __call__(self, outputs: tuple[SequenceOutput, ...]) -> bool:
        if self.fault is not None:
            raise self.fault
        if self.is_open:
            self.append(tuple(token for each in outputs for token in each.token_ids))
        return self.is_open


async def reading(stream: GenerationStream) -> asyncio.Task[tuple[SequenceOutput, ...]]:
    """A reader that waits."""
    task = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    return task


async def test_a_sink_takes_what_comes_while_the_reader_waits() -> None:
    stream, _ = stream_of({0: 5}, n=2)
    sink = Sink()
    stream.pass_to(sink)
    stream.put((output(0, 0, 1),))
    assert sink == []
    assert [o.token_ids for o in await anext(stream)] == [(1,)]
    reader = await reading(stream)
    stream.put((output(0, 0, 2), output(0, 1, 3)))
    stream.add((output(0, 0, 4),))
    stream.add((output(0, 0, 5), output(0, 1, 6)))
    stream.flush()
    stream.flush()
    await asyncio.sleep(0)
    assert sink == [(2, 3), (4, 5, 6)]
    assert not reader.done()
    stream.put((output(0, 0, 7), output(0, 1, 8, finish_reason="stop")))
    assert [o.token_ids for o in await reader] == [(7,), (8,)]
    assert sink == [(2, 3), (4, 5, 6)]
    assert stream.take_started() == (2, 10)


async def test_what_a_sink_leaves_comes_to_the_reader_whole_and_in_order() -> None:
    stream, _ = stream_of({0: 5})
    sink = Sink()
    stream.pass_to(sink)
    reader = await reading(stream)
    sink.is_open = False
    stream.put((output(0, 0, 1),))
    sink.is_open = True
    stream.put((output(0, 0, 2),))  # the reader has been woken and comes first
    assert [o.token_ids for o in await reader] == [(1, 2)]
    assert sink == []


async def test_a_sink_may_finish_the_last_sequence() -> None:
    stream, aborts = stream_of({0: 5})

    def sink(outputs: tuple[SequenceOutput, ...]) -> bool:
        stream.finish(0, 0)
        return True

    stream.pass_to(sink)
    reader = asyncio.create_task(anext(stream, None))
    await asyncio.sleep(0)
    stream.put((output(0, 0, 1),))
    stream.put((output(0, 0, 2),))
    assert await reader is None
    assert aborts == [(0, 0)]


async def test_what_a_sink_raises_reaches_the_reader_before_anything_else() -> None:
    stream, _ = stream_of({0: 5})
    sink = Sink()
    sink.fault = ValueError("no")
    stream.pass_to(sink)
    reader = await reading(stream)
    stream.put((output(0, 0, 1),))
    stream.put((output(0, 0, 2, finish_reason="stop"),))
    with pytest.raises(ValueError, match="no"):
        await reader


async def test_a_reader_that_was_cancelled_is_not_passed_by() -> None:
    stream, aborts = stream_of({0: 5})
    sink = Sink()
    stream.pass_to(sink)
    reader = await reading(stream)
    reader.cancel()
    stream.put((output(0, 0, 1),))
    assert sink == []
    with pytest.raises(asyncio.CancelledError):
        await reader
    stream.close()
    assert aborts == [None]
