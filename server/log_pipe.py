"""A log handler for pipes and terminals: whoever reads one (a container's log driver, a supervisor, a person who has
pressed Ctrl-S) may stop reading, or go and come back, and must not stop the server.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import stat
import threading
from typing import TextIO

MAX_LINES = 10_000  # that wait for the reader
FLUSH_S = 1.0


def is_pipe(stream: TextIO) -> bool:
    """Whether writing may wait for somebody: a pipe, a socket or a terminal."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # no file at all
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stream.isatty()


class PipeHandler(logging.Handler):
    """Lines are written by a thread of its own, past the stream's lock. More than MAX_LINES wait for nobody: they are
    lost, as are those that cannot be written, and counted in a line of their own."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._fd = stream.fileno()
        self._lines: queue.Queue[str] = queue.Queue(MAX_LINES)
        self._num_lost = 0
        self._counting = threading.Lock()
        threading.Thread(target=self._write_all, name="pagemill-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self._lost(1)
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
            if not self._write(line):
                self._lost(1)
            elif (num_lost := self._num_lost) and self._write(self._told(num_lost)):
                self._lost(-num_lost)
            self._lines.task_done()

    def _lost(self, count: int) -> None:
        with self._counting:
            self._num_lost += count

    def _told(self, num_lost: int) -> str:
        told = {"name": "pagemill.server", "levelname": "WARNING", "msg": "lines were lost"}
        return self.format(logging.makeLogRecord({**told, "fields": {"count": num_lost}})) + "\n"

    def _write(self, line: str) -> bool:
        """Whether somebody has it, or may have: False when nobody reads any more."""
        data = line.encode(errors="replace")
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # whoever shares it with us has made it one that does not wait
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:
                return False
        return True
