"""The input of a custom tool, which is free text, as the arguments of the function that stands for it, and back."""

from __future__ import annotations

import json
import re

CUSTOM_FIELD = "input"  # the function's one parameter
_BEGUN = re.compile(rf'\s*\{{\s*"{CUSTOM_FIELD}"\s*:\s*"')
# characters of a JSON string whose meaning is certain; the first half of a surrogate pair waits for what follows
_CERTAIN = re.compile(
    r"""(?:[^"\\]++|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"""
    r"""|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u[0-9a-fA-F]{4}))*"""
)


class CustomInput:
    """Finds a custom tool's input in its function's arguments while they come. The texts that `feed` and `finish`
    return, joined, are the input: the string where the arguments are as asked for, else what was written."""

    def __init__(self) -> None:
        self._raw = ""  # not decoded yet
        self._inside = False
        self._ended = False

    def feed(self, text: str) -> str:
        if self._ended:
            return ""
        self._raw += text
        if not self._inside:
            begun = _BEGUN.match(self._raw)
            if begun is None:
                return ""
            self._inside, self._raw = True, self._raw[begun.end() :]
        return self._decode()

    def finish(self) -> str:
        rest, self._raw = self._raw, ""
        if self._inside:
            return "" if self._ended else rest  # it was cut, or is no JSON
        try:
            value = json.loads(rest, strict=False)
        except (ValueError, RecursionError):
            return rest
        fields = value if isinstance(value, dict) else {}
        texts = [fields[CUSTOM_FIELD]] if CUSTOM_FIELD in fields else list(fields.values())
        return _whole(texts[0]) if len(texts) == 1 and isinstance(texts[0], str) else rest

    def _decode(self) -> str:
        match = _CERTAIN.match(self._raw)
        assert match is not None
        self._raw = self._raw[match.end() :]
        self._ended = self._raw.startswith('"')
        return _whole(json.loads(f'"{match[0]}"', strict=False))


def _whole(text: str) -> str:
    """Without lone surrogates, which no UTF-8 can hold."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
