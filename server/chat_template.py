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

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser

from engine.tokenizer import Tokenizer
from server.raw_json import RawJson
from server.template_limits import LimitedEnvironment, TemplateTooSlow

PRIVATE_USE = range(0xF0000, 0x110000)  # the two supplementary planes of Unicode without meaning
MAX_RENDER_S = 10.0
TAIL_CHARS = 256
CUT = "\0"  # stands for the end of a message that is to be continued; no text of a message or control token


class ChatTemplateError(Exception):
    """The template refuses these messages, or cannot be used. The message may be told to the client."""


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What a template is rendered with. The fields of messages, tools and variables are a client's, and guarded alike.

    tools: function tools as OpenAI spells them. variables: further values the template may look at, by name.
    continue_final_message: the text ends where the last message's content ends, so that the model goes on with it."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Encoded(NamedTuple):
    """tail: the last characters of the rendered text (of text that spells control tokens, stand-ins)."""

    token_ids: list[int]
    tail: str


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
        environment = self._environment = LimitedEnvironment(
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

    def render(self, given: TemplateInput) -> str:
        """The text the template makes. Templates that insist on roles in turn, or on a system message first or none,
        get what they refuse in plainer words: see `plainer`.

        Raises ChatTemplateError for everything that goes wrong inside, and when it takes too long."""
        messages = given.messages if self._knows_developer else _without_developer(given.messages)
        with self._environment.within(MAX_RENDER_S):
            try:
                return self._render(given, messages)
            except ChatTemplateError as error:
                for plain in plainer(messages):
                    with contextlib.suppress(ChatTemplateError):
                        return self._render(given, plain)
                raise error

    def _render(self, given: TemplateInput, messages: Sequence[dict[str, Any]]) -> str:
        fixed = {"messages": messages, "tools": given.tools, "add_generation_prompt": given.add_generation_prompt}
        try:
            return "".join(
                self._template.generate(
                    {"documents": None} | dict(given.variables) | fixed | dict(self._tokenizer.special_tokens)
                )
            )
        except TemplateTooSlow:
            raise ChatTemplateError("The model's chat template takes too long over these messages.") from None
        except TemplateError as error:
            raise ChatTemplateError(f"The model's chat template refuses these messages: {error.message}") from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError):
            raise ChatTemplateError("The model's chat template cannot handle these messages.") from None

    def encode(self, given: TemplateInput, check_length: Callable[[int], None]) -> Encoded:
        """Token ids of the rendered messages. check_length: told the characters of what is given, then those of the
        rendered text, before work is spent on them.

        Raises ChatTemplateError and what check_length raises."""
        try:
            return self._encode_input(given, check_length)
        except RecursionError:
            raise ChatTemplateError("The messages are nested too deeply.") from None

    def _encode_input(self, given: TemplateInput, check_length: Callable[[int], None]) -> Encoded:
        beside = [given.tools or (), given.variables]
        guarded = [*given.messages, *beside]
        patterns = [self._special if m.get("role") == "assistant" else self._control for m in given.messages]
        patterns += [self._control] * len(beside)
        leaves = [list(_leaves(value)) for value in guarded]
        check_length(sum(len(leaf) for each in leaves for leaf in each))
        found = {text for p, each in zip(patterns, leaves, strict=True) for leaf in each for text in p.findall(leaf)}
        if given.continue_final_message:
            found.add(CUT)
        if not found:
            text = self.render(given)
            check_length(len(text))
            return Encoded(self._encode(text, control_tokens=True), text[-TAIL_CHARS:])
        private = self._private_characters(found, [leaf for each in leaves for leaf in each])
        *messages, tools, variables = (
            _map_leaves(value, partial(pattern.sub, lambda match: private[match[0]]))
            for value, pattern in zip(guarded, patterns, strict=True)
        )
        mark = private.pop(CUT, None)
        if mark is not None:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + mark}
        rendered = self.render(replace(given, messages=messages, tools=tools or None, variables=variables))
        if mark is not None:
            rendered = _up_to(mark, rendered)
        check_length(len(rendered))
        restore = {character: text for text, character in private.items()}
        token_ids = self._encode_marked(rendered, restore) if restore else self._encode(rendered, control_tokens=True)
        return Encoded(token_ids, rendered[-TAIL_CHARS:])

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


def _without_developer(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Developer messages as system ones; those at the beginning as one, since many templates take only one."""
    if not any(m.get("role") == "developer" for m in messages):
        return messages
    said = [m | {"role": "system"} if m.get("role") == "developer" else m for m in messages]
    count = next((k for k, m in enumerate(said) if m.get("role") != "system"), len(said))
    if count < 2:
        return said
    return [said[0] | {"content": "\n\n".join(str(m["content"]) for m in said[:count])}, *said[count:]]


def plainer(messages: Sequence[dict[str, Any]]) -> Iterable[Sequence[dict[str, Any]]]:
    """The same words under fewer rules, for a template that refuses `messages`: system messages at the beginning as
    one, later ones as the user's, neighbours of the user's as one; then also the first system message as the user's.
    Agents send such conversations to every model."""
    leading = next((k for k, m in enumerate(messages) if m.get("role") != "system"), len(messages))
    later = [m | {"role": "user"} if m.get("role") == "system" else m for m in messages[leading:]]
    merged = _merged([*messages[:leading], *later])
    if merged != list(messages):
        yield merged
    if leading and len(messages) > leading:
        yield _merged([m | {"role": "user"} if m.get("role") == "system" else m for m in messages])


def _merged(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        if found and role in ("system", "user") and found[-1].get("role") == role:
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n\n{message['content']}"}
        else:
            found.append(message)
    return found


def _up_to(mark: str, rendered: str) -> str:
    before, found, _ = rendered.rpartition(mark)
    if not found:
        raise ChatTemplateError("The model's chat template does not show the end of its last message.")
    return before


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
    elif isinstance(value, RawJson):
        yield value.text  # says all that is inside, unless it escapes it
        if "\\" in value.text:
            yield from _leaves(dict(value))
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
    if isinstance(value, RawJson):
        return RawJson({_map_leaves(k, change): _map_leaves(v, change) for k, v in value.items()}, change(value.text))
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
    if isinstance(value, RawJson) and indent is None and separators is None and not sort_keys:
        return value.text
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
