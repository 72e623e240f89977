"""Grammars under which a model can only write valid calls, in its own format wherever that can be held to a schema.

Formats with JSON arguments are a layout around them. Formats that write one argument after the other get a rule per
argument (`forced_arguments.py`); where a schema is more than its list of arguments, and for formats not known here,
calls are a JSON array: no model's habit, but always valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.sampling_params import InvalidParameter, StructuredOutput
from engine.tokenizer import Tokenizer
from server.parsers.base import OutputParser
from server.parsers.forced_arguments import Arguments, ByArgument, Definitions, arguments_rules
from server.parsers.forced_inputs import input_rules
from server.parsers.formats import Kind
from server.parsers.gemma_calls import GemmaMarks
from server.parsers.grammar import Spelling, json_term
from server.parsers.json_calls import JsonCalls, JsonMarks
from server.parsers.named_calls import MistralCalls, NamedMarks
from server.parsers.pythonic_calls import PythonicMarks
from server.parsers.schema import Tools
from server.parsers.tagged_calls import Tags

Parsers = Callable[[], OutputParser]


@dataclass(frozen=True)
class Layout:
    """before, after: around all calls; between: two of them; head, tail: around the arguments of each. In head, %n is
    the name, %j the name as JSON, %i the call's number. arguments: how they are written if not as a JSON object."""

    head: str
    tail: str
    between: str = ""
    before: str = ""
    after: str = ""
    arguments: Arguments | None = None
    only_one: bool = False


MAX_CALLS = 32  # forced at once; a small model goes on calling until its context is full
_PLAIN_NAME = re.compile(r"[\w.\-]+")  # other names, a format may take for its marks
ARGUMENTS = "arguments_"  # begins the names of rules for a tool's arguments; its number follows
_RULE = re.compile(rf"{ARGUMENTS}([0-9]{{1,9}})\w*: ")
_OBJECT = '{"name": %j, "arguments": '
_GENERIC = Layout(_OBJECT, "}", ", ", "[", "]")
_HARMONY = Layout("<|channel|>commentary to=functions.%n <|constrain|>json<|message|>", "", only_one=True)
_BY_NAME = {
    "hermes": Layout("<tool_call>\n" + _OBJECT, "}\n</tool_call>", "\n"),
    "granite": Layout(_OBJECT, "}", ", ", "<|tool_call|>[", "]"),
    "llama3_json": Layout('{"name": %j, "parameters": ', "}", "; "),
    "harmony": _HARMONY,
}


def forced(
    tools: Sequence[Mapping[str, Any]],
    *,
    names: Sequence[str],
    parallel: bool,
    inputs: Mapping[str, StructuredOutput] | None = None,
) -> tuple[StructuredOutput, Parsers]:
    """Calls as a JSON array, whatever the model's format. inputs: see `ToolFormat.forced`.

    Raises InvalidParameter for a schema that is no object's, and for an input that cannot be held to its format."""
    known = Tools(tools)
    grammar = _grammar(_GENERIC, Spelling((), None), known, names, inputs or {}, parallel)
    assert grammar is not None
    return StructuredOutput("lark", grammar), lambda: JsonCalls(JsonMarks((), bare=True), known)


def forced_in(
    kind: Kind,
    tokenizer: Tokenizer,
    template: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    names: Sequence[str],
    parallel: bool,
    inputs: Mapping[str, StructuredOutput] | None = None,
) -> tuple[StructuredOutput, Parsers]:
    """Calls in a format, else as `forced`. template: the chat template, which tells older dialects from newer ones.

    Raises InvalidParameter as `forced` does."""
    known = Tools(tools)
    layout = _layout(kind, tokenizer, template)
    if layout is not None and all(map(_PLAIN_NAME.fullmatch, names)):
        grammar = _grammar(layout, Spelling(kind.marks, tokenizer), known, names, inputs or {}, parallel)
    else:
        grammar = None
    if grammar is None:
        return forced(tools, names=names, parallel=parallel, inputs=inputs)
    return StructuredOutput("lark", grammar), lambda: kind.make(known)


def _layout(kind: Kind, tokenizer: Tokenizer, template: str) -> Layout | None:
    if kind.name == "mistral":
        if MistralCalls.ARGUMENTS in template or tokenizer.token_id(MistralCalls.ARGUMENTS) is not None:
            return Layout(f"{MistralCalls.OPEN}%n{MistralCalls.ARGUMENTS}", "")
        return Layout(_OBJECT, "}", ", ", f"{MistralCalls.OPEN}[", "]")
    if kind.name in _BY_NAME:
        return _BY_NAME[kind.name]
    match kind.shape:
        case JsonMarks():
            return Layout(_OBJECT, "}", ", ", kind.shape.open[0] + "[", "]" + "".join(kind.shape.close[:1]))
        case NamedMarks():
            return _named(kind.shape, template)
        case Tags():
            return _tags(kind.shape)
        case GemmaMarks():
            arguments = Arguments(key="%k:", between=",", quote=kind.shape.quote)
            return Layout(kind.shape.open + "call:%n{", "}" + kind.shape.close, arguments=arguments)
        case PythonicMarks():
            arguments = Arguments(key="%k=", between=", ", as_json=True)
            return Layout("%n(", ")", ", ", kind.shape.open + "[", "]" + kind.shape.close, arguments)
    return None


def _named(marks: NamedMarks, template: str) -> Layout:
    before, after = marks.open, marks.close
    if marks.kind_first and "```json" in template:  # DeepSeek V3 and R1
        head, tail = f"{marks.call}function{marks.name_end}%n\n```json\n", f"\n```{marks.end}"
        return Layout(head, tail, "\n", before, after)
    name = "functions.%n:%i" if marks.numbered else "%n"
    return Layout(marks.call + name + marks.name_end, marks.end, "", before, after)


def _tags(tags: Tags) -> Layout:
    line = "\n" if tags.line_breaks else ""
    is_string = next((end for end, told in tags.told.items() if told), tags.key_end)
    other = next((end for end, told in tags.told.items() if not told), tags.key_end)
    arguments = Arguments(
        key=f"{tags.key}%k{is_string}{tags.value}{line}",
        key_of_json=f"{tags.key}%k{other}{tags.value}{line}",
        end=f"{line}{tags.value_end}\n",
    )
    if not tags.call:  # the name follows the opening tag at once
        return Layout(f"{tags.open}%n\n", tags.close, "\n", arguments=arguments)
    opening, closing = (f"{tags.open}\n", f"\n{tags.close}") if tags.open else ("", "")
    return Layout(f"{opening}{tags.call}%n{tags.name_end}\n", f"{tags.call_end}{closing}", "\n", arguments=arguments)


def _grammar(
    layout: Layout,
    spelling: Spelling,
    tools: Tools,
    names: Sequence[str],
    inputs: Mapping[str, StructuredOutput],
    parallel: bool,
) -> str | None:
    """None if the layout cannot hold these schemas."""
    is_single = layout.only_one or not parallel
    more = "" if is_single else f" ({spelling.term(layout.between)} call){{0,{MAX_CALLS - 1}}}"
    lines = [
        f"start: BREAKS? {spelling.term(layout.before)} call{more} {spelling.term(layout.after)}",
        "BREAKS: /\\n{1,2}/",  # models begin with them after thinking
        "call: " + " | ".join(f"call_{i}" for i in range(len(names))),
    ]
    copied = 0
    for i, name in enumerate(names):
        rule, schema = f"{ARGUMENTS}{i}", arguments_schema(tools, name)
        definitions = Definitions(schema, copied)
        try:
            if (wanted := inputs.get(name)) is not None:
                lines += input_rules(rule, layout.arguments, schema, wanted, spelling)
            elif layout.arguments is None:
                lines.append(f"{rule}: {json_term(schema)}")
            else:
                lines += arguments_rules(rule, layout.arguments, schema, spelling, definitions)
        except ByArgument:
            return None
        copied = definitions.copied
        head = _head(layout.head, name, spelling, is_single)
        lines.append(f"call_{i}: {head} {rule} {spelling.term(layout.tail)}")
    return "\n".join(lines)


def tool_at(grammar: str, line: int) -> int | None:
    """The index in names that `line` of a grammar of `forced`, counted from 1, is about; None if it is about none."""
    for text in reversed(grammar.split("\n")[:line]):  # an input's grammar has lines of its own
        if found := _RULE.match(text):
            return int(found[1])
    return None


def _head(head: str, name: str, spelling: Spelling, is_single: bool) -> str:
    before, number, after = head.partition("%i")
    terms = spelling.term(_named_in(before, name))
    if number:
        terms += (' "0" ' if is_single else " /[0-9]{1,3}/ ") + spelling.term(_named_in(after, name))
    return terms


def _named_in(head: str, name: str) -> str:
    """The name may itself look like a field."""
    texts = {"%j": json.dumps(name, ensure_ascii=False), "%n": name}
    return re.sub("%[jn]", lambda found: texts[found[0]], head)


class NoObject(InvalidParameter):
    """The schema of the tool `name` is no object's."""

    def __init__(self, name: str) -> None:
        super().__init__("tools", f"The parameters of the tool {name} must be a schema of type object.")
        self.name = name


def arguments_schema(tools: Tools, name: str) -> dict[str, Any]:
    """The schema of a tool's arguments. Raises NoObject."""
    schema = tools.schemas.get(name) or {}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise NoObject(name)
    return {**schema, "type": "object"}
