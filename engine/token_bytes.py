"""Which bytes a token stands for, whatever stands beside it.

A tokenizer's own `decode` works on whole sequences and looks at neighbours: it strips a leading blank, joins
word pieces, drops broken UTF-8. A stream cannot wait for neighbours, so here every token id maps to fixed bytes
and text is the concatenation of them, streamed and plain alike. The map follows the decoder that tokenizer.json
declares:

| decoder                                | token text to bytes                                      |
|----------------------------------------|----------------------------------------------------------|
| ByteLevel                              | each character is one byte, in GPT-2's printable alphabet |
| Replace / Metaspace (+ ByteFallback)   | the replaced character is a blank, "<0xAB>" is byte AB    |
| WordPiece                              | "##x" continues a word, anything else follows a blank     |
| BPEDecoder                             | the suffix ends a word and becomes a blank                |
| none                                   | words joined by blanks, as the tokenizers library does    |

Knows no torch, no transformers and no model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
ToBytes = Callable[[str], bytes]


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the other 68 bytes follow from
    U+0100 upwards in ascending order, so that a vocabulary has no blanks or control characters in it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + position): byte for position, byte in enumerate(hidden)})
    return alphabet


class ByteTable(dict[int, bytes]):
    """Token id -> bytes, filled on first use; ids without text give b"" and are not stored.

    hidden: ids that give b"" (special tokens, where they shall not be seen)."""

    def __init__(self, backend: Backend, added: Mapping[int, Any], hidden: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._backend = backend
        self._size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self._added = added
        self._hidden = hidden
        self._convert = converter(backend)
        self._convert_added = added_converter(backend)

    def without(self, hidden: frozenset[int]) -> ByteTable:
        """A table over the same vocabulary in which `hidden` gives b""."""
        return ByteTable(self._backend, self._added, hidden)

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._size or token_id in self._hidden:
            return b""
        entry = self._added.get(token_id)
        if entry is not None:
            data = entry.content.encode() if entry.special else self._convert_added(entry.content)
        else:
            text = self._backend.id_to_token(token_id)
            data = b"" if text is None else self._convert(text)
        self[token_id] = data
        return data


def converter(backend: Backend) -> ToBytes:
    """The function from a vocabulary entry to its bytes for this tokenizer's declared decoder."""
    parts = list(_decoder_parts(backend))
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"Replace", "Metaspace", "ByteFallback"}:
        return _replacing(_blanks(parts), byte_fallback="ByteFallback" in kinds)
    for part in parts:
        if part["type"] == "WordPiece":
            return _word_piece(part.get("prefix", "##"))
        if part["type"] == "BPEDecoder":
            return _suffixed(part.get("suffix", "</w>"))
    return _spaced if not parts else _single(backend)


def added_converter(backend: Backend) -> ToBytes:
    """Added tokens that are text are stored as the text itself, but for SentencePiece's blank."""
    parts = list(_decoder_parts(backend))
    if any(part["type"] == "ByteLevel" for part in parts):
        return str.encode
    return _replacing(_blanks(parts), byte_fallback=False)


def _decoder_parts(backend: Backend) -> Iterator[dict[str, Any]]:
    if backend.decoder is None:
        return
    pending = [json.loads(backend.decoder.__getstate__())]
    while pending:
        part = pending.pop()
        if part["type"] == "Sequence":
            pending.extend(reversed(part["decoders"]))
        else:
            yield part


def _blanks(parts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(from, to) of every literal replacement among the decoder's parts."""
    pairs = []
    for part in parts:
        if part["type"] == "Metaspace":
            pairs.append((part.get("replacement", "\u2581"), " "))
        elif part["type"] == "Replace" and "String" in part["pattern"]:
            pairs.append((part["pattern"]["String"], part["content"]))
    return pairs


_ALPHABET = byte_alphabet()


def _byte_level(text: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in text])
    except KeyError:  # an entry that was put in as plain text
        return text.encode()


def _replacing(pairs: list[tuple[str, str]], *, byte_fallback: bool) -> ToBytes:
    def convert(text: str) -> bytes:
        if byte_fallback and (found := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(found[1], 16)])
        for old, new in pairs:
            text = text.replace(old, new)
        return text.encode()

    return convert


def _word_piece(prefix: str) -> ToBytes:
    return lambda text: (text[len(prefix) :] if text.startswith(prefix) else " " + text).encode()


def _suffixed(suffix: str) -> ToBytes:
    return lambda text: (text.removesuffix(suffix) + " " if text.endswith(suffix) else text).encode()


def _spaced(text: str) -> bytes:
    return b" " + text.encode()


def _single(backend: Backend) -> ToBytes:
    """For decoders this module does not know: what the library makes of the token alone."""

    def convert(text: str) -> bytes:
        token_id = backend.token_to_id(text)
        return b"" if token_id is None else backend.decode([token_id], skip_special_tokens=False).encode()

    return convert
