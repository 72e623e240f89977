"""A log handler for pipes: whoever reads one (a container's log driver, a supervisor) may stop reading, and must not
stop the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import stat
import threading
from typing import TextIO

MAX_LINES = 10_000  # that wait for the reader
FLUSH_S = 1.0


def is_pipe(stream: TextIO) -> bool:
    """Whether writing may wait for somebody: a pipe or a socket."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # no file at all
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


class PipeHandler(logging.Handler):
    """Lines are written by a thread of its own, past the stream's lock. More than MAX_LINES wait for nobody: they are
    lost, and counted in a line of their own."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._fd = stream.fileno()
        self._lines: queue.Queue[str] = queue.Queue(MAX_LINES)
        self._num_lost = 0
        threading.Thread(target=self._write_all, name="pagemill-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self._num_lost += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Waits a moment for the reader."""
        lines = self._lines
        with lines.all_tasks_done:
            lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks, FLUSH_S)

    def _write_all(self) -> None:
        while True:
            line = self._lines.get()
            if num_lost := self._num_lost:
                self._num_lost -= num_lost
                told = {"name": "pagemill.server", "levelname": "WARNING", "msg": "lines were lost"}
                line += self.format(logging.makeLogRecord({**told, "fields": {"count": num_lost}})) + "\n"
            with contextlib.suppress(OSError):  # nobody reads any more
                self._write(line.encode(errors="replace"))
            self._lines.task_done()

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]
