"""What formats with an opening mark have in common: text, a block of calls, text, and what to do with broken ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from server.parsers.json_text import pass_value, skip_space
from server.parsers.script import Malformed, Reading, Script, Sink, any_mark, new_call_id


class BlockCalls(Script):
    """A subclass reads the calls of one block. A call that breaks before its name is certain becomes content, with
    its marks; one that breaks later keeps what came, as the model wrote it, up to the next mark."""

    def __init__(
        self, open_marks: Iterable[str], other_marks: Iterable[str], new_id: Callable[[], str] = new_call_id
    ) -> None:
        """open_marks: begin a block. other_marks: those at which a broken call ends, too."""
        super().__init__(new_id)
        self._open = any_mark(*open_marks)
        self._any = any_mark(*other_marks, *self._open.texts)
        self.broken: Sink = self.out.content  # gets the rest of a call that breaks

    def calls(self, mark: str) -> Reading[None]:
        """The calls after `mark`. Raises Malformed; what is being remembered then becomes content."""
        raise NotImplementedError

    def script(self) -> Reading[None]:
        yield from self.read_on(None)

    def read_on(self, mark: str | None) -> Reading[None]:
        """mark: an opening mark that was just read."""
        while mark := mark or (yield from self.reader.until(self._open, self.out.content)):
            mark = yield from self.block(mark)

    def block(self, mark: str) -> Reading[str | None]:
        """Gives the next opening mark if it was met on the way."""
        self.reader.remember(mark)
        self.broken = self.out.content
        try:
            yield from self.calls(mark)
        except Malformed:
            if not self.give_up():
                found = yield from self.reader.until(self._any, self.broken)
                return found if found in self._open.texts else None
        self.reader.forget()
        return None

    def pass_arguments(self, *, end: str = "") -> Reading[None]:
        """A JSON object, or nothing before the mark `end`, as the arguments of the call begun last."""
        self.broken = self.out.arguments
        character = yield from skip_space(self.reader)
        if not character:
            raise Malformed
        if end and character == end[0]:
            self.out.arguments("{}")
        else:
            yield from pass_value(self.reader, self.out.arguments)
        self.broken = self.out.content
