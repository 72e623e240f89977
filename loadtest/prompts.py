"""Prompts of a wanted length: token ids (exact), or words that most vocabularies hold as one token each."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Protocol

from loadtest.lengths import UsageError

Prompt = tuple[int, ...] | str

TEXT = """
    the of and to in is was for on that with as it by from are at this have not be or an which but has one more
    when who all their they about would time people other some what there into than then first two these only any
    may each year work part place made after new also way many must back where much before good right little own
    long same another know while last might great old three state never become between high really something most
    much family water house world school night hand small large line next early group often run important until
    children side feet car mile river book city area problem body music color face fish paper road town wind rock
    order fire south
"""
WORDS = tuple(TEXT.split())


class PromptSource(Protocol):
    def draw(self, random: Random, length: int) -> Prompt:
        """A random prompt of `length` tokens."""

    def join(self, first: Prompt, second: Prompt) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids in [low, high): inside the vocabulary, and past the control tokens that sit at its start or end."""

    low: int = 1000
    high: int = 30000

    def draw(self, random: Random, length: int) -> Prompt:
        return tuple(random.choices(range(self.low, self.high), k=length))

    def join(self, first: Prompt, second: Prompt) -> Prompt:
        assert isinstance(first, tuple)
        assert isinstance(second, tuple)
        return first + second


class Words:
    """For servers that take text only. The server's own prompt_tokens is what gets reported."""

    def draw(self, random: Random, length: int) -> Prompt:
        return " ".join(random.choices(WORDS, k=length))

    def join(self, first: Prompt, second: Prompt) -> Prompt:
        return f"{first} {second}"


def prompt_source(text: str) -> PromptSource:
    """`text`, `ids` or `ids:LOW:HIGH`. Raises UsageError."""
    if text == "text":
        return Words()
    kind, *bounds = text.split(":")
    if kind == "ids" and not bounds:
        return TokenIds()
    if kind == "ids" and len(bounds) == 2 and all(bound.isdecimal() for bound in bounds):
        source = TokenIds(int(bounds[0]), int(bounds[1]))
        if source.low < source.high:
            return source
    raise UsageError(f"Prompts must be ids, ids:LOW:HIGH or text, got {text!r}.")
