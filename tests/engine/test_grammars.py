"""Grammars without a model: rows and their marks, the store's bounds, what is looked at before compiling."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.config import StructuredConfig
from engine.grammar_source import to_llguidance
from engine.outputs import QueueFull
from engine.sampling.grammar import GrammarRow, Phase
from engine.sampling_params import InvalidParameter, ReasoningMarks, SamplingParams, StructuredOutput
from engine.structured import GrammarStore, Probe
from engine.tokenizer import Tokenizer
from tests.engine.vocabularies import byte_level

TOKENIZER = byte_level()
EOS = TOKENIZER.eos_token_ids
YES = StructuredOutput("choice", '["yes", "no"]')


def store_of(tokenizer: Tokenizer = TOKENIZER, **config: Any) -> GrammarStore:
    return GrammarStore(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids, StructuredConfig(**config))


@pytest.fixture
async def store() -> AsyncIterator[GrammarStore]:
    store = store_of()
    await store.compile(YES)
    yield store
    store.close()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False, allow_special=True)


def row_of(store: GrammarStore, reasoning: ReasoningMarks | None) -> GrammarRow:
    return GrammarRow(store, SamplingParams(structured=YES, reasoning=reasoning))


# -- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [True, False])
async def test_marks_are_found_however_the_text_is_cut(store: GrammarStore, opened: bool) -> None:
    """Marks of several tokens and of one ("<note>" is a token), with blanks behind; "ab" may be one token or two."""
    for start, end in (("<a", "ab>"), ("<note>", "<é>"), ("<|start|>", "<|end|>")):
        marks = ReasoningMarks(start, end, opened=opened)
        text = ("" if opened else start) + " ab a<" + end + "\n\nyes"
        row = row_of(store, marks)
        for token_id in ids(text):
            assert row.phase is not Phase.GRAMMAR or not row.ended
            row.take(token_id)
        assert row.phase is Phase.GRAMMAR
        assert row.ended, (start, end)


async def test_thinking_that_never_begins_leaves_the_grammar_where_it_is(store: GrammarStore) -> None:
    row = row_of(store, ReasoningMarks("<note>", "<é>", opened=False))
    assert row.phase is Phase.OPEN
    for token_id in ids("no"):
        row.take(token_id)
    assert row.phase is Phase.GRAMMAR
    assert row.ended


async def test_the_text_behind_the_mark_in_its_own_token_counts(store: GrammarStore) -> None:
    """The mark ends inside the token "Ġab": what is left of it belongs to the form, or breaks it."""
    (token_id,) = ids(" ab")
    row = row_of(store, ReasoningMarks("<", " a", opened=True))
    row.take(token_id)
    assert row.phase is Phase.GRAMMAR
    assert row.failed  # "b" begins neither yes nor no


async def test_tokens_towards_a_mark(store: GrammarStore) -> None:
    towards = {TOKENIZER.token_bytes(i) for i in store.tokens_towards(b"<note>")}
    assert towards == {b"<", b"<note>"}


async def test_a_row_rebuilt_from_its_tokens_is_the_same(store: GrammarStore) -> None:
    marks = ReasoningMarks("<note>", "<é>", opened=False)
    output = ids("<note>ab<é>ye")
    for cut in range(len(output) + 1):
        row = row_of(store, marks)
        for token_id in output[:cut]:
            row.take(token_id)
        again = row_of(store, marks)
        for token_id in output[:cut]:
            again.take(token_id)
        for token_id in ids("<note>ab<é>yes")[cut:]:
            row.take(token_id)
            again.take(token_id)
        assert row.ended
        assert again.ended


# -- the store ----------------------------------------------------------------------------------------------------


def take_a_megabyte_each(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Probe.ask
    monkeypatch.setattr(Probe, "ask", lambda probe, source: (ask(probe, source)[0], 1 << 20))


async def test_grammars_in_use_stay_and_others_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    take_a_megabyte_each(monkeypatch)
    store = store_of(cache_bytes=4 << 20)
    forms = [StructuredOutput("choice", json.dumps([str(i)])) for i in range(12)]
    await store.compile(forms[0])
    store.acquire(forms[0])
    for form in forms[1:]:
        await store.compile(form)
    assert await store.compile(forms[0]) is True
    assert await store.compile(forms[1]) is False
    store.release(forms[0])
    for form in forms[1:]:
        await store.compile(form)
    assert await store.compile(forms[0]) is False
    store.close()


async def test_when_all_that_is_kept_is_in_use_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    take_a_megabyte_each(monkeypatch)
    store = store_of(cache_bytes=2 << 20)
    forms = [StructuredOutput("choice", json.dumps([str(i)])) for i in range(3)]
    for form in forms[:2]:
        await store.compile(form)
        store.acquire(form)
    with pytest.raises(QueueFull):
        await store.compile(forms[2])
    store.release(forms[0])
    await store.compile(forms[2])
    store.close()


async def test_a_model_without_an_end_of_text_has_grammars_too() -> None:
    tokenizer = Tokenizer(byte_level()._with_control)
    store = store_of(tokenizer)
    await store.compile(YES)
    row = row_of(store, None)
    for token_id in ids("yes"):
        row.take(token_id)
    assert row.ended
    assert store.mask_size == tokenizer.vocab_size + 1
    store.close()


async def test_what_takes_too_long_is_killed_and_remembered() -> None:
    store = store_of(compile_timeout_s=0.2)
    slow = StructuredOutput("json", '{"type": "integer", "multipleOf": 999983}', "guided_json")
    for _ in range(2):
        with pytest.raises(InvalidParameter, match="compile") as caught:
            await store.compile(slow)
        assert caught.value.param == "guided_json"
    assert len(store._grammars) == 1
    assert await store.compile(YES) is False
    store.close()


async def test_too_many_at_once_are_told_to_come_again() -> None:
    store = store_of()
    forms = [StructuredOutput("choice", json.dumps([str(i)])) for i in range(80)]
    outcomes = await asyncio.gather(*(store.compile(form) for form in forms), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
    assert len(refused) == 80 - 64
    assert all(outcome is False for outcome in outcomes if not isinstance(outcome, QueueFull))
    store.close()


async def test_closing_ends_the_processes() -> None:
    store = store_of()
    await store.compile(YES)
    processes = [probe._process for probe in store._probes]
    assert processes
    store.close()
    assert all(process is not None and process.poll() is not None for process in processes)


def test_nothing_is_imported_before_the_first_grammar() -> None:
    code = (
        "import sys, server.app, engine.async_engine, engine.runner\n"
        "assert 'llguidance' not in sys.modules, 'imported too early'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# -- before compiling ---------------------------------------------------------------------------------------------


def complaint(structured: StructuredOutput) -> str:
    with pytest.raises(ValueError, match="The ") as caught:
        to_llguidance(structured)
    return str(caught.value)


@pytest.mark.parametrize("pattern", ["*", "+a", "?", "^*", "(+a)", "a|*", "^{2}x", "a(|{1,2})", "\\", "a\\\\\\"])
def test_patterns_that_cannot_be_meant(pattern: str) -> None:
    assert "pattern" in complaint(StructuredOutput("regex", pattern))
    assert "pattern" in complaint(StructuredOutput("json", json.dumps({"items": [{"pattern": pattern}]})))


@pytest.mark.parametrize(
    "pattern", ["(?:a)", "(?i:a)", "a*", "\\(*", "\\|+", "a{2}", "\\^?", "[(*]", "\\\\", "x{", "(a)?b"]
)
def test_patterns_that_are_fine_here(pattern: str) -> None:
    to_llguidance(StructuredOutput("regex", pattern))


def test_depth_is_bounded_without_recursion() -> None:
    deep = "[" * 5000 + "]" * 5000
    assert complaint(StructuredOutput("json", f'{{"enum": {deep}}}'))
    nested = "1"
    for _ in range(300):
        nested = f"[{nested}]"
    assert "levels" in complaint(StructuredOutput("json", f'{{"enum": {nested}}}'))


def test_a_schema_keeps_its_own_options_but_not_its_own_blanks() -> None:
    for options in ({"whitespace_pattern": "\\s+", "item_separator": ", "}, {"whitespace_flexible": False}):
        source = to_llguidance(StructuredOutput("json", json.dumps({"x-guidance": options})))
        lark = json.loads(source)["grammars"][0]["lark_grammar"]
        kept = json.loads(lark.partition("%json ")[2].partition("\n%llguidance")[0])["x-guidance"]
        if options.get("whitespace_flexible") is False:
            assert kept == options
        else:
            assert "{1,20}" in kept["whitespace_pattern"]
            assert kept["item_separator"] == ", "


def test_all_cuts_of_a_mark_are_met() -> None:
    """Guards the fixture: the vocabulary above really has marks of one token and of several."""
    lengths = [len(ids(mark)) for mark in ("<note>", "<a", "ab>")]
    assert lengths[0] == 1
    assert all(length > 1 for length in itertools.islice(lengths, 1, None))
