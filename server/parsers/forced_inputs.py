"""Rules for calls of custom tools whose input has a format: a pattern or a grammar of the client's.

The input is one string argument of the function that stands for the tool. Where a model's format writes strings as
JSON does, the rule is for the quoted text. The end of a bare string could be part of the input: there is no rule then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.sampling_params import InvalidParameter, StructuredOutput
from server.parsers.forced_arguments import Arguments, ByArgument
from server.parsers.grammar import Spelling, json_term, literal
from server.parsers.quoted_grammar import quoted_grammar
from server.parsers.quoted_pattern import Unquotable


def input_rules(
    rule: str, form: Arguments | None, schema: Mapping[str, Any], wanted: StructuredOutput, spelling: Spelling
) -> list[str]:
    """Lines that define `rule`: the arguments of a call, of which there is one. form: how they are written if not as a
    JSON object. wanted: kind regex or lark; its param names the format. Raises ByArgument, InvalidParameter."""
    (key,) = schema["properties"]
    if form is None:
        head, tail = f"{{{literal(key)}: ", "}"
    elif form.as_json:
        head, tail = form.key.replace("%k", key), form.end
    else:
        raise ByArgument
    if wanted.kind == "regex":
        value = json_term({"type": "string", "pattern": f"^(?:{wanted.source})$"})
        return [f"{rule}: {spelling.term(head)} {value} {spelling.term(tail)}"]
    try:
        grammar = quoted_grammar(wanted.source)
    except Unquotable as error:
        told = f"{wanted.param} cannot be enforced inside a call, where the input is a JSON string: it {error}."
        raise InvalidParameter(wanted.param, told) from None
    opening, closing = spelling.term(head + '"'), spelling.term('"' + tail)
    return [
        f"{rule}: {opening} {rule}_input {closing}",
        f"{rule}_input: %lark {{\n{grammar}\n}}",
    ]
