"""Forks a child per statement. Started by the parent with an empty environment and one socket, before any tenant spoke.

It imports what a child needs once, so that a fork costs milliseconds; it never sees a statement or a row, and has no
threads, so that forking is safe.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from typing import Final

import duckdb
import pyarrow as pa

from ingero.echo.db.sandbox.messages import PeerGoneError
from ingero.echo.db.sandbox.worker import run_worker

_REAP_S: Final = 1.0


def serve(control: socket.socket) -> None:
    """Fork on request until the parent goes away.

    A request is one byte with a socket for the child; the answer is the child's pid with a pidfd.
    """
    while True:
        ready, _, _ = select.select([control], [], [], _REAP_S)
        _reap()
        if not ready:
            continue
        request, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_worker(fds[0])
        os.close(fds[0])
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [pid.to_bytes(4, "little")], [pidfd])
        os.close(pidfd)


def _become_worker(fd: int) -> None:
    status = 1
    try:
        with socket.socket(fileno=fd) as link:
            run_worker(link)
        status = 0
    except (OSError, PeerGoneError, MemoryError, duckdb.Error, pa.ArrowException):
        status = 2  # the parent reads a closed socket and says so
    finally:
        os._exit(status)


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def main() -> None:
    """Entry point: the control socket's descriptor is the only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        serve(control)


if __name__ == "__main__":
    main()
