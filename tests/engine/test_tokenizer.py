"""Tokenizer: what becomes a control token, what every id's bytes are, and that text never depends on neighbours."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import run

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokenizer import Tokenizer
from tests.engine.vocabularies import KINDS, byte_level, sentencepiece, suffixed, whole_words, word_pieces

BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()


@settings(deadline=None)  # a busy machine
@given(st.text())
def test_byte_level_text_survives(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text
    assert not any(map(BYTE_LEVEL.is_special, ids))


@settings(deadline=None)  # a busy machine
@given(st.text())
def test_sentencepiece_text_survives_with_its_prefix_blank(text: str) -> None:
    text = text.replace("\u2581", "")
    ids = SENTENCEPIECE.encode(text)
    assert SENTENCEPIECE.decode(ids, skip_special_tokens=False) == (" " + text if text else "")


@pytest.mark.parametrize("kind", KINDS)
def test_no_id_fails_and_text_is_the_bytes_of_the_tokens(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = range(-3, tokenizer.vocab_size + 300)
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert tokenizer.decode(ids, skip_special_tokens=False) == joined.decode("utf-8", "replace")
    visible = b"".join(tokenizer.token_bytes(token_id) for token_id in ids if not tokenizer.is_special(token_id))
    assert tokenizer.decode(ids) == visible.decode("utf-8", "replace")
    for token_id in (-1, tokenizer.vocab_size, 10**9):
        assert tokenizer.token_bytes(token_id) == b""


def test_control_text_is_spelled_out_unless_allowed() -> None:
    text = "x<|end|>y"
    assert 0 not in BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text
    ids = BYTE_LEVEL.encode(text, allow_special=True)
    assert ids.count(0) == 1
    assert BYTE_LEVEL.decode(ids) == "xy"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text


def test_added_text_tokens_are_text_unless_the_template_writes_them() -> None:
    note = BYTE_LEVEL.encode("<note>", allow_special=True)
    assert len(note) == 1
    assert BYTE_LEVEL.encode("<note>") == note
    assert not BYTE_LEVEL.is_special(note[0])
    assert BYTE_LEVEL.decode(note) == "<note>"
    speaking = byte_level(chat_template="{{ '<note>' + messages[0].content }}")
    assert speaking.control_texts == {"<|end|>", "<|start|>", "<note>"}
    assert speaking.encode("<note>", allow_special=True) == note
    assert note[0] not in speaking.encode("<note>")
    assert speaking.decode(speaking.encode("<note>")) == "<note>"
    assert speaking.decode(note) == "<note>"  # seen in the answer all the same: it is not marked special


def test_added_tokens_are_not_read_in_the_byte_alphabet() -> None:
    (token_id,) = BYTE_LEVEL.encode("<é>")
    assert BYTE_LEVEL.token_bytes(token_id) == "<é>".encode()


def test_bos_comes_once() -> None:
    tokenizer = byte_level(adds_bos=True)
    plain = tokenizer.encode("x", add_special_tokens=False)
    assert tokenizer.encode("x") == [1, *plain]
    assert tokenizer.encode("<|start|>x", allow_special=True) == [1, *plain]
    assert tokenizer.encode("<|start|>x", add_special_tokens=False, allow_special=True) == [1, *plain]
    assert tokenizer.encode("<|start|>").count(1) == 1  # the text itself is spelled out
    assert BYTE_LEVEL.encode("<|start|>x", allow_special=True) == [1, *plain]


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\ud83d x", "\udc00\ud800"])
def test_lone_surrogates_become_replacement_characters(text: str) -> None:
    decoded = BYTE_LEVEL.decode(BYTE_LEVEL.encode(text))
    assert decoded == "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)


def test_leading_blanks_stay() -> None:
    ids = BYTE_LEVEL.encode(" ab ab")
    assert [BYTE_LEVEL.token_bytes(token_id) for token_id in ids] == [b" ab", b" ab"]
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode("ab", add_special_tokens=False)[-1:]) == " ab"


def test_other_decoders() -> None:
    assert word_pieces().decode([1, 2, 3]) == " playing chess"
    assert whole_words().decode([1, 2]) == " one two"
    assert suffixed().decode([0, 1, 0, 2]) == "low loer "


def test_broken_utf8_becomes_replacement_characters() -> None:
    (high, low) = SENTENCEPIECE.encode("é", add_special_tokens=False)[1:]
    assert SENTENCEPIECE.token_bytes(high) == b"\xc3"
    assert SENTENCEPIECE.decode([high]) == "\ufffd"
    assert SENTENCEPIECE.decode([low, high, low]) == "\ufffdé"


def test_threads_share_one_tokenizer() -> None:
    texts = [f"{'ab ' * (number % 50)}<|end|>{number}" for number in range(400)]
    alone = [(BYTE_LEVEL.encode(text), BYTE_LEVEL.encode(text, allow_special=True)) for text in texts]

    def both(text: str) -> tuple[list[int], list[int]]:
        return BYTE_LEVEL.encode(text), BYTE_LEVEL.encode(text, allow_special=True)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(both, texts)) == alone


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    text = " abacus" * 60_000
    with ThreadPoolExecutor(1) as pool:
        started = last = time.monotonic()
        running = pool.submit(BYTE_LEVEL.encode, text)
        longest = 0.0
        while not running.done():
            time.sleep(0)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        whole = time.monotonic() - started
    assert longest < whole / 2, f"stood still for {longest:.3f} s of {whole:.3f} s"
    assert len(running.result()) > len(text) // 2


def test_named_templates() -> None:
    tokenizer = Tokenizer(word_pieces()._with_control, chat_templates={"default": "a", "tool_use": "b"})
    assert tokenizer.chat_template == "a"
    assert dict(tokenizer.chat_templates) == {"default": "a", "tool_use": "b"}
    assert word_pieces().chat_template is None


def test_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, engine.tokenizer, engine.tokenizer_files; print({'torch', 'transformers'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    assert run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout.strip() == "set()"
