"""Grammars without a model: rows and their marks, the store's bounds, what is looked at before compiling."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from engine.config import StructuredConfig
from engine.grammar_queue import CLIENT_SHARE, MAX_QUEUED, NUM_WORKERS, SLICES
from engine.grammar_source import to_llguidance
from engine.grammar_trial import Probe
from engine.outputs import NotServing, QueueFull
from engine.sampling.grammar import GrammarRow, Phase
from engine.sampling_params import InvalidParameter, ReasoningMarks, SamplingParams, StructuredOutput, UnusableForm
from engine.structured import Grammar, GrammarStore
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
    monkeypatch.setattr(Probe, "ask", lambda probe, *asked: replace(ask(probe, *asked), num_bytes=1 << 20))


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


async def test_a_server_with_many_open_files_still_tries_grammars() -> None:
    """Numbers beyond what `select` takes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if hard < 1200:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    store = store_of()
    try:
        assert await store.compile(YES) is False
    finally:
        store.close()
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_process_that_cannot_be_started_is_nobodys_fault_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = store_of()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(QueueFull, match="later"):
            await store.compile(YES)
    assert await store.compile(YES) is False
    store.close()


async def test_what_is_tried_while_the_store_closes_is_not_refused_as_bad() -> None:
    store = store_of()
    await store.compile(YES)
    slow = asyncio.create_task(store.compile(StructuredOutput("json", '{"type": "integer", "multipleOf": 999983}')))
    await asyncio.sleep(0.2)  # on its way to the process, or in it
    store.close()
    with pytest.raises((NotServing, asyncio.CancelledError)):
        await slow


async def test_no_client_takes_all_places_and_clients_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order, go = [], threading.Event()

    def work(store: GrammarStore, structured: StructuredOutput, cpu_s: float) -> Grammar:
        go.wait()
        order.append(structured.source)
        return Grammar(error="no.")

    monkeypatch.setattr(GrammarStore, "_work", work)
    store = store_of()

    async def ask(source: str, client: str) -> None:
        with pytest.raises(UnusableForm):
            await store.compile(StructuredOutput("regex", source), client)

    share = MAX_QUEUED // CLIENT_SHARE
    waiting = [asyncio.create_task(ask(f"greedy{i}", "a")) for i in range(share)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await store.compile(StructuredOutput("regex", "more"), "a")
    waiting.append(asyncio.create_task(ask("modest", "b")))
    await asyncio.sleep(0.01)
    go.set()
    await asyncio.gather(*waiting)
    assert len(order) == share + 1
    assert order.index("modest") <= NUM_WORKERS + 1
    store.close()


async def test_a_grammar_that_needs_more_than_a_slice_is_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def work(store: GrammarStore, structured: StructuredOutput, cpu_s: float) -> Grammar | None:
        tried.append(cpu_s)
        return Grammar(error="no.") if cpu_s == store.config.compile_timeout_s else None

    monkeypatch.setattr(GrammarStore, "_work", work)
    store = store_of()
    with pytest.raises(UnusableForm):
        await store.compile(YES)
    assert tried == [*(cpu_s for cpu_s, _ in SLICES), store.config.compile_timeout_s]
    store.close()


async def test_who_leaves_keeps_the_worker_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    running, go = [], threading.Event()
    loop, all_busy = asyncio.get_running_loop(), asyncio.Event()

    def work(store: GrammarStore, structured: StructuredOutput, cpu_s: float) -> Grammar:
        running.append(structured.source)
        if len(running) == NUM_WORKERS:
            loop.call_soon_threadsafe(all_busy.set)
        go.wait()
        return Grammar(error="no.")

    monkeypatch.setattr(GrammarStore, "_work", work)
    store = store_of()
    tasks = [asyncio.create_task(store.compile(StructuredOutput("regex", f"a{i}"))) for i in range(NUM_WORKERS + 1)]
    await all_busy.wait()
    for task in tasks[:NUM_WORKERS]:
        task.cancel()
    await asyncio.sleep(0.01)
    assert len(running) == NUM_WORKERS
    go.set()
    with pytest.raises(UnusableForm):
        await tasks[-1]
    store.close()


async def test_complaints_know_their_line_and_keywords(store: GrammarStore) -> None:
    unique = '%json {"type": "array", "uniqueItems": true}'
    both = StructuredOutput("choice", '["a"]', "field", calls=f"start: x\nx: {unique}")
    alone = StructuredOutput("lark", f"start: x\n\nx: {unique}", "field")
    schema = StructuredOutput("json", '{"items": {"uniqueItems": true}}', "field")
    for form, line, place in ((both, 2, ""), (alone, 3, "line 3, column 4: "), (schema, None, "")):
        with pytest.raises(UnusableForm) as caught:
            await store.compile(form)
        assert (caught.value.line, caught.value.keywords) == (line, ("uniqueItems",))
        assert str(caught.value) == f"field is not usable: {place}{caught.value.reason}"
    assert 'it uses "uniqueItems" at items, which' in caught.value.reason


async def test_a_spent_grammar_is_compiled_anew_while_others_hold_it(store: GrammarStore) -> None:
    store.acquire(YES)
    held = store._num_bytes
    store.spend(YES)
    with pytest.raises(QueueFull):
        store.acquire(YES)
    assert await store.compile(YES) is False
    assert await store.compile(YES) is True
    assert store._num_bytes == held
    store.acquire(YES)
    assert store._grammars[YES].num_users == 2
    store.release(YES)
    store.release(YES)
    assert store._grammars[YES].num_users == 0


async def told(store: GrammarStore, kind: Any, source: str) -> str:
    with pytest.raises(InvalidParameter) as caught:
        await store.compile(StructuredOutput(kind, source, "field"))
    message = str(caught.value)
    assert message.startswith("field is not usable: ")
    assert message.endswith((".", "..."))
    for scaffold in (
        "\n",
        " | ",
        "%llguidance",
        "no_forcing",
        "x-guidance",
        "whitespace_pattern",
        "NoExtension",
        "1(8)",
    ):
        assert scaffold not in message
    return message.removeprefix("field is not usable: ")


@pytest.mark.parametrize("pattern", [r"[^\s\S]", r"[^\w\W]x", r"a[^\d\D]b"])
async def test_a_pattern_that_matches_nothing(store: GrammarStore, pattern: str) -> None:
    assert "nothing can match" in await told(store, "regex", pattern)
    assert "nothing can match" in await told(store, "json", json.dumps({"type": "string", "pattern": pattern}))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("start: start", "refers to itself without end"),
        ("start: A\nA: /a/ & /b/", "nothing can match"),
        ('start: "a" A\nA: /[^a-\\x{10FFFF}\\x00-a]/', "place where nothing can follow"),
        ("start: b", 'line 1, column 8: unknown name: "b"'),
        ("start: a\n" + "\n" * 60 + "a: b", "line 62, column 4: unknown name"),
        ('start: "a', "line 1, column 10: it cannot be read"),
        ("start: (", "')' is missing before the line ends"),
        ("start: /(/", "regular expression in it cannot be read: unclosed group"),
        ("start: | " + " | ".join(f'"a{i}"' for i in range(10_000)), "too complex"),
        ("%import foo", "imports foo"),
        ("start: <foo>", "unknown special token"),
        ("start: @other", "no other grammar"),
    ],
)
async def test_complaints_about_grammars_are_sentences(store: GrammarStore, grammar: str, words: str) -> None:
    assert words in await told(store, "lark", grammar)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "#"}, "refers to itself without end"),
        ({"$ref": "#/$defs/a"}, "refers to #/$defs/a, which does not exist"),
        ({"$ref": "http://a.b/c"}, "nothing is fetched"),
        ({"not": {}, "if": {}}, 'it uses "if" and "not" at its top level, which cannot be enforced'),
        ({"enum": []}, "empty list of alternatives"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "a\\bb"}, "word boundary"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "nothing can match it: minItems"),
        ({"type": "integer", "multipleOf": 0}, "greater than 0"),
        ({"type": "strange"}, "invalid type: strange"),
        ({"minLength": -1, "type": "string"}, "expected positive integer for 'minLength'"),
    ],
)
async def test_complaints_about_schemas_are_sentences(store: GrammarStore, schema: Any, words: str) -> None:
    assert words in await told(store, "json", json.dumps(schema))


async def test_what_would_fail_soon_is_refused_before(store: GrammarStore) -> None:
    assert "too complex" in await told(store, "regex", "((a{1,100}){1,100}){1,100}")


def costly(number: int) -> StructuredOutput:
    return StructuredOutput("json", json.dumps({"type": "integer", "multipleOf": number}))


async def test_costly_grammars_hold_up_nobody_else() -> None:
    store = store_of()
    hostile = [asyncio.create_task(store.compile(costly(999_983 + i))) for i in range(12)]
    await asyncio.sleep(0)
    assert await store.compile(YES) is False
    assert any(not task.done() for task in hostile)
    refused = list(asyncio.as_completed(hostile))
    full = 0
    while not full:  # 12 do not fit in a queue of 8
        try:
            await refused.pop(0)
        except QueueFull:
            full += 1
        except InvalidParameter:
            pass
    assert await store.compile(StructuredOutput("choice", '["b"]')) is False
    store.close()
    await asyncio.gather(*hostile, return_exceptions=True)


async def test_each_grammar_counts_what_it_takes() -> None:
    """Also where those before it have left room behind."""
    store = store_of()
    for number in (9991, 9993, 9995):
        await store.compile(costly(number))
    await store.compile(YES)
    assert all(store._grammars[costly(number)].num_bytes > 2 << 20 for number in (9991, 9993, 9995))
    assert store._grammars[YES].num_bytes < 1 << 20
    store.close()


async def test_the_process_that_was_ended_by_others_is_replaced(store: GrammarStore) -> None:
    for probe in store._probes:
        assert probe._process is not None
        probe._process.kill()
    assert await store.compile(StructuredOutput("choice", '["b"]')) is False


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
