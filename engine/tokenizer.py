"""Text to token ids and back, on the event loop's side of the house: no torch, no transformers.

`Tokenizer` wraps a `tokenizers` object that is never changed after construction, so any thread may use it.
`Detokenizer` and `StopMatcher` are the two hold-backs between sampled ids and text that may be sent: an
unfinished UTF-8 character, and the beginning of a possible stop string. Both give, over any split of their
input, the same text as over the whole.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.config import StartError
from engine.stop_matcher import StopMatcher, StopStrings
from engine.token_bytes import ByteTable

__all__ = ["Detokenizer", "StopMatcher", "StopStrings", "Tokenizer"]

_TAG = re.compile(r"[<\[{|].*[>\]}|]")


class Tokenizer:
    """One model's vocabulary.

    vocab_size: ids known to the tokenizer lie in [0, vocab_size); a model may have more rows, which have no text.
    eos_token_ids: every id that ends a text: the union of what generation_config, config, tokenizer and GGUF
        metadata name.
    chat_template: Jinja source of the default template, None if the model has none.
    chat_templates: all named templates, the default one under "default".
    special_tokens: "bos_token", "eos_token", ... -> text, as templates expect them.
    control_texts: spellings of the control tokens: those marked special and those the chat template writes.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        added = backend.get_added_tokens_decoder()
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_templates: Mapping[str, str] = MappingProxyType(dict(chat_templates or {}))
        self.chat_template = self.chat_templates.get("default")
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(special_tokens or {}))
        self.control_texts = frozenset(_control_texts(added, self.chat_template or ""))
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes = ByteTable(backend, added)
        self._visible = ByteTable(backend, added, hidden=self._special)
        self._partly_visible: dict[frozenset[int], ByteTable] = {}  # an output format's marks shown: one or two
        self._with_control = backend
        self._without_control = _without_control(backend, added, self.control_texts)
        bos = self.special_tokens.get("bos_token")
        self._bos_text = bos if bos and bos_token_id is not None and self._adds_bos(bos_token_id) else None

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids of `text`.

        add_special_tokens: adds what the model expects around a text (BOS, mostly), once: text that already begins
            with BOS and may contain control tokens gets no second one.
        allow_special: control-token text becomes the control token (templates, raw completion prompts); otherwise it
            is spelled out in ordinary tokens and cannot steer the model's format (chat content).
        Lone surrogates become U+FFFD. Safe to call from several threads, and other threads run meanwhile.
        """
        text = _well_formed(text)
        if not allow_special:
            return _encode(self._without_control, text, add_special_tokens)
        if add_special_tokens and self._bos_text is not None and text.startswith(self._bos_text):
            text = text[len(self._bos_text) :]
        return _encode(self._with_control, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`, each token's bytes taken as they are (a leading blank stays). Bytes that are no UTF-8
        become U+FFFD; ids without text, also those past the vocabulary, give nothing."""
        table = self._visible if skip_special_tokens else self._bytes
        return b"".join(map(table.__getitem__, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, those of a special token's text included; b"" for ids without text."""
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled exactly `text` in the vocabulary, None if there is none."""
        found: int | None = self._with_control.token_to_id(text)
        return found

    def visible_bytes(self, *, skip_special_tokens: bool, shown: Collection[int] = ()) -> ByteTable:
        """The table behind `decode`: token id -> bytes. shown: special tokens that are text all the same."""
        if not skip_special_tokens:
            return self._bytes
        kept = self._special.intersection(shown)
        if not kept:
            return self._visible
        if kept not in self._partly_visible:
            self._partly_visible[kept] = self._bytes.without(self._special - kept)
        return self._partly_visible[kept]

    def _adds_bos(self, bos_token_id: int) -> bool:
        return self._with_control.encode("", add_special_tokens=True).ids[:1] == [bos_token_id]


class Detokenizer:
    """Token ids of one choice, as they come, to text: whole characters only, as early as possible.

    The texts of all `feed` calls and `finish` joined equal `Tokenizer.decode` of all ids joined."""

    __slots__ = ("_pending", "_table")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: Collection[int] = ()) -> None:
        """shown: special tokens that are text even so."""
        self._table = tokenizer.visible_bytes(skip_special_tokens=skip_special_tokens, shown=shown)
        self._pending = b""  # at most 3 bytes: the start of a character

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that `token_ids` complete; an unfinished character waits for the next call."""
        data = self._pending + b"".join(map(self._table.__getitem__, token_ids))
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def finish(self) -> str:
        """What is still held back, as U+FFFD: no more bytes will come."""
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace")


def _control_texts(added: Mapping[int, AddedToken], template: str) -> Iterator[str]:
    """Added tokens that the template writes count only if they look like tags: Gemma adds line breaks too, and those
    must stay themselves in content."""
    for token in added.values():
        if token.special or (_TAG.fullmatch(token.content) and token.content in template):
            yield token.content


def _without_control(backend: Backend, added: Mapping[int, AddedToken], control: Collection[str]) -> Backend:
    """A second tokenizer over the same model object that spells control tokens out.

    Control tokens are those marked special and those that the chat template itself writes, such as "<tool_call>":
    both carry format. The library can switch recognition off for special tokens only, so the latter are special
    here; ids stay the same.
    """
    plain = Backend(backend.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if getattr(backend, part) is not None:
            setattr(plain, part, getattr(backend, part))
    tokens = [token for _, token in sorted(added.items())]
    for is_control, run in groupby(tokens, key=lambda token: token.content in control):
        (plain.add_special_tokens if is_control else plain.add_tokens)(list(run))  # each call rebuilds a search tree
    if any(plain.token_to_id(token.content) != token_id for token_id, token in added.items()):
        raise StartError("The tokenizer's added tokens do not follow its vocabulary, so their ids are not clear.")
    if backend.post_processor is not None:
        plain.post_processor = backend.post_processor
    plain.encode_special_tokens = True
    return plain


def _encode(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    """The library's batch call gives up the interpreter lock while it works, its single call does not: a long prompt
    would stop the event loop for seconds, from whatever thread."""
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _well_formed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
