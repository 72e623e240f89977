"""The model's own chat template: messages in, text out, and the text's token ids.

Two rules make client text harmless. The template runs in an immutable sandbox and is the model's, never a client's.
And text that spells a control token ("<|im_end|>") stays text: before rendering each such string in any leaf of the
messages is replaced by a private character that occurs nowhere else; the rendered text is cut at the template's own
control tokens, the stretches that hold a private character get the string back and are encoded as plain text, all
others as the template wrote them. Messages without such strings are encoded in one piece.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        # longest first, so that of two texts with one beginning the longer is found
        texts = sorted(filter(None, set(control_texts)), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, texts))) if texts else None
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

    def encode(self, messages: Sequence[dict[str, Any]], check_length: Callable[[str], None]) -> list[int]:
        """Token ids of the rendered messages. check_length: sees the rendered text before it is tokenised.

        Raises ChatTemplateError and what check_length raises."""
        try:
            return self._encode_messages(messages, check_length)
        except RecursionError:
            raise ChatTemplateError("The messages are nested too deeply.") from None

    def _encode_messages(self, messages: Sequence[dict[str, Any]], check_length: Callable[[str], None]) -> list[int]:
        control = self._control
        leaves = list(_leaves(messages))
        found = {match for leaf in leaves for match in control.findall(leaf)} if control is not None else set()
        if control is None or not found:
            text = self.render(messages)
            check_length(text)
            return self._encode(text, control_tokens=True)
        private = self._private_characters(found, leaves)
        restore = {character: text for text, character in private.items()}
        hidden = _map_leaves(messages, lambda leaf: control.sub(lambda match: private[match[0]], leaf))
        rendered = self.render(hidden)
        check_length(rendered)
        marks = re.compile("[" + "".join(restore) + "]")
        token_ids: list[int] = []
        for stretch, is_plain in _stretches(rendered, control, marks):
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
