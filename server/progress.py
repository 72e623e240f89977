"""A start, as a person at a terminal sees it: one line that is redrawn. Where nobody looks there is none."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from engine.progress import Progress
from server.settings import Settings

TICK_S = 0.1
WIDTH = 24  # of the bar, in characters
CLEAR = "\r\x1b[K"
HIDDEN = ("", "find")  # the hub's library draws its downloads itself


class Bar:
    """Of one start, on `stream`."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress = progress
        self._stream = stream
        self._started_s = time.monotonic()
        self._is_drawn = False

    def line(self, width: int) -> str:
        """At most `width` characters."""
        progress = self._progress
        share = progress.share
        parts = [f"loading: {progress.phase.replace('_', ' ')}"]
        if share is not None:
            filled = round(share * WIDTH)
            parts.append(f"[{'#' * filled}{'-' * (WIDTH - filled)}] {share:4.0%} of {progress.total / 1e9:.2f} GB")
        parts.append(f"{time.monotonic() - self._started_s:.0f} s")
        return "  ".join(parts)[:width]

    def draw(self) -> None:
        if self._progress.phase in HIDDEN:
            self.clear()
            return
        width = shutil.get_terminal_size().columns - 1  # in the last column some terminals begin a new line
        self._write(CLEAR + self.line(width))
        self._is_drawn = True

    def clear(self) -> None:
        if self._is_drawn:
            self._write(CLEAR)
            self._is_drawn = False

    def make_room(self, record: logging.LogRecord) -> bool:
        """A filter of log handlers: their line takes the bar's place."""
        self.clear()
        return True

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def is_wanted(settings: Settings, stream: TextIO) -> bool:
    """Somebody reads this, and wants to hear what goes well."""
    return stream.isatty() and settings.log_format == "text" and settings.log_level in ("debug", "info")


@contextmanager
def shown(progress: Progress, settings: Settings, stream: TextIO | None = None) -> Iterator[None]:
    """Draw it as long as the block runs, if it is wanted; on the event loop."""
    stream = stream or sys.stderr
    if not is_wanted(settings, stream):
        yield
        return
    bar = Bar(progress, stream)
    handlers = [each for each in logging.getLogger().handlers if getattr(each, "stream", None) is stream]
    for handler in handlers:
        handler.addFilter(bar.make_room)
    drawing = asyncio.create_task(_draw(bar))
    try:
        yield
    finally:
        drawing.cancel()
        for handler in handlers:
            handler.removeFilter(bar.make_room)
        bar.clear()


async def _draw(bar: Bar) -> None:
    while True:
        bar.draw()
        await asyncio.sleep(TICK_S)
