"""The assembler: whatever the split of deliveries, the same text, count and reason; stop strings never leak."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.outputs import FinishReason, RequestFailed, SequenceOutput, TokenLogprobs
from engine.sampling_params import ReasoningMarks, SamplingParams
from engine.text import Assembler, Piece
from tests.server.fake_engine import small_tokenizer

TOKENIZER = small_tokenizer()
END = TOKENIZER.eos_token_ids[0]

tokens = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=24)
texts = st.text(alphabet="ab the\né😀漢", max_size=16)
stops = st.lists(st.text(alphabet="ab the\né😀", min_size=1, max_size=4), max_size=3)
cuts = st.lists(st.integers(1, 5), min_size=1, max_size=30)


def outputs(
    token_ids: list[int], sizes: list[int], reason: FinishReason, *, logprobs: bool = False
) -> Iterator[SequenceOutput]:
    """`token_ids` in pieces of `sizes` (repeated), ended by `reason`; "stop" means by the end token."""
    ids = [*token_ids, END] if reason == "stop" else token_ids
    start = turn = 0
    while start < len(ids) or turn == 0:
        end = start + sizes[turn % len(sizes)]
        part, last = tuple(ids[start:end]), end >= len(ids)
        yield SequenceOutput(
            0,
            0,
            token_ids=part,
            logprobs=tuple(-float(t) for t in part),
            top_logprobs=tuple(TokenLogprobs((t,), (-float(t),)) for t in part) if logprobs else None,
            finish_reason=reason if last else None,
            stop_token_id=END if last and reason == "stop" else None,
        )
        start, turn = end, turn + 1


def run(
    params: SamplingParams, token_ids: list[int], sizes: list[int], reason: FinishReason
) -> tuple[list[Piece], Assembler]:
    assembler = Assembler(TOKENIZER, params)
    feed = outputs(token_ids, sizes, reason, logprobs=params.logprobs is not None)
    return [piece for output in feed for piece in assembler.feed(output)], assembler


def joined(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@given(tokens, cuts, st.sampled_from(["stop", "length"]), stops, st.booleans(), st.booleans(), st.integers(0, 5))
def test_every_split_gives_the_same_answer(
    token_ids: list[int],
    sizes: list[int],
    reason: FinishReason,
    stop: list[str],
    include: bool,
    with_logprobs: bool,
    min_tokens: int,
) -> None:
    params = SamplingParams(
        max_tokens=64,
        min_tokens=min_tokens,
        stop=tuple(stop),
        include_stop_str_in_output=include,
        logprobs=1 if with_logprobs else None,
    )
    pieces, assembler = run(params, token_ids, sizes, reason)
    whole_pieces, whole = run(params, token_ids, [len(token_ids) + 1], reason)
    ends = [*token_ids, END] if reason == "stop" else token_ids
    assert joined(pieces) == joined(whole_pieces)
    assert assembler.num_tokens == whole.num_tokens
    assert assembler.finish_reason == whole.finish_reason
    assert [p.finish_reason for p in pieces if p.finish_reason] == [assembler.finish_reason]
    assert pieces[-1].finish_reason is not None
    assert [t for piece in pieces for t in piece.token_ids] == ends[: assembler.num_tokens]
    entries = [entry for piece in pieces for entry in piece.entries]
    assert entries == [entry for piece in whole_pieces for entry in piece.entries]
    assert len(entries) == (assembler.num_tokens if with_logprobs else 0)
    if not with_logprobs:
        assert all(piece.text or piece.finish_reason for piece in pieces)  # nothing empty is sent


@given(tokens, cuts)
def test_without_stops_the_text_is_the_decoded_tokens(token_ids: list[int], sizes: list[int]) -> None:
    pieces, assembler = run(SamplingParams(max_tokens=64), token_ids, sizes, "length")
    assert joined(pieces) == TOKENIZER.decode(token_ids)
    assert assembler.num_tokens == len(token_ids)


@given(texts, cuts, stops.filter(bool))
def test_text_ends_before_the_first_stop_string_and_tokens_end_with_it(
    text: str, sizes: list[int], stop: list[str]
) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    pieces, assembler = run(SamplingParams(max_tokens=64, stop=tuple(stop)), token_ids, sizes, "length")
    found = [text.index(s) for s in stop if s in text]
    assert joined(pieces) == (text[: min(found)] if found else text)
    assert not any(s in joined(pieces) for s in stop)
    assert assembler.finish_reason == ("stop" if found else "length")
    if found:
        accepted = TOKENIZER.decode(token_ids[: assembler.num_tokens])
        assert any(s in accepted for s in stop)
        if len(stop) == 1:
            assert stop[0] not in TOKENIZER.decode(token_ids[: assembler.num_tokens - 1])


@given(texts, cuts, stops.filter(bool))
def test_the_stop_string_can_be_kept(text: str, sizes: list[int], stop: list[str]) -> None:
    params = SamplingParams(max_tokens=64, stop=tuple(stop), include_stop_str_in_output=True)
    pieces, _ = run(params, TOKENIZER.encode(text, add_special_tokens=False), sizes, "length")
    found = [text.index(s) for s in stop if s in text]
    if found:
        at = min(found)
        assert joined(pieces) in {text[: at + len(s)] for s in stop if text.startswith(s, at)}
    else:
        assert joined(pieces) == text


def test_tokens_after_a_stop_are_neither_counted_nor_sent() -> None:
    token_ids = TOKENIZER.encode("abcdef", add_special_tokens=False)
    pieces, assembler = run(SamplingParams(max_tokens=64, stop=("bc",)), token_ids, [6], "length")
    assert (joined(pieces), assembler.num_tokens, assembler.finish_reason) == ("a", 3, "stop")
    late = SequenceOutput(0, 0, token_ids=(65,), logprobs=(0.0,), finish_reason="length")
    assert assembler.feed(late) == []
    assert assembler.num_tokens == 3


def test_stop_strings_wait_for_min_tokens() -> None:
    token_ids = TOKENIZER.encode("xaxbxc", add_special_tokens=False)
    params = SamplingParams(max_tokens=64, stop=("x",), min_tokens=3)
    pieces, assembler = run(params, token_ids, [2], "length")
    assert (joined(pieces), assembler.num_tokens) == ("xaxb", 5)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    assembler = Assembler(TOKENIZER, SamplingParams(max_tokens=64, stop=("bcd",)))
    sent = []
    for char in "abcabx":
        token_ids = tuple(TOKENIZER.encode(char, add_special_tokens=False))
        sent.append(joined(assembler.feed(SequenceOutput(0, 0, token_ids=token_ids, logprobs=(0.0,)))))
    assert sent == ["a", "", "", "bca", "", "bx"]


def test_the_end_token_is_counted_and_has_no_text() -> None:
    pieces, assembler = run(SamplingParams(max_tokens=64, skip_special_tokens=False), [], [1], "stop")
    assert (joined(pieces), assembler.num_tokens, assembler.finish_reason) == ("", 1, "stop")


def test_half_a_character_at_the_end_is_replaced() -> None:
    half = TOKENIZER.encode("😀", add_special_tokens=False)[:-1]
    pieces, _ = run(SamplingParams(max_tokens=64), half, [1], "length")
    assert joined(pieces) == "\ufffd"
    assert all("\ufffd" not in piece.text for piece in pieces[:-1])


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_a_failed_sequence_raises(reason: FinishReason) -> None:
    assembler = Assembler(TOKENIZER, SamplingParams())
    with pytest.raises(RequestFailed, match="why"):
        assembler.feed(SequenceOutput(0, 0, finish_reason=reason, error="why"))


def test_logprobs_sit_beside_their_tokens() -> None:
    token_ids = TOKENIZER.encode("aé b", add_special_tokens=False)
    pieces, _ = run(SamplingParams(max_tokens=64, logprobs=1), token_ids, [3], "length")
    entries = [entry for piece in pieces for entry in piece.entries]
    assert [e.token_id for e in entries] == token_ids
    assert [e.logprob for e in entries] == [-float(t) for t in token_ids]
    assert [e.text_offset for e in entries] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("opened", [True, False])
def test_stop_strings_wait_for_the_end_of_the_thinking(opened: bool) -> None:
    text = ("" if opened else "<t>") + "one. two</t>three. four"
    params = SamplingParams(max_tokens=64, stop=("e. ",), reasoning=ReasoningMarks("<t>", "</t>", opened))
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    for sizes in ([1], [2], [40]):
        pieces, assembler = run(params, token_ids, sizes, "length")
        assert joined(pieces) == text[: text.index("e. f")]
        assert assembler.finish_reason == "stop"
        assert [t for piece in pieces for t in piece.token_ids] == token_ids[: assembler.num_tokens]


def test_what_never_became_thinking_is_searched_at_the_end() -> None:
    params = SamplingParams(max_tokens=64, stop=("th",), reasoning=ReasoningMarks("<think>", "</think>", False))
    pieces, assembler = run(params, TOKENIZER.encode(" <thin", add_special_tokens=False), [1], "length")
    assert (joined(pieces), assembler.finish_reason) == (" <", "stop")


def test_marks_of_an_output_format_are_text() -> None:
    begin, end = (TOKENIZER.token_id(text) for text in ("<|im_start|>", "<|im_end|>"))
    assert begin is not None
    assert end is not None
    params = SamplingParams(max_tokens=64, shown_special_tokens=(begin,))
    pieces, _ = run(params, [begin, end], [1], "length")
    assert joined(pieces) == "<|im_start|>"
