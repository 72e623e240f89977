"""The model's own chat template: messages in, text out, and the text's token ids.

Two rules make client text harmless. The template runs in an immutable sandbox and is the model's, never a client's.
And text that spells a control token ("<|im_end|>") stays text: before rendering each such string in any leaf of the
messages is replaced by a private character that occurs nowhere else; the rendered text is cut at the template's own
control tokens, the stretches that hold a private character get the string back and are encoded as plain text, all
others as the template wrote them. Messages without such strings are encoded in one piece.

In assistant messages only the vocabulary's special tokens are kept from coming alive: tags like "</think>", which
templates look for in the assistant's earlier words, are what the model itself wrote.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.tokenizer import Tokenizer

PRIVATE_USE = range(0xF0000, 0x110000)  # the two supplementary planes of Unicode without meaning


class ChatTemplateError(Exception):
    """The template refuses these messages, or cannot be used. The message may be told to the client."""


class GenerationBlocks(Extension):
    """{% generation %}...{% endgeneration %}, with which templates mark the assistant's words for training: here
    just its content."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template, compiled once; safe to use from several threads.

    Raises ChatTemplateError if the template is no valid Jinja."""

    def __init__(self, source: str, tokenizer: Tokenizer, control_texts: Iterable[str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlocks]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(f"The model's chat template cannot be read: {error.message}") from None
        self._tokenizer = tokenizer
        texts = set(control_texts)
        self._control = any_of(texts)
        self._special = any_of(text for text in texts if _is_special(tokenizer, text))
        self._source_chars = frozenset(source)
        # "developer" is OpenAI's newer name of the system role; few models were trained with it
        self._knows_developer = "developer" in source

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The text the template makes of `messages`, up to where the assistant begins to speak.

        Raises ChatTemplateError for everything that goes wrong inside."""
        if not self._knows_developer:
            messages = [m | {"role": "system"} if m.get("role") == "developer" else m for m in messages]
        try:
            text: str = self._template.render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._tokenizer.special_tokens,
            )
        except TemplateError as error:
            raise ChatTemplateError(f"The model's chat template refuses these messages: {error.message}") from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError):
            raise ChatTemplateError("The model's chat template cannot handle these messages.") from None
        return text

    def encode(self, messages: Sequence[dict[str, Any]], check_length: Callable[[int], None]) -> list[int]:
        """Token ids of the rendered messages. check_length: told the characters of the messages, then those of the
        rendered text, before work is spent on them.

        Raises ChatTemplateError and what check_length raises."""
        try:
            return self._encode_messages(messages, check_length)
        except RecursionError:
            raise ChatTemplateError("The messages are nested too deeply.") from None

    def _encode_messages(self, messages: Sequence[dict[str, Any]], check_length: Callable[[int], None]) -> list[int]:
        leaves = [list(_leaves(message)) for message in messages]
        check_length(sum(len(leaf) for each in leaves for leaf in each))
        patterns = [self._special if m.get("role") == "assistant" else self._control for m in messages]
        found = {text for p, each in zip(patterns, leaves, strict=True) for leaf in each for text in p.findall(leaf)}
        if not found:
            text = self.render(messages)
            check_length(len(text))
            return self._encode(text, control_tokens=True)
        private = self._private_characters(found, [leaf for each in leaves for leaf in each])
        hidden = [
            _map_leaves(message, partial(pattern.sub, lambda match: private[match[0]]))
            for message, pattern in zip(messages, patterns, strict=True)
        ]
        rendered = self.render(hidden)
        check_length(len(rendered))
        return self._encode_marked(rendered, {character: text for text, character in private.items()})

    def _encode_marked(self, rendered: str, restore: Mapping[str, str]) -> list[int]:
        """restore: private character -> the text it stands for, which is to be spelled out."""
        marks = re.compile("[" + "".join(restore) + "]")
        token_ids: list[int] = []
        for stretch, is_plain in _stretches(rendered, self._control, marks):
            text = marks.sub(lambda match: restore[match[0]], stretch) if is_plain else stretch
            token_ids += self._encode(text, control_tokens=not is_plain)
        return token_ids

    def _encode(self, text: str, *, control_tokens: bool) -> list[int]:
        # the template writes BOS itself, so the tokenizer must not
        return self._tokenizer.encode(text, add_special_tokens=False, allow_special=control_tokens)

    def _private_characters(self, texts: Iterable[str], leaves: Iterable[str]) -> dict[str, str]:
        """A character for each text that neither the messages nor the template contain."""
        used = self._source_chars.union(*leaves)
        free = (character for code in PRIVATE_USE if (character := chr(code)) not in used)
        wanted = sorted(texts)
        found = list(islice(free, len(wanted)))
        if len(found) < len(wanted):
            raise ChatTemplateError("The messages use too many of Unicode's private characters.")
        return dict(zip(wanted, found, strict=True))


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of `texts`, the longest where several begin; none at all if there are none.

    Written as a tree by first characters: Gemma has 6,000 control tokens that begin with "<", and trying them one
    after the other at each "<" of a text would take a second per 10,000 of them."""

    def branch(words: Iterable[str]) -> str:
        by_first: dict[str, list[str]] = {}
        may_end = False
        for word in words:
            if word:
                by_first.setdefault(word[0], []).append(word[1:])
            else:
                may_end = True
        if not by_first:
            return ""
        body = "|".join(re.escape(first) + branch(rest) for first, rest in by_first.items())
        if may_end:
            return f"(?:{body})?"
        return f"(?:{body})" if len(by_first) > 1 else body

    return re.compile(branch(filter(None, texts)) or r"(?!)")


def _is_special(tokenizer: Tokenizer, text: str) -> bool:
    token_id = tokenizer.token_id(text)
    return token_id is not None and tokenizer.is_special(token_id)


def _stretches(rendered: str, control: re.Pattern[str], marks: re.Pattern[str]) -> Iterable[tuple[str, bool]]:
    """(text, whether it holds private characters): the rendered text cut at the template's control tokens, with
    neighbouring stretches without private characters, and the control tokens, left together."""
    start = together = 0
    for end, after in [*((match.start(), match.end()) for match in control.finditer(rendered)), (len(rendered),) * 2]:
        if marks.search(rendered, start, end):
            if together < start:
                yield rendered[together:start], False
            yield rendered[start:end], True
            together = end
        start = after
    if together < len(rendered):
        yield rendered[together:], False


def _leaves(value: Any) -> Iterable[str]:
    """Every string inside: values and, since a template may print them, keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(key)
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)


def _map_leaves(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_leaves(key, change): _map_leaves(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_leaves(item, change) for item in value]
    return value


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As models were trained: no HTML escapes, text as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
