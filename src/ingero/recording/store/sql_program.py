"""The program that runs one statement of anybody's and ends: what that takes of memory and time ends with it.

Started by its path, isolated and without site-packages (`ingero.recording.store.sql`), so that it is there in some
40 ms: it imports nothing of this package and nothing large, ``typing`` among it. The file's URI and the limits are its
arguments, the statement comes on standard input, and the answer goes to standard output as MessagePack.

The kernel ends it at its deadline, also where its parent is gone. SQLite's own progress handler could not: one call of
a function is one step of its engine, however long it takes.

Source: sqlite.org "Compile-Time Authorization Callbacks", "Run-Time Limits"; the MessagePack specification;
setitimer(2).
"""

from __future__ import annotations

import resource
import signal
import sqlite3
import struct
import sys
from contextlib import closing

Value = int | float | str | bytes | None

ALONE = "mode=ro&vfs=unix-none"
"""Source: sqlite.org "Write-Ahead Logging", "Use of WAL Without Shared-Memory", and "The OS Backend", unix-none."""
_MEMORY_BYTES = 320 * 1024 * 1024  # of address space: 256 MiB, and what the interpreter takes
_LIMITS = {
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
_ALLOWED = frozenset((
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
))
_DENIED_FUNCTIONS = frozenset(("load_extension", "fts3_tokenizer"))


def connect(uri: str) -> sqlite3.Connection:
    """Open a file for reading alone; damaged text is shown with replacement characters."""
    connection = sqlite3.connect(uri, uri=True)
    connection.text_factory = _decode_text
    if uri.endswith(ALONE):
        # before the first look at the file: the log's index is then kept in memory
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA query_only = 1")
    return connection


def _decode_text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _limit_self(timeout_ns: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own waits for the end of the statement
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # that it is ignored would be inherited
    for limit, wanted in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CPU, timeout_ns // 1_000_000_000 + 2),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (value, value))
    signal.setitimer(signal.ITIMER_REAL, max(timeout_ns / 1e9, 1e-6))  # 0 would be no deadline


def _guard(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA temp_store = MEMORY")
    for limit, value in _LIMITS.items():
        connection.setlimit(limit, value)
    connection.set_authorizer(_authorize)


def _authorize(
    action: int, _first: str | None, second: str | None, _database: str | None, _trigger: str | None
) -> int:
    is_denied = action == sqlite3.SQLITE_FUNCTION and second in _DENIED_FUNCTIONS
    return sqlite3.SQLITE_OK if action in _ALLOWED and not is_denied else sqlite3.SQLITE_DENY


def _pack(value: Value) -> bytes:
    if value is None:
        return b"\xc0"
    if isinstance(value, int):
        return b"\xd3" + struct.pack(">q", value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    text = value.encode("utf-8", "replace")
    return b"\xdb" + struct.pack(">I", len(text)) + text


def _pack_head(n_items: int) -> bytes:
    return b"\xdd" + struct.pack(">I", n_items)


def _count_shown(value: Value, n_packed: int) -> int:
    """Bytes that a value takes as text: a blob is shown in hex, a number in digits."""
    if isinstance(value, bytes):
        return 2 * len(value)
    return n_packed if isinstance(value, str) else len(repr(value))


def _read_rows(cursor: sqlite3.Cursor, max_rows: int, max_bytes: int) -> tuple[list[bytes], bool]:
    """Rows of at most so many bytes together, packed, and whether there are more."""
    packed: list[bytes] = []
    n_shown = 0
    for row in cursor:
        if len(packed) == max_rows:
            return packed, True
        values = [_pack(value) for value in row]
        n_shown += sum(map(_count_shown, row, map(len, values)))
        if n_shown > max_bytes:
            return packed, True
        packed.append(_pack_head(len(values)) + b"".join(values))
    return packed, False


def _answer(uri: str, sql: str, max_rows: int, max_bytes: int) -> list[bytes]:
    """The answer in pieces: what failed, why, columns, rows, whether there are more."""
    try:
        connection = connect(uri)
    except sqlite3.Error as error:
        return _fail("store", str(error))
    with closing(connection):
        try:
            _guard(connection)
            cursor = connection.execute(sql)
            if cursor.description is None:
                return _fail("empty", "")
            columns = [_pack(name) for name, *_ in cursor.description]
            rows, is_truncated = _read_rows(cursor, max_rows, max_bytes)
        except MemoryError:
            return _fail("memory", "")
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            return _fail("sql", str(error))
    return [
        _pack_head(5), _pack(""), _pack(""), _pack_head(len(columns)), *columns,
        _pack_head(len(rows)), *rows, b"\xc3" if is_truncated else b"\xc2",
    ]  # fmt: skip


def _fail(kind: str, why: str) -> list[bytes]:
    return [_pack_head(5), _pack(kind), _pack(why), _pack_head(0), _pack_head(0), b"\xc2"]


def main() -> None:
    """Arguments: URI, most rows, most bytes of them as text, time in ns."""
    uri, max_rows, max_bytes, timeout_ns = sys.argv[1:]
    sql = sys.stdin.buffer.read().decode()
    _limit_self(int(timeout_ns))
    sys.stdout.buffer.writelines(_answer(uri, sql, int(max_rows), int(max_bytes)))


if __name__ == "__main__":
    main()
