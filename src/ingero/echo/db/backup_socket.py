"""A backup of a database that is being served: a Unix socket beside the file, for users who may read the file anyway.

The client opens the copy's files and passes their descriptors; the server fills them while its writer pauses, so the
copy is of one moment, and neither needs to reach the other's paths. Ingest waits for that long (its senders are
answered after it), reads go on. Only the socket's owner and root are let in.

A frame is one JSON object; source of the mechanism: unix(7), ``SCM_RIGHTS`` and ``SO_PEERCRED``.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import duckdb

from ingero.echo.db.engine import checkpoint, count_tables, wal_path
from ingero.echo.db.lock import find_open
from ingero.echo.db.store import Store
from ingero.errors import IngeroError, StoreError

_LOG: Final = logging.getLogger("ingero.echo")
_ASK: Final = b"backup"
_ASK_TIMEOUT_S: Final = 10.0
_MAX_ANSWER_BYTES: Final = 4096
_COPY_BYTES: Final = 8 << 20
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_PAUSE_S: Final = 0.1
"""Between two attempts to accept where the system has nothing left for a connection, which goes on waiting."""


def backup_socket_path(path: str) -> Path:
    """Where the server of a database file listens for backups."""
    return Path(f"{path}.backup.sock")


class BackupServer:
    """The server's side: one backup at a time, on a thread of its own.

    Args:
        store: An open store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def open(self) -> None:
        """Listen. Where that cannot be, say so and go on: the database is served all the same."""
        if not self._store.is_file:
            return
        path = backup_socket_path(self._store.path)
        try:
            path.unlink(missing_ok=True)  # of a process that was killed: we hold the file now
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with _short(path) as name:
                listener.bind(name)
            path.chmod(0o600)
            listener.listen(4)
        except OSError as error:
            _LOG.warning("no backups while serving: %s: %s", path, error.strerror or error)
            return
        self._listener = listener
        self._thread = threading.Thread(target=self._serve, name="echo-backup", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish the backup that runs, and stop listening."""
        if self._listener is None or self._thread is None:
            return
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        backup_socket_path(self._store.path).unlink(missing_ok=True)

    def _serve(self) -> None:
        assert self._listener is not None
        while link := self._accept(self._listener):
            with link, suppress(OSError):
                link.settimeout(_ASK_TIMEOUT_S)
                link.sendall(json.dumps(self._answer(link)).encode())

    def _accept(self, listener: socket.socket) -> socket.socket | None:
        """The next connection; None once it is closed. Why none can be taken is said once until one can."""
        is_said = False
        while not self._closing.is_set():
            try:
                return listener.accept()[0]
            except OSError as error:
                if error.errno == errno.ECONNABORTED or self._closing.is_set():
                    continue
                if not is_said:
                    _LOG.warning(
                        "no backups while serving until this is over: %s: %s",
                        backup_socket_path(self._store.path),
                        "no file descriptor is free"
                        if error.errno == errno.EMFILE
                        else error.strerror or error,
                    )
                is_said = True
                self._closing.wait(_PAUSE_S)
        return None

    def _answer(self, link: socket.socket) -> dict[str, Any]:
        found = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(found)
        asked, fds, _, _ = socket.recv_fds(link, len(_ASK), 2)
        try:
            if uid not in {0, os.geteuid()}:
                return {"error": "only the owner of the database may back it up"}
            if asked != _ASK or len(fds) != 2:
                return {"error": "not a request for a backup"}
            done: dict[str, Any] = self._store.call(
                lambda connection: copy_now(connection, self._store.path, fds)
            ).result()
        except IngeroError as error:
            return {"error": error.message}
        except OSError as error:
            return {"error": f"cannot write the copy: {error.strerror or error}"}
        finally:
            for fd in fds:
                os.close(fd)
        return done


def copy_now(connection: duckdb.DuckDBPyConnection, path: str, fds: list[int]) -> dict[str, Any]:
    """Copy file and log between two commits; bytes, and the rows that the copy must have.

    The log is empty unless the checkpoint was not possible.
    """
    with suppress(StoreError):
        checkpoint(connection)
    size = 0
    for source, fd in zip((Path(path), wal_path(path)), fds, strict=True):
        if source.exists():
            size += _copy_file(source, fd)
            os.fsync(fd)
    return {"bytes": size, "rows": count_tables(connection)}


def _copy_file(source: Path, to_fd: int) -> int:
    """Copy through the descriptor that DuckDB has, which is neither moved nor closed: its lock would be lost."""
    of_duckdb = find_open(source)
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC) if of_duckdb is None else of_duckdb
    at = 0
    try:
        while n_bytes := os.sendfile(
            to_fd, fd, at, _COPY_BYTES
        ):  # with an offset, sendfile(2) moves no descriptor
            at += n_bytes
    finally:
        if of_duckdb is None:
            os.close(fd)
    return at


def request_backup(path: Path, copy: Path) -> dict[str, int]:
    """Have the process that serves ``path`` fill ``copy`` and its log, which must not exist yet.

    Returns:
        Rows that each table of the copy must have.

    Raises:
        StoreError: No process serves it, or the copy could not be made; what there is of it is the caller's to remove.
    """
    control = backup_socket_path(str(path))

    def ask(fds: list[int]) -> dict[str, Any]:
        try:
            return _ask(control, fds)
        except OSError as error:
            raise StoreError(
                f"{path} is in use, and its server does not take backups: {error.strerror or error}",
                hint=f"It listens on {control}; ask as the user who runs it.",
            ) from error

    return fill_copy(copy, ask)


def fill_copy(copy: Path, fill: Callable[[list[int]], dict[str, Any]]) -> dict[str, int]:
    """Make a copy and its log, which must not exist yet.

    Args:
        copy: Its name.
        fill: Writes both through descriptors; what `copy_now` returns, or what the server said instead.

    Returns:
        Rows that each table of the copy must have.

    Raises:
        StoreError: It could not be made; what there is of it is the caller's to remove.
    """
    log = wal_path(str(copy))
    fds: list[int] = []
    try:
        fds.extend(
            os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) for part in (copy, log)
        )
        answer = fill(fds)
    except OSError as error:
        raise StoreError(f"cannot write {copy}: {error.strerror or error}") from error
    finally:
        for fd in fds:
            os.close(fd)
    if "bytes" not in answer:
        raise StoreError(f"cannot make {copy}: {answer.get('error', 'the server went away')}")
    if not log.stat().st_size:
        log.unlink()
    rows: dict[str, int] = answer.get("rows", {})
    return rows


def _ask(control: Path, fds: list[int]) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        with _short(control) as name:
            link.connect(name)
        socket.send_fds(link, [_ASK], fds)
        received = b""
        while part := link.recv(_MAX_ANSWER_BYTES):
            received += part
    answer: dict[str, Any] = json.loads(received) if received else {}
    return answer


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of the socket that fits into its 108 bytes, however deep the folder lies."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
