"""How many of a choice's tokens were thinking: by the bytes of the tokens, so that the count does not depend on how
the output was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.sampling_params import ReasoningMarks
from engine.tokenizer import Tokenizer


class ReasoningCounter:
    """One choice. Counts up to and including the token that completes the end mark; all tokens if none comes."""

    __slots__ = ("_decided", "_end", "_over", "_seen", "_start", "_tokenizer", "_waiting", "num_tokens")

    def __init__(self, tokenizer: Tokenizer, marks: ReasoningMarks) -> None:
        self._tokenizer = tokenizer
        self._start = marks.start.encode()
        self._end = marks.end.encode()
        self._decided = marks.opened  # that there is thinking
        self._over = not marks.opened and not marks.start  # no start mark: only a prompt can open the thinking
        self._seen = b""  # the last bytes, or all until it is decided
        self._waiting = 0  # tokens that may turn out to be no thinking
        self.num_tokens = 0

    def feed(self, token_ids: Iterable[int]) -> None:
        """Tokens in which the start mark may still grow count once it is there."""
        for token_id in token_ids:
            if self._over:
                break
            self._seen += self._tokenizer.token_bytes(token_id)
            self._waiting += 1
            if not self._decided:
                self._decide()
            if self._decided:
                self.num_tokens += self._waiting
                self._waiting = 0
                self._over = self._end in self._seen
                self._seen = self._seen[-len(self._end) + 1 :] if len(self._end) > 1 else b""

    @property
    def is_decided(self) -> bool:
        """False while the output may still turn out to begin with the start mark."""
        return self._decided or self._over

    def finish(self) -> None:
        """Nothing follows: what did not become a start mark is no thinking."""
        self._over = True

    def _decide(self) -> None:
        text = self._seen.lstrip()
        if text.startswith(self._start):
            self._decided = True
            self._seen = text[len(self._start) :]
        elif not self._start.startswith(text):
            self._over = True
