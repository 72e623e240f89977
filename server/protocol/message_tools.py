"""Tools that Anthropic's clients name by a type and run themselves: its own models know their input by heart, ours are
told it as a schema. Tools that run at Anthropic's (web_search and the like) are not here.
"""

from __future__ import annotations

import re
from typing import Any

_STRING = {"type": "string"}
_LINE = {"type": "integer", "minimum": 0}
_RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_DATED = re.compile(r"(\w+?)_20\d{6}")

_EDIT: dict[str, list[tuple[str, dict[str, Any]]]] = {  # command -> its fields; those that end with "?" may be absent
    "view": [("path", _STRING), ("view_range?", _RANGE)],
    "create": [("path", _STRING), ("file_text", _STRING)],
    "str_replace": [("path", _STRING), ("old_str", _STRING), ("new_str", _STRING)],
    "insert": [("path", _STRING), ("insert_line", _LINE), ("insert_text", _STRING)],
}
_KEEP = {"delete": [("path", _STRING)], "rename": [("old_path", _STRING), ("new_path", _STRING)]}


def client_tool(kind: str, name: str | None) -> dict[str, Any] | None:
    """The function that chat tells the model of; None for a type that no client runs. kind: "bash_20250124"."""
    dated = _DATED.fullmatch(kind)
    known = _KNOWN.get(dated[1]) if dated is not None else None
    if known is None:
        return None
    usual, description, schema = known
    return {"name": name or usual, "description": description, "parameters": schema}


def _commands(commands: dict[str, list[tuple[str, dict[str, Any]]]]) -> dict[str, Any]:
    """An object of one command with its fields, whichever it is."""
    forms = []
    for command, fields in commands.items():
        properties = {"command": {"const": command}} | {name.rstrip("?"): schema for name, schema in fields}
        required = ["command", *(name for name, _ in fields if not name.endswith("?"))]
        forms.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    return {"anyOf": forms}


_BASH = {
    "type": "object",
    "properties": {"command": _STRING, "restart": {"type": "boolean"}},
    "additionalProperties": False,
}
_KNOWN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bash": ("bash", "Runs a command in a shell that stays open; restart begins a new one.", _BASH),
    "text_editor": ("str_replace_based_edit_tool", "Views, creates and edits files.", _commands(_EDIT)),
    "memory": ("memory", "Keeps notes in files below /memories.", _commands(_EDIT | _KEEP)),
}
