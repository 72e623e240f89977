"""How the text of a model's answers is to be read, and what it is held to: thinking, tool calls, a given form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from engine.sampling_params import InvalidParameter, ReasoningMarks, StructuredOutput
from engine.tokenizer import Tokenizer
from server import tool_prompt
from server.parsers import OutputFormat, PlainParser, ToolFormat, choose, with_reasoning
from server.parsers.base import OutputParser
from server.parsers.content import ContentGate
from server.parsers.either import either
from server.parsers.forced import NoObject, forced
from server.parsers.script import Script
from server.protocol.call_filters import CustomInputs, FirstCall, OnlyCalls
from server.protocol.chat_tools import ToolPlan
from server.protocol.conversation_writer import NewParser
from server.protocol.errors import InvalidRequest
from server.protocol.tool_forms import ToolForms


@dataclass(frozen=True, slots=True)
class Reading:
    """new_parser: None where all text is content. reasoning, structured, shown: for SamplingParams. new_stop_gate:
    keeps stop strings out of calls; None where there are none, or nothing else. forms: for `Front.generate`."""

    new_parser: NewParser | None = None
    reasoning: ReasoningMarks | None = None
    structured: StructuredOutput | None = None
    shown: tuple[int, ...] = ()
    new_stop_gate: Callable[[], ContentGate] | None = None
    forms: ToolForms = field(default_factory=ToolForms)


class ModelReader:
    """One model's. tells_tools: tools must be told in the messages, since its template knows none."""

    def __init__(self, tokenizer: Tokenizer, *, tool_parser: str, reasoning_parser: str) -> None:
        """Raises StartError for a name that is unknown."""
        source = tokenizer.chat_templates.get("tool_use") or tokenizer.chat_template or ""
        names = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
        self.tells_tools = tool_parser in ("auto", tool_prompt.FORMAT) and "tools" not in source
        if self.tells_tools:
            names["tool_parser"] = tool_prompt.FORMAT
        self._format: OutputFormat = choose(source, tokenizer, **names)

    def read(self, tools: ToolPlan, structured: StructuredOutput | None, tail: str, continued: str | None) -> Reading:
        """structured: the form the request asks for. tail: the end of the rendered prompt. continued: the message
        that the answer goes on with, None for an answer of its own.

        Raises InvalidParameter for a tool that cannot be forced, InvalidRequest for a form that tools rule out."""
        marks = self._marks(tail, continued)
        new_parser: NewParser | None = None
        forms = ToolForms.of(tools, "", ())
        if tools.forced:
            structured, new_parser, forms = self._forced(tools, tools.forced)
        elif tools.tools and structured is not None:
            structured, new_parser, forms = self._form_or_call(structured, tools)
        elif self._format.tools is not None and (tools.tools or self._format.tools.always):
            new_parser = _Parsers(self._format.tools, tools.tools)
        new_stop_gate = partial(_gate, new_parser) if new_parser is not None and not tools.forced else None
        if new_parser is not None:
            new_parser = _adapted(new_parser, tools)
        if marks is not None:
            new_parser = _after_thinking(new_parser or PlainParser, marks)
        shown = self._format.shown_special_tokens if new_parser is not None else ()
        return Reading(new_parser, marks, structured, shown, new_stop_gate, forms)

    def _marks(self, tail: str, continued: str | None) -> ReasoningMarks | None:
        """None where no thinking can come."""
        known = self._format.reasoning
        if known is None:
            return None
        if continued is not None:
            return known.marks(True) if known.is_open(continued) else None
        end = tail.rstrip()
        if end.endswith(known.end.strip()):
            return None  # the template has closed the block: thinking is off
        return known.marks(end.endswith(known.start.strip()) if known.start.strip() else False)

    def _forced(self, tools: ToolPlan, names: Sequence[str]) -> tuple[StructuredOutput, NewParser, ToolForms]:
        known = self._format.tools
        make = known.forced if known is not None else forced
        try:
            calls, new_parser = make(tools.tools, names=names, parallel=tools.parallel, inputs=tools.inputs)
        except NoObject as error:
            raise InvalidParameter(tools.paths[error.name], str(error)) from None
        return replace(calls, param="tools"), new_parser, ToolForms.of(tools, calls.source, names)

    def _form_or_call(self, form: StructuredOutput, tools: ToolPlan) -> tuple[StructuredOutput, NewParser, ToolForms]:
        """The answer has the form, or is a call."""
        calls, new_parser, forms = self._forced(tools, [tool["function"]["name"] for tool in tools.tools])
        both = either(form, calls)
        if both is None:
            told = f"{form.param} can be combined with tools only where tool_choice is none."
            raise InvalidRequest(told, param=form.param)
        return both, new_parser, forms


class _Parsers:
    """Makes a parser per choice."""

    def __init__(self, kind: ToolFormat, tools: Sequence[dict[str, Any]]) -> None:
        self._kind = kind
        self._tools = tools

    def __call__(self) -> OutputParser:
        return self._kind.parser(self._tools)


def _adapted(new_parser: NewParser, tools: ToolPlan) -> NewParser:
    """To what the request says of its calls."""
    if tools.forced:
        new_parser = partial(_made, OnlyCalls, new_parser)
    if not tools.parallel:
        new_parser = partial(_made, FirstCall, new_parser)
    if tools.custom:
        new_parser = partial(_made, partial(CustomInputs, names=tools.custom), new_parser)
    return new_parser


def _made(outer: Callable[[OutputParser], OutputParser], new_parser: NewParser) -> OutputParser:
    return outer(new_parser())


def _gate(new_parser: NewParser) -> ContentGate:
    parser = new_parser()
    assert isinstance(parser, Script), "every format is one"
    return ContentGate(parser)


def _after_thinking(new_parser: NewParser, marks: ReasoningMarks) -> NewParser:
    return lambda: with_reasoning(new_parser(), marks)
