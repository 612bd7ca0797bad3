"""Starts programs of ours as processes, waits until they are ready, and ends them.

A child ends with its standard input, which the kernel closes when its parent ends in any way: no child outlives the
command that needed it. A program reports the addresses it listens on in one JSON line (`ingero.serving.ready`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Final

from ingero.config.environment import READY_FD, build_environment, read_start_timeout
from ingero.errors import IngeroError, UnsupportedError

STOP_TIMEOUT_S: Final = 10.0
MAX_LINES: Final = 10_000
_PROGRAM: Final = (
    "from ingero.sim.launcher import end_with_input; end_with_input(); from {} import main; main()"
)


@contextmanager
def run_child(
    command: Sequence[str],
    limit_s: float,
    *,
    fds: Sequence[int] = (),
    environ: Mapping[str, str] | None = None,
    stderr: int | None = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen[str]]:
    """Start a process whose input is a pipe; at the end close that, and kill what did not end within the limit.

    A group of its own: Ctrl-C reaches the parent alone, which then ends its children in order.

    Args:
        command: What to start; it must end when its input does.
        limit_s: How long it may take for that.
        fds: Descriptors it inherits.
        environ: Its environment; None for ours.
        stderr: Where its errors go, as `subprocess.Popen` takes it: None is where ours do; a pipe is closed by who
            reads it.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=fds,
        env=environ,
        text=True,
        errors="replace",
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


def end_with_input() -> None:
    """In the child: have it end as by SIGTERM when its standard input ends."""

    def follow() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True).start()


class LaunchedProgram:
    """A started program. Make one with `launch` or `start`.

    Attributes:
        name: For messages, such as ``ingero-fleet``.
        process: The process.
        addresses: ``host:port`` by what listens there, such as ``receivers.otlp http``; empty before it is ready.
    """

    def __init__(self, name: str, process: subprocess.Popen[str], ready: IO[str]) -> None:
        self.name = name
        self.process = process
        self.addresses: dict[str, str] = {}
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._n_ready = 0
        self._has_ended = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._read_log, daemon=True),
            threading.Thread(target=self._read_ready, args=(ready,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def log(self) -> str:
        """What it wrote to standard error, the newest `MAX_LINES` lines."""
        return "\n".join(self._lines.copy())

    def wait_until_ready(self, count: int = 1) -> None:
        """Wait until it takes data.

        Args:
            count: How often it must have reported that: a Fleet reports again after each reload.

        Raises:
            ConfigError: As `read_start_timeout`.
            IngeroError: It ended instead, or took longer than that; the message holds its log.
        """
        timeout_s = read_start_timeout()
        with self._changed:
            self._changed.wait_for(lambda: self._n_ready >= count or self._has_ended, timeout_s)
        if self._n_ready < count:
            has_ended = self._has_ended
            self.process.kill()
            status = self.wait()
            reason = f"(exit status {status})" if has_ended else f"within {timeout_s:.0f} s"
            log = self.log or "it logged nothing"
            raise IngeroError(f"{self.name} did not start {reason}:\n{log}")

    def address(self, name: str) -> str:
        """The ``host:port`` of what listens under this name.

        Raises:
            UnsupportedError: Its configuration opens no such endpoint.
        """
        if name not in self.addresses:
            known = ", ".join(self.addresses) or "nothing"
            raise UnsupportedError(f"{self.name} has no address of {name}; it has {known}")
        return self.addresses[name]

    def url(self, name: str, path: str = "") -> str:
        """``http://host:port/path`` of what listens under this name; raises like `address`."""
        return f"http://{self.address(name)}{path}"

    def signal(self, which: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(which)

    def end(self) -> None:
        """Ask it to end, without waiting for that."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit status once it has ended, within `read_start_timeout` if nothing is said; its log is complete then.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        status = self.process.wait(read_start_timeout() if timeout_s is None else timeout_s)
        for thread in self._threads:
            thread.join(STOP_TIMEOUT_S)
        return status

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self._lines.append(line.rstrip("\n"))

    def _read_ready(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self.addresses = dict(json.loads(line)["listens"])
                    self._n_ready += 1
                    self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


@contextmanager
def start(
    module: str,
    arguments: Sequence[str] = (),
    *,
    prefix: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Iterator[LaunchedProgram]:
    """Start the ``main`` of a module and end it with the context, without waiting for it to be ready.

    Args:
        module: Such as ``ingero.cli.programs.fleet``.
        arguments: Of the command line.
        prefix: What the command line begins with, such as ``nsenter``.
        environ: Added to our environment.
    """
    reading, writing = os.pipe()
    command = [*prefix, sys.executable, "-c", _PROGRAM.format(module), *arguments]
    inherited = {READY_FD: str(writing), **(environ or {})}
    with os.fdopen(reading, encoding="utf-8") as ready, ExitStack() as running:
        with os.fdopen(writing, "wb"):
            child = run_child(
                command,
                STOP_TIMEOUT_S,
                fds=(writing,),
                environ=build_environment(inherited),
                stderr=subprocess.PIPE,
            )
            process = running.enter_context(child)
        program = LaunchedProgram(f"ingero-{module.rpartition('.')[2]}", process, ready)
        try:
            yield program
        finally:
            running.close()
            program.wait()


@contextmanager
def launch(
    module: str, arguments: Sequence[str] = (), *, environ: Mapping[str, str] | None = None
) -> Iterator[LaunchedProgram]:
    """Start a program as `start` does, and wait until it is ready.

    Raises:
        IngeroError: It did not start; the message holds its log.
    """
    with start(module, arguments, environ=environ) as program:
        program.wait_until_ready()
        yield program
