"""OpenAI's harmony format, of gpt-oss: messages with a header that names the channel and, for a call, whom it is for.

analysis is reasoning; what is for functions.NAME is a call; commentary and final are content. The marks are few and
plain, so they are read here from the text, without the vendor's library.
"""

from __future__ import annotations

import re

from server.parsers.blocks import BlockCalls
from server.parsers.json_text import skip_space
from server.parsers.script import Malformed, Reading, Sink, any_mark

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
MAX_HEADER_CHARS = 512
_TOOL = re.compile(r"\bto=functions\.([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class HarmonyCalls(BlockCalls):
    def __init__(self) -> None:
        super().__init__([START, CHANNEL], ENDS)
        self._message = any_mark(MESSAGE)
        self._ends = any_mark(*ENDS, START)

    def calls(self, mark: str) -> Reading[None]:
        """One message, from its first mark to its end mark, and those that follow at once."""
        reader, header = self.reader, mark
        while header:
            text = yield from self._header()
            if text is None:
                return
            end = yield from self._body(header + text)
            if end is not None and end != START:
                yield from skip_space(reader)
                end = yield from reader.starts(self._open)
            header = end or ""
            if header:
                reader.remember(header)

    def _header(self) -> Reading[str | None]:
        """The text between the first mark and the body; a header that is cut short is dropped."""
        try:
            text, _ = yield from self.reader.text_until(self._message, MAX_HEADER_CHARS)
        except Malformed:
            if not self.reader.ended:
                raise
            return None
        self.reader.forget()
        return text

    def _body(self, header: str) -> Reading[str | None]:
        """Gives the mark at its end."""
        sink: Sink = self.out.reasoning if _ANALYSIS.search(header) else self.out.content
        if tool := _TOOL.search(header):
            self.begin(tool[1])
            yield from self.pass_arguments(end="<")
            sink = _drop
        return (yield from self.reader.until(self._ends, sink))


def _drop(_: str) -> None:
    """What follows a call's arguments before its end mark."""
