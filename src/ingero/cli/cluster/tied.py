"""A child process that ends with its standard input, and so with whoever holds that."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def run_tied(
    command: Sequence[str], limit_s: float, *, fds: Sequence[int] = (), reads_errors: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Start a process whose input is a pipe; at the end close that, and kill what did not end within the limit.

    Args:
        command: What to start; it must end when its input does.
        limit_s: How long it may take for that.
        fds: Descriptors it inherits.
        reads_errors: Whether its standard error is a pipe too; otherwise it says nothing.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if reads_errors else subprocess.DEVNULL,
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
        if process.stderr is not None:
            process.stderr.close()
