"""What a request says of its tool calls, applied to the parts of any parser: only one call, nothing but calls, free
text as input."""

from __future__ import annotations

from collections.abc import Collection

from server.parsers.base import CallArguments, CallBegin, Content, OutputParser, Part
from server.protocol.custom_input import CustomInput


class FirstCall:
    """Leaves out every call but the first, for a request without parallel calls."""

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner

    def feed(self, text: str) -> list[Part]:
        return _only_first(self._inner.feed(text))

    def finish(self) -> list[Part]:
        return _only_first(self._inner.finish())


def _only_first(parts: list[Part]) -> list[Part]:
    return [part for part in parts if not (isinstance(part, (CallBegin, CallArguments)) and part.index > 0)]


class OnlyCalls:
    """For text that is held to calls: what is left over at its end is a piece of one that was cut, no content."""

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner

    def feed(self, text: str) -> list[Part]:
        return self._inner.feed(text)

    def finish(self) -> list[Part]:
        return [part for part in self._inner.finish() if not isinstance(part, Content)]


class CustomInputs:
    """The arguments of custom tools' calls become the free text that they hold. names: of custom tools."""

    def __init__(self, inner: OutputParser, *, names: Collection[str]) -> None:
        self._inner = inner
        self._names = names
        self._open: tuple[int, CustomInput] | None = None

    def feed(self, text: str) -> list[Part]:
        return [changed for part in self._inner.feed(text) for changed in self._change(part)]

    def finish(self) -> list[Part]:
        return [*(changed for part in self._inner.finish() for changed in self._change(part)), *self._close()]

    def _change(self, part: Part) -> list[Part]:
        if isinstance(part, CallArguments) and self._open is not None and part.index == self._open[0]:
            text = self._open[1].feed(part.text)
            return [CallArguments(part.index, text, part.is_whole)] if text or part.is_whole else []
        changed = [*self._close(), part]
        if isinstance(part, CallBegin) and part.name in self._names:
            self._open = part.index, CustomInput()
        return changed

    def _close(self) -> list[Part]:
        if self._open is None:
            return []
        (index, found), self._open = self._open, None
        rest = found.finish()
        return [CallArguments(index, rest)] if rest else []
