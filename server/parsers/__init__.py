"""What a model's text means: one parser per choice, one format per model."""

from server.parsers.base import CallArguments, CallBegin, Content, OutputParser, Part, Reasoning
from server.parsers.reasoning import ReasoningFormat, ReasoningParser, with_reasoning
from server.parsers.script import PlainParser
from server.parsers.select import OutputFormat, ToolFormat, choose

__all__ = [
    "CallArguments",
    "CallBegin",
    "Content",
    "OutputFormat",
    "OutputParser",
    "Part",
    "PlainParser",
    "Reasoning",
    "ReasoningFormat",
    "ReasoningParser",
    "ToolFormat",
    "choose",
    "with_reasoning",
]
