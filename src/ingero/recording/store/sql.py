"""Anybody's SQL over a recording, unable to write, attach, wait or fill the memory.

The engine itself guards, at four places, and no keyword is looked for: the file is opened read-only, SQLite's
authorizer allows reading and nothing else, its limits bound every value and statement, and a deadline is checked while
it runs.

Source: sqlite.org "Compile-Time Authorization Callbacks", "Run-Time Limits", "Query Progress Callbacks".
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.errors import BadDataError
from ingero.recording.store.files import open_recording
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_S, format_duration

Value = int | float | str | bytes | None

MAX_ROWS: Final = 10_000
_PROGRESS_OPS: Final = 10_000
_HEAP_BYTES: Final = 256 * 1024 * 1024
_LIMITS: Final = {
    sqlite3.SQLITE_LIMIT_LENGTH: 4 * 1024 * 1024,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 64 * 1024,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 256,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_ALLOWED: Final = frozenset((
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
))
_DENIED_FUNCTIONS: Final = frozenset(("load_extension", "fts3_tokenizer"))


@dataclass(frozen=True, slots=True)
class SqlLimits:
    """What one statement may take.

    Attributes:
        max_rows: Rows returned at most; further ones are not read.
        timeout_ns: Time at most.
    """

    max_rows: int = 1000
    timeout_ns: int = 30 * NS_PER_S


@dataclass(frozen=True, slots=True)
class SqlRows:
    """Rows of one statement.

    Attributes:
        columns: Column names; a repeated one is numbered from its second use on.
        rows: Values as SQLite has them.
        is_truncated: There were more rows than the limit.
        duration_ns: How long it took.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Value, ...]]
    is_truncated: bool
    duration_ns: int


def run_sql(
    path: Path, sql: str, limits: SqlLimits | None = None, clock: Clock | None = None
) -> SqlRows:
    """Run one reading statement.

    Raises:
        StoreError: The file cannot be read.
        BadDataError: The statement is not one SELECT, is wrong, or took too long or too much.
    """
    limits = limits or SqlLimits()
    clock = clock or SystemClock()
    began_ns = clock.mono_ns()
    with open_recording(path) as connection:
        _guard(connection, clock, began_ns + limits.timeout_ns)
        with _sql_errors(limits):
            cursor = connection.execute(sql)
            if cursor.description is None:
                raise BadDataError(
                    "there is no statement",
                    hint='write one SELECT, such as "SELECT count(*) FROM events"',
                )
            columns = _distinct([name for name, *_ in cursor.description])
            rows = cursor.fetchmany(min(limits.max_rows, MAX_ROWS))
            is_truncated = cursor.fetchone() is not None
    return SqlRows(columns, rows, is_truncated, clock.mono_ns() - began_ns)


def _guard(connection: sqlite3.Connection, clock: Clock, deadline_ns: int) -> None:
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute(f"PRAGMA hard_heap_limit = {_HEAP_BYTES}")
    for limit, value in _LIMITS.items():
        connection.setlimit(limit, value)
    connection.set_progress_handler(lambda: clock.mono_ns() > deadline_ns, _PROGRESS_OPS)
    connection.set_authorizer(_authorize)


def _authorize(
    action: int, _first: str | None, second: str | None, _database: str | None, _trigger: str | None
) -> int:
    is_denied = action == sqlite3.SQLITE_FUNCTION and second in _DENIED_FUNCTIONS
    return sqlite3.SQLITE_OK if action in _ALLOWED and not is_denied else sqlite3.SQLITE_DENY


@contextmanager
def _sql_errors(limits: SqlLimits) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise BadDataError(
            "the statement needs too much memory", hint="aggregate in SQL, or add LIMIT"
        ) from error
    except (sqlite3.Error, sqlite3.Warning) as error:
        text = str(error)
        if text == "interrupted":
            raise BadDataError(
                f"the statement took longer than {format_duration(limits.timeout_ns)}",
                hint="narrow it with WHERE timestamp >= …, or aggregate",
            ) from error
        hint = (
            "only one SELECT can be asked here"
            if "not authorized" in text or "prohibited" in text
            else ""
        )
        raise BadDataError(f"SQL: {text}", hint=hint) from error
    except ValueError as error:
        raise BadDataError(f"SQL: {error}") from error


def _distinct(names: list[str]) -> tuple[str, ...]:
    """Number repeated names, so that a row can be an object."""
    seen: dict[str, int] = {}
    distinct = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        distinct.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return tuple(distinct)
