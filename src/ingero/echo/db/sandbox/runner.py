"""`Sandbox`: the parent's side. Hands a statement to a fresh child, feeds it rows, and kills it at the deadline."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa

from ingero.echo.db.cancellation import Cancellation
from ingero.echo.db.errors import DeadlineError
from ingero.echo.db.sandbox.messages import (
    Data,
    GuardReply,
    PeerGoneError,
    Result,
    SandboxJob,
    receive,
    send,
)
from ingero.errors import BadDataError, RetryableError, StoreError
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

Rows = tuple[pa.Schema, Iterable[pa.RecordBatch]]
Export = Callable[[str, frozenset[str] | None], Rows]
"""The caller's own rows of one table, with at least those of the named columns that it has; None is every column."""

_ENVIRONMENT: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # no thread in a process that forks
    "LC_ALL": "C.UTF-8",
}
_BUSY_RETRY_NS: Final = NS_PER_S


class SqlRefusedError(BadDataError):
    """A statement that was not let in, or failed in itself; ``code`` says in one word why."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """What one statement may use.

    Attributes:
        n_workers: Statements at once.
        timeout_ns: From the fork to the answer.
        memory_bytes: Of the child, its rows included.
        max_answer_bytes: Of the answer's rows as JSON.
        max_input_bytes: Of the rows that it is given, all tables together.
    """

    n_workers: int = 2
    timeout_ns: int = 10 * NS_PER_S
    memory_bytes: int = 1 << 30
    max_answer_bytes: int = 8 << 20
    max_input_bytes: int = 256 << 20


class Sandbox:
    """Runs tenants' statements, each in its own process.

    Args:
        settings: Limits.
        tables: Tables that a statement may name.
        clock: For deadlines.
    """

    def __init__(self, settings: SandboxSettings, tables: Iterable[str], clock: Clock) -> None:
        self._settings = settings
        self._tables = sorted(tables)
        self._clock = clock
        self._places = threading.BoundedSemaphore(settings.n_workers)
        self._lock = threading.Lock()
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.killed = 0

    def start(self) -> None:
        """Start the fork server now instead of at the first statement."""
        with self._lock:
            self._get_control()

    def close(self) -> None:
        """End the fork server; children end by themselves when their socket closes."""
        with self._lock:
            self._drop_fork_server()

    def run(
        self, sql: str, export: Export, max_rows: int, stop: Cancellation | None = None
    ) -> Result:
        """Run one statement.

        Args:
            sql: The tenant's text.
            export: Gives the tenant's rows of a table that the statement names.
            max_rows: Most rows of the answer.
            stop: Set when the answer is not wanted any more.

        Raises:
            SqlRefusedError: Not let in, or failed.
            DeadlineError: Killed at the deadline, or stopped.
            RetryableError: All places are taken.
        """
        settings = self._settings
        if not self._places.acquire(timeout=settings.timeout_ns / NS_PER_S / 4):
            raise RetryableError("every place for SQL is taken", retry_after_ns=_BUSY_RETRY_NS)
        try:
            link, pidfd = self._fork()

            def kill() -> None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

            with link:
                try:
                    with (stop or Cancellation()).calls(kill):
                        return self._converse(link, sql, export, max_rows)
                finally:
                    kill()
                    os.close(pidfd)
        finally:
            self._places.release()

    def _converse(self, link: socket.socket, sql: str, export: Export, max_rows: int) -> Result:
        settings = self._settings
        deadline_ns = self._clock.mono_ns() + settings.timeout_ns
        job = SandboxJob(
            sql=sql,
            tables=self._tables,
            max_rows=max_rows,
            max_bytes=settings.max_answer_bytes,
            memory_bytes=settings.memory_bytes,
            timeout_s=settings.timeout_ns / NS_PER_S,
        )
        try:
            self._set_timeout(link, deadline_ns)
            send(link, job)
            verdict, _ = receive(link, GuardReply)
            if verdict.code:
                raise SqlRefusedError(verdict.refused, verdict.code)
            _send_rows(link, self._check_known(verdict), export, settings.max_input_bytes)
            self._set_timeout(link, deadline_ns)
            result, _ = receive(link, Result)
        except TimeoutError as error:
            self.killed += 1
            raise DeadlineError("cannot run the statement: killed at its deadline") from error
        except (PeerGoneError, BrokenPipeError, ConnectionResetError, msgspec.DecodeError) as error:
            self.killed += 1
            raise SqlRefusedError(
                "the statement used more memory or processor time than it may", "sql_limit"
            ) from error
        if result.code:
            raise SqlRefusedError(result.failed, result.code)
        return result

    def _check_known(self, needs: GuardReply) -> GuardReply:
        """Its tables, held once more to the list: the child has parsed hostile text."""
        if not set(needs.tables) <= set(self._tables):
            raise PeerGoneError
        return needs

    def _set_timeout(self, link: socket.socket, deadline_ns: int) -> None:
        left_ns = deadline_ns - self._clock.mono_ns()
        if left_ns <= 0:
            raise TimeoutError
        link.settimeout(left_ns / NS_PER_S)

    def _fork(self) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                return ours, self._request_fork(theirs)
            except OSError as error:
                ours.close()
                raise StoreError(f"cannot start a process for SQL: {error}") from error

    def _request_fork(self, theirs: socket.socket) -> int:
        with self._lock:
            for attempt in (1, 2):
                control = self._get_control()
                try:
                    socket.send_fds(control, [b"F"], [theirs.fileno()])
                    answer, fds, _, _ = socket.recv_fds(control, 4, 1)
                    if answer and fds:
                        return fds[0]
                except OSError:
                    if attempt == 2:
                        raise
                self._drop_fork_server()
            raise OSError("the fork server does not answer")

    def _get_control(self) -> socket.socket:
        if (
            self._control is not None
            and self._fork_server is not None
            and self._fork_server.poll() is None
        ):
            return self._control
        self._drop_fork_server()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._fork_server = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-m",
                    "ingero.echo.db.sandbox.fork_server",
                    str(theirs.fileno()),
                ],
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        ours.settimeout(10)
        self._control = ours
        return ours

    def _drop_fork_server(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._fork_server is not None:
            self._fork_server.kill()
            self._fork_server.wait()
            self._fork_server = None


def _send_rows(link: socket.socket, needs: GuardReply, export: Export, max_bytes: int) -> None:
    fds: list[int] = []
    budget = _Budget(max_bytes)
    columns = None if needs.columns is None else frozenset(needs.columns)
    try:
        for name in needs.tables:
            fd = os.memfd_create(f"echo-{name}", os.MFD_CLOEXEC)
            fds.append(fd)
            schema, batches = export(name, columns)
            with os.fdopen(os.dup(fd), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
                for batch in batches:
                    budget.spend(batch.nbytes)
                    writer.write_batch(batch)
        send(link, Data(needs.tables), tuple(fds))
    finally:
        for fd in fds:
            os.close(fd)


class _Budget:
    """Bytes that one statement's rows may take.

    Args:
        max_bytes: All tables together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._left = max_bytes

    def spend(self, n_bytes: int) -> None:
        """Take some.

        Raises:
            SqlRefusedError: There are no more.
        """
        self._left -= n_bytes
        if self._left < 0:
            raise SqlRefusedError(
                f"the answer needs more than {self._max_bytes >> 20} MiB of your rows: narrow the window, "
                "or name fewer columns",
                "sql_input_too_large",
            )
