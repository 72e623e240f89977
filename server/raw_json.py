"""A JSON object that remembers its text: a call's arguments, as the model once wrote them.

A template prints arguments as JSON. Printed anew they could differ from what the model wrote in blanks and escapes,
and the conversation would lose its cached prefix at the first call.
"""

from __future__ import annotations

from typing import Any

import orjson

from server.protocol.parsing import too_deep


class RawJson(dict[str, Any]):
    """The object, to look into; text: how it was spelled."""

    def __init__(self, value: dict[str, Any], text: str) -> None:
        super().__init__(value)
        self.text = text


def raw_object(text: str) -> RawJson | None:
    """None for what is no JSON object, or one that is nested too deeply to go on with."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return RawJson(value, text.strip()) if isinstance(value, dict) and not too_deep(value) else None
