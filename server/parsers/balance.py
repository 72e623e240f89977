"""Whether a JSON text is whole, told while it comes: by brackets and strings, which is all that a cut leaves open."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


class Balance:
    """One text."""

    __slots__ = ("_begun", "_depth", "_in_string", "_skip")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._skip = 0  # characters after a backslash that have not come yet
        self._begun = False

    def feed(self, text: str) -> bool:
        """Whether the text so far, `text` at its end, is whole. A number may still go on, and is whole all the same;
        blanks alone are not."""
        self._begun = self._begun or bool(text.strip())
        at = self._skip
        while found := (_INSIDE if self._in_string else _OUTSIDE).search(text, at):
            at = found.end()
            match found[0]:
                case "\\":
                    at += 1
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
        self._skip = max(0, at - len(text)) if text else self._skip
        return self._begun and not self._in_string and self._depth <= 0
