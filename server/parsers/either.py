"""A grammar under which a model either calls a tool or answers in a given form."""

from __future__ import annotations

import json
import re

from engine.sampling_params import StructuredOutput
from server.parsers.grammar import json_term, one_of


def either(answer: StructuredOutput, calls: StructuredOutput) -> StructuredOutput | None:
    """calls: a grammar of `ToolFormat.forced`. None if the answer's form is a grammar of its own, whose names could be
    the same."""
    term = _term(answer)
    if term is None or not calls.source.startswith("start:"):
        return None
    rule = f"answer: ANSWER\nANSWER: {term}" if answer.kind == "choice" else f"answer: {term}"
    source = f"start: answer | calls\n{rule}\ncalls:{calls.source.removeprefix('start:')}"
    return StructuredOutput("lark", source, answer.param)


def _term(answer: StructuredOutput) -> str | None:
    match answer.kind:
        case "json":
            schema = json.loads(answer.source)
            return json_term(schema) if isinstance(schema, dict) else json_term({"allOf": [schema]})
        case "json_object":
            return json_term({"type": "object"})
        case "choice":
            return one_of(json.loads(answer.source))
        case "regex":
            return "/" + re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", answer.source, flags=re.DOTALL) + "/"
        case _:
            return None
