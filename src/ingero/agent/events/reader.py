"""Reading an agent's local event stream: lines from a Unix socket, for as long as it takes.

A reader sends nothing. It connects again whenever the agent goes away, with a delay that doubles and starts over after
each success.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from ingero.units import NS_PER_S

DIAL_TIMEOUT_S: Final = 2.0
POLL_S: Final = 0.5
MAX_DELAY_NS: Final = 30 * NS_PER_S
_CHUNK_BYTES: Final = 64 * 1024


class Listener(Protocol):
    """Receives what a reader reads."""

    def connected(self) -> None:
        """A connection is open."""
        ...

    def disconnected(self) -> None:
        """The connection ended."""
        ...

    def line(self, line: bytes) -> None:
        """One line without its newline."""
        ...

    def overlong(self) -> None:
        """A line longer than the limit was skipped."""
        ...


class EventLines:
    """Cuts a byte stream into lines; one that grows past the limit is skipped to its end and reported.

    Args:
        limit_bytes: Longest line.
        listener: Receives each line.
    """

    def __init__(self, limit_bytes: int, listener: Listener) -> None:
        self._limit_bytes = limit_bytes
        self._listener = listener
        self._rest = bytearray()
        self._is_skipping = False

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes."""
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            self._rest += part
            self._end_line()
        self._rest += rest
        if len(self._rest) > self._limit_bytes:
            self._rest.clear()
            if not self._is_skipping:
                self._listener.overlong()
            self._is_skipping = True

    def _end_line(self) -> None:
        line, self._rest = bytes(self._rest), bytearray()
        was_skipping, self._is_skipping = self._is_skipping, False
        if was_skipping:
            return
        if len(line) > self._limit_bytes:
            self._listener.overlong()
        elif line.strip():
            self._listener.line(line)


class EventReader:
    """Reads one socket until it is to stop.

    Args:
        path: The socket.
        listener: Receives everything.
        limit_bytes: Longest line.
        delay_ns: First delay before connecting again.
        wait: ``wait(duration_ns)`` waits and returns whether to stop.
    """

    def __init__(
        self,
        path: Path,
        listener: Listener,
        limit_bytes: int,
        delay_ns: int,
        wait: Callable[[int], bool],
    ) -> None:
        self._path = path
        self._listener = listener
        self._limit_bytes = limit_bytes
        self._first_delay_ns = delay_ns
        self._wait = wait

    def run(self) -> None:
        """Read until ``wait`` returns True."""
        delay_ns = self._first_delay_ns
        while True:
            if self._read_once():
                delay_ns = self._first_delay_ns
            if self._wait(delay_ns):
                return
            delay_ns = min(2 * delay_ns, max(MAX_DELAY_NS, self._first_delay_ns))

    def _read_once(self) -> bool:
        """Connect and read to the end; False when nothing listened, or no descriptor is left."""
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            return False
        with connection:
            connection.settimeout(DIAL_TIMEOUT_S)
            try:
                connection.connect(str(self._path))
            except OSError:
                return False
            connection.settimeout(POLL_S)
            self._listener.connected()
            try:
                self._read(connection)
            finally:
                self._listener.disconnected()
        return True

    def _read(self, connection: socket.socket) -> None:
        lines = EventLines(self._limit_bytes, self._listener)
        while not self._wait(0):
            try:
                chunk = connection.recv(_CHUNK_BYTES)
            except TimeoutError:
                continue
            except OSError:
                return
            if not chunk:
                return
            lines.feed(chunk)
