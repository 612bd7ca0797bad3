"""The process that runs one statement and ends. Everything here runs after the fork, alone."""

from __future__ import annotations

import base64
import math
import mmap
import os
import re
import resource
import socket
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

import duckdb
import msgspec
import pyarrow as pa

from ingero.echo.db.sandbox.guard import QueryRefusedError, check_statement
from ingero.echo.db.sandbox.messages import Data, GuardReply, Result, SandboxJob, receive, send

_SLICE_ROWS: Final = 1024
_SPARE_BYTES: Final = 192 << 20
_NICE: Final = 10
"""Statements take the processor that ingest and tools leave."""
_CONFIG: Final[dict[str, str | bool | int | float | list[str]]] = {
    "threads": 1,
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "allow_unsigned_extensions": False,
    "python_enable_replacements": False,
    "temp_directory": "",
}

_WITH_ZONE: Final = re.compile(
    r"""\"(?:[^\"]|\"\")*\"|'(?:[^']|'')*'|(?P<zone>TIMESTAMP WITH TIME ZONE)"""
)
"""In the name of a type, also of a nested one; quoted names of members and values are passed over."""


def run_worker(link: socket.socket) -> None:
    """Serve one job on ``link``; the caller ends the process afterwards."""
    job, _ = receive(link, SandboxJob)
    connection = duckdb.connect(
        ":memory:", config={**_CONFIG, "memory_limit": f"{max(job.memory_bytes >> 21, 32)}MiB"}
    )
    connection.execute("SET TimeZone = 'UTC'")
    _limit_self(job)
    try:
        needs = check_statement(connection, job.sql, frozenset(job.tables))
    except QueryRefusedError as refused:
        send(link, GuardReply(refused=refused.message, code=refused.code))
        return
    except (duckdb.Error, ValueError, RecursionError, MemoryError):
        send(link, GuardReply(refused="the statement cannot be parsed", code="sql_syntax"))
        return
    columns = None if needs.columns is None else sorted(needs.columns)
    send(link, GuardReply(tables=sorted(needs.tables), columns=columns))
    data, fds = receive(link, Data, max_fds=16)
    _load(connection, data.tables, fds)
    connection.execute("SET lock_configuration = true")
    _forbid_descriptors()
    send(link, _run(connection, job))


def _limit_self(job: SandboxJob) -> None:
    os.nice(_NICE)
    _lower(resource.RLIMIT_DATA, job.memory_bytes + _SPARE_BYTES)
    _lower(resource.RLIMIT_CPU, math.ceil(job.timeout_s) + 1)
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_CORE, 0)


def _forbid_descriptors() -> None:
    """From here no file and no socket can be opened: every new descriptor fails."""
    _lower(resource.RLIMIT_NOFILE, 0)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _load(connection: duckdb.DuckDBPyConnection, names: list[str], fds: list[int]) -> None:
    for name, fd in zip(names, fds, strict=True):
        mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)  # unmapped when the last column is gone
        os.close(fd)
        rows = pa.ipc.open_stream(pa.py_buffer(mapped)).read_all()
        connection.register("arriving", rows)
        connection.execute(f"CREATE TABLE {name} AS SELECT * FROM arriving")  # noqa: S608 - the parent's names
        connection.unregister("arriving")


def _run(connection: duckdb.DuckDBPyConnection, job: SandboxJob) -> Result:
    try:
        return _collect(connection, _execute(connection, job.sql), job)
    except duckdb.OutOfMemoryException:
        return Result(failed="the statement needs more memory than it may use", code="sql_memory")
    except duckdb.Error as error:
        text = str(error).partition("\n")[0][:500]
        return Result(failed=text, code="sql_failed")
    except MemoryError:
        return Result(failed="the statement needs more memory than it may use", code="sql_memory")


def _execute(connection: duckdb.DuckDBPyConnection, sql: str) -> list[str]:
    """Run the statement and return its columns; times with a zone come without it, in UTC.

    DuckDB makes Python's values of such times with pytz, a module that is not here.

    Raises:
        duckdb.Error: The statement fails.
    """
    bound = connection.sql(sql)  # a SELECT: bound, not run
    columns = [str(name) for name in bound.columns]
    kinds = [str(kind) for kind in bound.types]
    wanted = [_WITH_ZONE.sub(_drop_zone, kind) for kind in kinds]
    if wanted == kinds:
        connection.execute(sql)
        return columns
    casts = [f"CAST(#{number} AS {kind})" for number, kind in enumerate(wanted, 1)]
    connection.execute(f"CREATE VIEW with_zones AS {sql}")
    connection.execute(f"SELECT {', '.join(casts)} FROM with_zones")  # noqa: S608 - DuckDB's own names of types
    return columns


def _drop_zone(found: re.Match[str]) -> str:
    return "TIMESTAMP" if found["zone"] else found[0]


def _collect(connection: duckdb.DuckDBPyConnection, columns: list[str], job: SandboxJob) -> Result:
    parts: list[bytes] = []
    n_bytes, is_cut = 2, False  # of the answer: its brackets
    while not is_cut and (found := connection.fetchmany(_SLICE_ROWS)):
        for row in found:
            encoded = msgspec.json.encode([_plain(value) for value in row])
            if not parts and n_bytes + len(encoded) + 1 > job.max_bytes:
                return Result(
                    failed=f"one row is larger than the limit of {job.max_bytes} bytes; name fewer columns",
                    code="sql_row_too_large",
                )
            is_cut = len(parts) >= job.max_rows or n_bytes + len(encoded) + 1 > job.max_bytes
            if is_cut:
                break
            parts.append(encoded)
            n_bytes += len(encoded) + 1
    rows = b"[" + b",".join(parts) + b"]"
    return Result(columns=columns, rows=rows, n_rows=len(parts), is_cut=is_cut)


def _plain(value: object) -> object:
    """A value as JSON has it: non-finite is null, times are RFC 3339 in UTC, bytes are base64."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    for kind, spell in _SPELLINGS:
        if isinstance(value, kind):
            return spell(value)
    return None if value is None else str(value)


def _spell_moment(value: datetime) -> str:
    aware = value if value.tzinfo else value.replace(tzinfo=UTC)
    return aware.isoformat().replace("+00:00", "Z")


_SPELLINGS: Final[tuple[tuple[type, Callable[[Any], object]], ...]] = (
    (float, lambda value: value if math.isfinite(value) else None),
    (datetime, _spell_moment),
    (date, date.isoformat),
    (time, time.isoformat),
    (Decimal, lambda value: float(value) if value.is_finite() else None),
    (timedelta, timedelta.total_seconds),
    (bytes, lambda value: base64.b64encode(value).decode()),
    (list, lambda value: [_plain(one) for one in value]),
    (tuple, lambda value: [_plain(one) for one in value]),
    (dict, lambda value: {str(key): _plain(one) for key, one in value.items()}),
)
