"""Log lines on stderr: one per request, key=value or JSON, one id everywhere. Never prompt text, never keys.

Code logs with `logging.getLogger("pagemill...")`; facts go in `extra={"fields": {...}}` and not into the message.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Mapping
from typing import Literal, TextIO, cast

from server.log_pipe import PipeHandler, is_pipe

LogLevel = Literal["debug", "info", "warning", "error"]

REQUEST_LOGGER = "pagemill.request"


def fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


def clean(text: str, limit: int = 200) -> str:
    """Client text that may stand in a log line: printable, one line, bounded."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(char if char.isprintable() else "?" for char in cut)


class Seldom:
    """Of lines that anybody can cause, so many a second; the rest is counted."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._second = 0
        self._num_told = 0
        self._num_untold = 0

    def allows(self, now: float) -> bool:
        """now: time.monotonic()."""
        if int(now) != self._second:
            self._second, self._num_told = int(now), 0
        if self._num_told >= self._per_second:
            self._num_untold += 1
            return False
        self._num_told += 1
        return True

    def untold(self) -> int:
        """How many there were since this was asked."""
        count, self._num_untold = self._num_untold, 0
        return count


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """time level message key=value ..."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        parts = [stamp, record.levelname.lower(), record.getMessage()]
        parts += [f"{key}={_value(value)}" for key, value in fields_of(record).items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(char in text for char in ' "=') else text


def level_of() -> LogLevel:
    """Of pagemill's lines: the least severe that is logged."""
    return cast(LogLevel, logging.getLevelName(logging.getLogger("pagemill").getEffectiveLevel()).lower())


def set_level(level: LogLevel) -> None:
    logging.getLogger("pagemill").setLevel(level.upper())


def configure(level: LogLevel, style: str, stream: TextIO | None = None) -> None:
    """Send pagemill's lines, and the warnings of everybody else, to `stream` (stderr) in `style` text or json."""
    stream = stream or sys.stderr
    handler: logging.Handler = PipeHandler(stream) if is_pipe(stream) else logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h.formatter, (JsonFormatter, TextFormatter))]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    set_level(level)
    # uvicorn warns of every malformed request: clients must not be able to fill the log
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.captureWarnings(True)
