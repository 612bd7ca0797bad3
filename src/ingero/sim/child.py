"""A child process that ends with its standard input, and so with whoever holds that.

The kernel closes that input when its holder dies in any way, so no child outlives the command that needed it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO


@contextmanager
def run_tied(
    command: Sequence[str],
    limit_s: float,
    *,
    fds: Sequence[int] = (),
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen[str]]:
    """Start a process whose input is a pipe; at the end close that, and kill what did not end within the limit.

    A group of its own: Ctrl-C reaches the holder alone, which then ends its children in order.

    Args:
        command: What to start; it must end when its input does.
        limit_s: How long it may take for that.
        fds: Descriptors it inherits.
        stdout: Where its output goes, as `subprocess.Popen` takes it.
        stderr: Where its errors go, likewise.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        pass_fds=fds,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def end_with_input() -> None:
    """In the child: have it end as by SIGTERM when its standard input ends."""

    def follow() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True).start()
