"""What a request's tools ask of the grammar compiler, and what it finds wrong, told of the tool and the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.grammar_complaints import at_place
from engine.sampling_params import InvalidParameter, StructuredOutput, UnusableForm
from server.parsers.forced import tool_at
from server.protocol.chat_tools import ToolPlan
from server.protocol.parsing import short


@dataclass(frozen=True, slots=True)
class ToolForms:
    """definitions: formats of custom tools' inputs; each must make sense, whether a call is held to it or not.

    calls: the grammar that holds the answer, or a part of it, to calls of `names`; empty where there is none."""

    definitions: tuple[StructuredOutput, ...] = ()
    calls: str = ""
    names: Sequence[str] = ()
    schemas: Mapping[str, Any] = field(default_factory=dict)  # by name
    paths: Mapping[str, str] = field(default_factory=dict)  # by name: the field that a schema or a format came from

    @classmethod
    def of(cls, tools: ToolPlan, calls: str, names: Sequence[str]) -> ToolForms:
        functions = [tool["function"] for tool in tools.tools]
        schemas = {function["name"]: function["parameters"] for function in functions}
        return cls(tuple(tools.inputs.values()), calls, names, schemas, tools.paths)

    def complaint(self, error: UnusableForm) -> InvalidParameter:
        """About the tool that is to blame; the error itself if none is."""
        index = tool_at(self.calls, error.line) if self.calls and error.line is not None else None
        if index is None and error.param == "tools" and len(self.names) == 1:
            index = 0
        if index is None or index >= len(self.names):
            if error.param != "tools":
                return error
            return InvalidParameter("tools", f"The tools together cannot be held to their schemas: {error.reason}")
        name = self.names[index]
        reason = at_place(error.reason, error.keywords, self.schemas[name])
        told = reason.removeprefix("it ") if reason.startswith("it ") else f"is not usable: {reason}"
        path = self.paths[name]
        subject = "schema" if path.endswith("parameters") else "format"
        return InvalidParameter(path, f"The {subject} of the tool {short(name)} {told}")
