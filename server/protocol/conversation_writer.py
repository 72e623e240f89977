"""Answers whose text means something: words, thinking, tool calls. The base of chat's writer and of the other
dialects of conversation.

One parser per choice; streamed and plain answers go through the same one, so they cannot differ.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from engine.sampling_params import ReasoningMarks
from engine.text import Piece, TokenEntry
from engine.tokenizer import Tokenizer
from server.assemble import Usage
from server.parsers.base import CallArguments, CallBegin, Content, OutputParser, Part, Reasoning
from server.protocol.answers import AnswerWriter
from server.reasoning import ReasoningCounter

NewParser = Callable[[], OutputParser]


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a plain answer. parts: neighbours of one kind are joined, so that each stretch of text is one
    part and each call is a CallBegin and at most one CallArguments.

    finish_reason: "stop", "length" or "tool_calls". thinking, entries: the logprobs of its tokens, in order.
    token_ids: all of them."""

    index: int
    parts: list[Part]
    thinking: Sequence[TokenEntry]
    entries: Sequence[TokenEntry]
    finish_reason: str
    token_ids: Sequence[int] = ()


class ChoiceState:
    """What is remembered of a choice while it is written."""

    __slots__ = ("_entries", "_num_told", "counter", "is_open", "num_calls", "parser")

    def __init__(self, parser: OutputParser | None, counter: ReasoningCounter | None) -> None:
        self.parser = parser
        self.counter = counter
        self._entries: list[TokenEntry] = []  # of tokens that may or may not be thinking
        self._num_told = 0  # tokens of thinking whose entries were told
        self.num_calls = 0
        self.is_open = False  # whether the last call's arguments are not whole (yet)

    def parse(self, piece: Piece) -> list[Part]:
        """What the piece says; also counts its calls and the tokens of thinking."""
        if self.counter is not None:
            self.counter.feed(piece.token_ids)
            if piece.finish_reason is not None:
                self.counter.finish()
        if self.parser is None:
            return [Content(piece.text)] if piece.text else []
        parts = self.parser.feed(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            parts = [*parts, *self.parser.finish()]
        for part in parts:
            if isinstance(part, CallBegin):
                self.num_calls += 1
                self.is_open = True
            elif isinstance(part, CallArguments):
                self.is_open = not part.is_whole
        return [part for part in parts if isinstance(part, CallBegin) or part.text]

    def split(self, entries: Sequence[TokenEntry]) -> tuple[Sequence[TokenEntry], Sequence[TokenEntry]]:
        """(those of thinking, those of the rest), of a piece that was parsed; held back while it is not clear."""
        if self.counter is None:
            return (), entries
        self._entries += entries
        if not self.counter.is_decided:
            return (), ()
        held, self._entries = self._entries, []
        count = self.counter.num_tokens - self._num_told
        self._num_told += count
        return held[:count], held[count:]

    def finish_reason(self, piece: Piece) -> str | None:
        """The piece's, but "tool_calls" where the model stopped after it had called: not amid its last call."""
        has_called = self.num_calls and not self.is_open
        return "tool_calls" if piece.finish_reason == "stop" and has_called else piece.finish_reason


class ConversationWriter(AnswerWriter):
    """new_parser: None where all text is content. reasoning: the marks whose tokens are to be counted."""

    def __init__(
        self, id: str, tokenizer: Tokenizer, *, new_parser: NewParser | None, reasoning: ReasoningMarks | None
    ) -> None:
        super().__init__(id)
        self._tokenizer = tokenizer
        self._new_parser = new_parser
        self._reasoning = reasoning
        self._states: dict[int, ChoiceState] = {}

    @abstractmethod
    def events(self, index: int, parts: Sequence[Part], piece: Piece) -> bytes:
        """The stream events of one piece. parts: what its text, and text held back before, turned out to be; may be
        empty. `self.finish_reason(index, piece)` tells the choice's end."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The plain answer."""

    def finish_reason(self, index: int, piece: Piece) -> str | None:
        """None, "stop", "length" or "tool_calls"."""
        return self._state(index).finish_reason(piece)

    def is_cut(self, index: int) -> bool:
        """Whether the choice's last call is not whole."""
        return self._state(index).is_open

    def event(self, index: int, piece: Piece) -> bytes:
        return self.events(index, self._state(index).parse(piece), piece)

    def answer(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        choices = [self._choice(index, each) for index, each in enumerate(pieces)]
        return self.whole(choices, self.counted(usage))

    def counted(self, usage: Usage) -> Usage:
        """`usage` with the tokens of thinking."""
        counters = [state.counter for state in self._states.values() if state.counter is not None]
        return replace(usage, num_reasoning_tokens=sum(counter.num_tokens for counter in counters))

    def split(self, index: int, piece: Piece) -> tuple[Sequence[TokenEntry], Sequence[TokenEntry]]:
        """The logprobs that may be told now: (of thinking, of the rest); for `events`, once per piece."""
        return self._state(index).split(piece.entries)

    def _state(self, index: int) -> ChoiceState:
        state = self._states.get(index)
        if state is None:
            parser = self._new_parser() if self._new_parser is not None else None
            counter = ReasoningCounter(self._tokenizer, self._reasoning) if self._reasoning is not None else None
            state = self._states[index] = ChoiceState(parser, counter)
        return state

    def _choice(self, index: int, pieces: Sequence[Piece]) -> Choice:
        state = self._state(index)
        one = one_piece(pieces)
        parts = joined(state.parse(one))
        thinking, entries = state.split([entry for piece in pieces for entry in piece.entries])
        return Choice(index, parts, thinking, entries, state.finish_reason(one) or "stop", one.token_ids)


def one_piece(pieces: Sequence[Piece]) -> Piece:
    """What they say together, without logprobs."""
    ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    return Piece("".join(piece.text for piece in pieces), (), pieces[-1].finish_reason, ids)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbouring texts of one kind as one part; empty texts are left out."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, CallBegin):
            whole.append(part)
        elif not part.text:
            continue
        elif isinstance(part, CallArguments):
            if isinstance(last, CallArguments) and last.index == part.index:
                whole[-1] = CallArguments(part.index, last.text + part.text)
            else:
                whole.append(part)
        elif type(last) is type(part):
            assert isinstance(last, (Content, Reasoning))
            whole[-1] = last._replace(text=last.text + part.text)
        else:
            whole.append(part)
    return whole
