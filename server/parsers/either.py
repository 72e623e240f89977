"""A form under which a model either calls a tool or answers as it was asked to."""

from __future__ import annotations

from dataclasses import replace

from engine.sampling_params import StructuredOutput


def either(answer: StructuredOutput, calls: StructuredOutput) -> StructuredOutput | None:
    """calls: a grammar of `ToolFormat.forced`. None if the answer's form is a grammar of its own, whose names could be
    the same."""
    return replace(answer, calls=calls.source) if answer.kind != "lark" else None
