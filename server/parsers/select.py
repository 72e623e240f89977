"""Which format a model speaks: named by a flag, or told by its chat template."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.config import StartError
from engine.sampling_params import StructuredOutput
from engine.tokenizer import Tokenizer
from server.parsers import harmony
from server.parsers.base import OutputParser
from server.parsers.forced import forced_in
from server.parsers.formats import KINDS, Kind
from server.parsers.reasoning import FORMATS, ReasoningFormat
from server.parsers.schema import Tools

logger = logging.getLogger("pagemill.server")


@dataclass(frozen=True)
class ToolFormat:
    """How the model writes tool calls. Tools are dicts as OpenAI's chat API has them."""

    kind: Kind
    tokenizer: Tokenizer
    template: str  # the chat template's source

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def always(self) -> bool:
        """Whether text without calls needs the parser, too."""
        return self.kind.always

    def parser(self, tools: Sequence[Mapping[str, Any]]) -> OutputParser:
        """Content and calls of one choice; argument values follow the tools' schemas."""
        return self.kind.make(Tools(tools))

    def forced(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        names: Sequence[str],
        parallel: bool,
        inputs: Mapping[str, StructuredOutput] | None = None,
    ) -> tuple[StructuredOutput, Callable[[], OutputParser]]:
        """A grammar that leaves only calls of `names` with valid arguments (one or more; exactly one unless
        `parallel`), and what makes parsers for such text. inputs: by name the form (regex or lark) of a tool's one
        argument, a string.

        Raises InvalidParameter for a tool whose schema is no object's, and under an input's own name for a form that
        it cannot be held to."""
        return forced_in(
            self.kind, self.tokenizer, self.template, tools, names=names, parallel=parallel, inputs=inputs
        )


@dataclass(frozen=True)
class OutputFormat:
    """What a model's text is made of. None: it has no such thing."""

    reasoning: ReasoningFormat | None
    tools: ToolFormat | None
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        return self.tools.name if self.tools else "none"

    @cached_property
    def shown_special_tokens(self) -> tuple[int, ...]:
        """Ids of the marks that are special tokens: the text must have them, or no parser finds anything."""
        reasoning = (self.reasoning.start, self.reasoning.end) if self.reasoning else ()
        tools = self.tools.kind.marks if self.tools else ()
        ids = (self.tokenizer.token_id(text.strip()) for text in (*reasoning, *tools))
        return tuple(dict.fromkeys(i for i in ids if i is not None and self.tokenizer.is_special(i)))


def choose(
    template_source: str, tokenizer: Tokenizer, *, tool_parser: str | None, reasoning_parser: str | None
) -> OutputFormat:
    """The format of a model. tool_parser, reasoning_parser: a name from the tables, "none", or "auto" (or None) to
    go by the template; a template with tools in no known format is logged as a warning.

    Raises StartError for an unknown name."""
    return OutputFormat(
        reasoning=_reasoning(template_source, reasoning_parser),
        tools=_tools(template_source, tokenizer, tool_parser),
        tokenizer=tokenizer,
    )


def _tools(template: str, tokenizer: Tokenizer, name: str | None) -> ToolFormat | None:
    if name == "none":
        return None
    by_name = {kind.name: kind for kind in KINDS}
    if name is None or name == "auto":
        kind = _recognise(template, tokenizer)
        if kind is None and _mentions_tools(template):
            logger.warning(
                "the chat template has tools, but in no format known here; calls will be told as plain text unless "
                "--tool-call-parser names the format"
            )
    else:
        kind = by_name.get(name)
        if kind is None:
            raise StartError(f"--tool-call-parser {name}: there is {_list(by_name)}.")
    return ToolFormat(kind, tokenizer, template) if kind else None


def _recognise(template: str, tokenizer: Tokenizer) -> Kind | None:
    kinds = [kind for kind in KINDS if kind.unlike is None or kind.unlike not in template]
    for kind in kinds:
        if any(all(text in template for text in texts) for texts in kind.written):
            return kind
    if _mentions_tools(template):
        for kind in kinds:
            if any(tokenizer.token_id(text) is not None for text in kind.known):
                return kind
    return None


def _mentions_tools(template: str) -> bool:
    return "tools" in template


def _reasoning(template: str, name: str | None) -> ReasoningFormat | None:
    if name == "none":
        return None
    if name is None or name == "auto":
        return next((f for f in FORMATS.values() if _writes(template, f)), None)
    if name not in FORMATS:
        raise StartError(f"--reasoning-parser {name}: there is {_list(FORMATS)}.")
    return FORMATS[name]


def _writes(template: str, known: ReasoningFormat) -> bool:
    """Harmony's marks stand apart in templates; tags that nobody closes are another format's instructions."""
    if known.name == "harmony":
        return harmony.CHANNEL in template and harmony.MESSAGE in template
    return known.end in template


def _list(names: Mapping[str, object]) -> str:
    return "auto, none, " + ", ".join(names)
