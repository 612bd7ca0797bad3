"""Anybody's SQL over a recording, unable to write, attach, wait, fill the memory or stay.

A process of its own runs each statement (`ingero.recording.store.sql_program`), and no keyword is looked for: the file
is opened read-only, SQLite's authorizer allows reading and nothing else, its limits bound every value and statement,
and the kernel bounds the process's memory and ends it at its deadline. Rows are counted as they are fetched, so that
no more than what is answered is ever kept.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from ingero.errors import BadDataError, StoreError
from ingero.recording.store import sql_program
from ingero.recording.store.files import find_recording
from ingero.recording.store.sql_program import Value
from ingero.serving.columns import number_repeats
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_S, format_duration

MAX_ROWS: Final = 10_000
MAX_BYTES: Final = 32 * 1024 * 1024
_PATIENCE_NS: Final = 10 * NS_PER_S
"""For the process to start, which is not the statement's time."""


@dataclass(frozen=True, slots=True)
class SqlLimits:
    """What one statement may take.

    Attributes:
        max_rows: Rows returned at most; further ones are not read.
        timeout_ns: Time at most.
        max_bytes: Bytes of all values at most, as text; rows beyond are not read.
    """

    max_rows: int = 1000
    timeout_ns: int = 30 * NS_PER_S
    max_bytes: int = MAX_BYTES


@dataclass(frozen=True, slots=True)
class SqlRows:
    """Rows of one statement.

    Attributes:
        columns: Column names; a repeated one is numbered from its second use on.
        rows: Values as SQLite has them.
        is_truncated: There were more rows than the limits.
        duration_ns: How long it took, the start of its process included.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Value, ...]]
    is_truncated: bool
    duration_ns: int


class SqlStop:
    """Ends a statement whose answer is not wanted any more. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_set = False

    def set(self) -> None:
        """End the statement that runs, or the one that begins later."""
        with self._lock:
            self._is_set = True
            if self._process is not None:
                self._process.kill()

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        """Take a process as the one to end."""
        with self._lock:
            self._process = process
            if self._is_set:
                process.kill()


class _Reply(msgspec.Struct, frozen=True, array_like=True):
    """What the program answers; `failed` is empty where it has rows."""

    failed: str
    why: str
    columns: list[str]
    rows: list[tuple[Any, ...]]  # msgspec takes no union of text and bytes
    is_truncated: bool


def run_sql(
    path: Path,
    sql: str,
    limits: SqlLimits | None = None,
    clock: Clock | None = None,
    stop: SqlStop | None = None,
) -> SqlRows:
    """Run one reading statement.

    Args:
        path: The recording.
        sql: The statement.
        limits: What it may take.
        clock: For how long it took.
        stop: What ends it early, with a `StoreError`.

    Raises:
        StoreError: The file cannot be read, or the process that would read it does not start or ends.
        BadDataError: The statement is not one SELECT, is wrong, or took too long or too much.
    """
    limits = limits or SqlLimits()
    clock = clock or SystemClock()
    began_ns = clock.mono_ns()
    try:
        text = sql.encode()
    except UnicodeEncodeError as error:
        raise BadDataError(f"SQL: {error}") from error
    reply = _ask(find_recording(path), text, limits, stop or SqlStop())
    if reply.failed:
        raise _build_error(path, reply)
    rows, columns = reply.rows, tuple(number_repeats(reply.columns))
    return SqlRows(columns, rows, reply.is_truncated, clock.mono_ns() - began_ns)


def _ask(uri: str, sql: bytes, limits: SqlLimits, stop: SqlStop) -> _Reply:
    numbers = (min(limits.max_rows, MAX_ROWS), min(limits.max_bytes, MAX_BYTES), limits.timeout_ns)
    command = [sys.executable, "-I", "-S", sql_program.__file__, uri, *map(str, numbers)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        raise StoreError(f"cannot start a process for SQL: {error.strerror or error}") from error
    with process:
        stop.watch(process)
        try:
            answer, _ = process.communicate(sql, (limits.timeout_ns + _PATIENCE_NS) / NS_PER_S)
        except subprocess.TimeoutExpired as error:
            raise _build_late(limits) from error
        finally:
            process.kill()
    if process.returncode in {-signal.SIGALRM, -signal.SIGXCPU}:
        raise _build_late(limits)
    if process.returncode:
        raise StoreError(f"the process for SQL ended with status {process.returncode}")
    return msgspec.msgpack.decode(answer, type=_Reply)


def _build_late(limits: SqlLimits) -> BadDataError:
    return BadDataError(
        f"the statement took longer than {format_duration(limits.timeout_ns)}",
        hint="narrow it with WHERE timestamp >= …, or aggregate",
    )


def _build_error(path: Path, reply: _Reply) -> BadDataError | StoreError:
    if reply.failed == "store":
        return StoreError(f"{path}: {reply.why}")
    if reply.failed == "empty":
        return BadDataError(
            "there is no statement",
            hint='write one SELECT, such as "SELECT count(*) FROM events"',
        )
    if reply.failed == "memory":
        return BadDataError(
            "the statement needs too much memory", hint="aggregate in SQL, or add LIMIT"
        )
    is_denied = "not authorized" in reply.why or "prohibited" in reply.why
    return BadDataError(
        f"SQL: {reply.why}", hint="only one SELECT can be asked here" if is_denied else ""
    )
