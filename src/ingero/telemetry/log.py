"""Log lines of a service: one line of text or one JSON object each, on standard error.

Events are rare by design: what happens per record is a counter, never a line. A record may carry values in its
attribute ``fields`` (``extra={"fields": {...}}``): keys of the object, or ``key=value`` after the message.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final

from typing_extensions import override

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the keys of the Collector's own logs: level, ts, logger, msg."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        line: dict[str, object] = read_fields(record) | {
            "level": record.levelname.lower(),
            "ts": _timestamp(record),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            line["stacktrace"] = self.formatException(record.exc_info)
        return json.dumps(line)


class ConsoleFormatter(logging.Formatter):
    """``time level logger: message``; line breaks in a message cannot forge a second line."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        parts = [record.getMessage(), *map(_write_field, read_fields(record).items())]
        message = " ".join(parts).replace("\r", "\\r").replace("\n", "\\n")
        line = f"{_timestamp(record)} {record.levelname.lower():7} {record.name}: {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def read_fields(record: logging.LogRecord) -> dict[str, object]:
    """The values that a record carries beside its message."""
    fields: dict[str, object] = getattr(record, "fields", {})
    return fields


def _write_field(field: tuple[str, object]) -> str:
    """``key=value`` as logfmt has it: text with blanks, quotes or ``=`` in quotes; lists are JSON."""
    name, value = field
    if isinstance(value, bool):
        return f"{name}={str(value).lower()}"
    if isinstance(value, float):
        return f"{name}={value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value)
    is_plain = text.isprintable() and text and not set(text) & set(' "=\\')
    return f"{name}={text if is_plain else json.dumps(text)}"


def _timestamp(record: logging.LogRecord) -> str:
    stamp = datetime.fromtimestamp(record.created, UTC)
    return stamp.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def set_up_logging(level: str, encoding: str) -> None:
    """Send every log line of this process to standard error; calling again replaces what was set.

    Args:
        level: One of `LEVELS`, in any case.
        encoding: ``console`` or ``json``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if encoding == "json" else ConsoleFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(LEVELS[level.lower()])
    for chatty in ("uvicorn", "httpx", "httpcore", "httpx2", "httpcore2", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
