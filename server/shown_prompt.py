"""A prompt as its answer shows it: its text before each choice, its tokens with their logprobs.

Knows no JSON. The engine brings the logprobs in chunks, all before the first token of any choice of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.outputs import PromptLogprobs
from engine.text import Piece, TokenEntry
from engine.tokenizer import Detokenizer, Tokenizer


class ShownPrompt:
    """token_ids: what was computed; text: what is echoed.

    echo: the text goes before each choice; num_echoed: and with it the logprobs of its tokens with so many
    alternatives (None: without)."""

    def __init__(
        self, tokenizer: Tokenizer, token_ids: Sequence[int], text: str, *, echo: bool, num_echoed: int | None
    ) -> None:
        self.token_ids = token_ids
        self._tokenizer = tokenizer
        self._text = text if echo else ""
        self._num_alternatives = num_echoed if echo else None
        self._chunks: list[PromptLogprobs] = []

    @property
    def num_chars(self) -> int:
        """Characters that stand before the text of each choice."""
        return len(self._text)

    @property
    def num_echoed(self) -> int:
        """Tokens whose logprobs go before each choice."""
        return 0 if self._num_alternatives is None else len(self.token_ids)

    def take(self, chunks: Sequence[PromptLogprobs]) -> None:
        """Logprobs of further tokens, in order."""
        self._chunks += chunks

    def before(self, piece: Piece) -> Piece:
        """The first piece of a choice with the echo before it."""
        return piece._replace(text=self._text + piece.text, entries=self._echoed() + piece.entries)

    def logprobs(self) -> Iterator[tuple[PromptLogprobs, int]]:
        """Per prompt token from the second on: the chunk that has it, and its place there."""
        for chunk in self._chunks:
            for index in range(len(chunk.logprobs)):
                yield chunk, index

    def _echoed(self) -> tuple[TokenEntry, ...]:
        if self._num_alternatives is None:
            return ()
        offsets = token_offsets(self._tokenizer, self.token_ids, self._text)
        entries = [TokenEntry(self.token_ids[0], None, None, offsets[0])]
        for place, (chunk, index) in enumerate(self.logprobs(), start=1):
            top = chunk.top(index, self._num_alternatives)
            entries.append(TokenEntry(self.token_ids[place], chunk.logprobs[index], top, offsets[place]))
        return tuple(entries)


def token_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Characters of `text` before each token. What the tokenizer puts before a text (a beginning-of-text token, a
    blank) is no part of it."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    offsets, seen = [], ""
    for token_id in token_ids:
        offsets.append(len(seen))
        seen += detokenizer.feed((token_id,))
    seen += detokenizer.finish()
    added = len(seen) - len(text) if seen.endswith(text) else 0
    return [min(max(offset - added, 0), len(text)) for offset in offsets]
