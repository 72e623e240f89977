"""Hold-backs: whatever the split, the same text; and nothing is held longer than it must be."""

from __future__ import annotations

import time
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokenizer import Detokenizer, StopMatcher, StopStrings
from tests.engine.vocabularies import KINDS, byte_level

TOKENIZERS = {kind: make() for kind, make in KINDS.items()}
BYTES = byte_level()
TEXTS = ("🙂🙃", "日本語", "Příliš žluťoučký", "👩‍👩‍👧‍👦 🏳️‍🌈", "a\u0301", " lead", "\ufffd already there")


def pieces_of(draw: st.DrawFn, items: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=8)))
    return [items[start:end] for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True)]


@st.composite
def split_ids(draw: st.DrawFn) -> tuple[str, list[list[int]]]:
    kind = draw(st.sampled_from(sorted(TOKENIZERS)))
    ids = draw(st.lists(st.integers(-1, TOKENIZERS[kind].vocab_size + 3), max_size=40))
    return kind, pieces_of(draw, ids)


@settings(deadline=None)  # a busy machine
@given(split_ids(), st.booleans())
def test_stream_equals_plain(split: tuple[str, list[list[int]]], skip: bool) -> None:
    kind, pieces = split
    tokenizer = TOKENIZERS[kind]
    stream = Detokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join([*map(stream.feed, pieces), stream.finish()])
    assert text == tokenizer.decode(list(chain(*pieces)), skip_special_tokens=skip)
    assert stream.finish() == ""


@pytest.mark.parametrize("text", TEXTS)
def test_one_token_at_a_time_gives_whole_characters_at_once(text: str) -> None:
    stream = Detokenizer(BYTES)
    seen = b""
    for token_id in BYTES.encode(text):
        piece = stream.feed([token_id])
        seen += BYTES.token_bytes(token_id)
        assert ("\ufffd" in piece) <= ("\ufffd" in text)
    assert stream.finish() == ""
    assert seen.decode() == text


def test_a_broken_character_is_replaced_as_soon_as_it_cannot_be_completed() -> None:
    first_of_four, letter = BYTES.encode("🙂")[0], BYTES.encode("x")[0]
    stream = Detokenizer(BYTES)
    assert stream.feed([first_of_four]) == ""
    assert stream.feed([letter]) == "\ufffdx"
    assert stream.feed([first_of_four]) == ""
    assert stream.finish() == "\ufffd"


def test_feeding_costs_a_few_microseconds() -> None:
    ids = BYTES.encode("hello wörld 🙂 " * 1500)
    stream = Detokenizer(BYTES)
    best = min(timed(stream, ids) for _ in range(5))
    assert best < 20e-6, f"{best * 1e6:.1f} us per token"


def timed(stream: Detokenizer, ids: list[int]) -> float:
    started = time.thread_time()
    for token_id in ids:
        stream.feed((token_id,))
    return (time.thread_time() - started) / len(ids)


# ---- stop strings


def first_match(text: str, stop: list[str]) -> tuple[int, str] | None:
    """The definition, spelled out: earliest start, then shortest."""
    found = [(text.find(item), len(item), item) for item in stop if item and item in text]
    return (min(found)[0], min(found)[2]) if found else None


def claimable(text: str, stop: list[str]) -> int:
    """Characters at the end of `text` that begin a stop string without completing one."""
    tails = [size for item in stop for size in range(1, len(item)) if text.endswith(item[:size])]
    return max(tails, default=0)


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=5)


@st.composite
def split_text(draw: st.DrawFn) -> list[str]:
    return draw(st.lists(st.text("ab", max_size=4), max_size=12))


@settings(max_examples=400, deadline=None)
@given(split_text(), STOPS)
def test_any_split_finds_the_same_match(pieces: list[str], stop: list[str]) -> None:
    text = "".join(pieces)
    expected = first_match(text, stop)
    matcher = StopMatcher(stop)
    out, fed = "", ""
    for piece in pieces:
        safe, hit = matcher.feed(piece)
        out, fed = out + safe, fed + piece
        if hit:
            break
        assert len(fed) - len(out) <= claimable(fed, stop) or first_match(fed, stop) is not None
        assert fed.startswith(out)
    else:
        out += matcher.finish()
    if expected is None:
        assert (out, matcher.matched) == (text, None)
    else:
        assert (out, matcher.matched) == (text[: expected[0]], expected[1])
        assert matcher.feed("abab") == ("", True)
        assert matcher.finish() == ""


@settings(deadline=None)
@given(split_text(), STOPS)
def test_without_a_match_exactly_the_claimable_text_is_held(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    out, fed = "", ""
    for piece in pieces:
        safe, _ = matcher.feed(piece)
        out, fed = out + safe, fed + piece
        if first_match(fed, stop):
            return
        assert fed[len(out) :] == fed[len(fed) - claimable(fed, stop) :]


def test_which_match_counts() -> None:
    for pieces in (["abcd"], ["ab", "cd"], ["a", "b", "c", "d"]):
        matcher = StopMatcher(["bc", "abcd"])  # "bc" is complete first, "abcd" starts first
        assert [matcher.feed(piece)[0] for piece in pieces] == [""] * len(pieces)
        assert matcher.matched == "abcd"
    matcher = StopMatcher(["bc", "abcd"])
    assert matcher.feed("xabc") == ("x", False)
    assert matcher.feed("x") == ("a", True)
    assert matcher.matched == "bc"
    matcher = StopMatcher(["bc", "abcd"])
    assert matcher.feed("xabc") == ("x", False)
    assert (matcher.finish(), matcher.matched) == ("a", "bc")
    matcher = StopMatcher(["abc", "ab"])  # same start: the shorter one
    assert matcher.feed("xabc") == ("x", True)
    assert matcher.matched == "ab"


def test_empty_stop_strings_never_match() -> None:
    matcher = StopMatcher(["", ""])
    assert matcher.feed("text") == ("text", False)
    assert (matcher.finish(), matcher.matched) == ("", None)


def test_many_long_stop_strings_cost_no_more_than_one() -> None:
    """64 stop strings that all nearly match everywhere: the work per character does not grow with them."""
    stop = StopStrings(["a" * 62 + char for char in map(chr, range(0x100, 0x140))])
    text = "a" * 20_000
    matcher = StopMatcher(stop)
    started = time.thread_time()
    for start in range(0, len(text), 4):
        matcher.feed(text[start : start + 4])
    assert (time.thread_time() - started) / len(text) < 10e-6
    assert len(matcher.finish()) == 62


def test_choices_share_the_automaton() -> None:
    stop = StopStrings(["\n\n", "END"])
    first, second = StopMatcher(stop), StopMatcher(stop)
    assert first.feed("one\n") == ("one", False)
    assert second.feed("two\n") == ("two", False)
    assert first.feed("\n") == ("", True)
    assert second.feed("more E") == ("\nmore ", False)
    assert second.feed("ND") == ("", True)
