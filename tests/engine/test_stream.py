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
