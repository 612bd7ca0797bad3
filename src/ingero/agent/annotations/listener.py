"""Serves the annotation socket: many senders, one thread, no answers.

A sender can cost the agent a bounded amount: connections, bytes waiting for a newline and lines a second are limited,
and each is read in turn. Lossy: what is not taken is counted by reason (`AnnotationCounts`); the sender gets no answer.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from ingero.agent.annotations.admission import Admission, Admitted, Peer, read_peer
from ingero.agent.annotations.socket_path import prepare_folder
from ingero.agent.events.socket import accept_one, open_listener
from ingero.errors import BadDataError
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S
from ingero.wire.annotations import LINE_MAX_BYTES, LINES_PER_S, decode_annotation

MAX_SENDERS: Final = 256
_READ_BYTES: Final = 64 * 1024
_JOIN_S: Final = 2.0

Take = Callable[[Sequence[Admitted]], None]
"""Gets the accepted annotations, in the order in which they were sent; must not block."""


@dataclass(slots=True)
class AnnotationCounts:
    """What happened since the start.

    Attributes:
        n_taken: Annotations that were accepted.
        n_rejected: Lines that broke a rule.
        n_throttled: Lines beyond a connection's rate.
        n_overlong: Connections ended for a line without an end.
        n_refused: Connections turned away: too many, or the kernel did not report the peer.
    """

    n_taken: int = 0
    n_rejected: int = 0
    n_throttled: int = 0
    n_overlong: int = 0
    n_refused: int = 0

    def build_record(self) -> dict[str, int]:
        """Every count by its name."""
        return {name.removeprefix("n_"): n for name, n in asdict(self).items()}


@dataclass(slots=True)
class _Sender:
    connection: socket.socket
    peer: Peer
    unread: bytes = b""
    window_ns: int = 0
    n_lines: int = 0


@dataclass(slots=True)
class AnnotationListener:
    """Serves one listening socket.

    Attributes:
        listener: Bound and listening.
        admission: Decides what is accepted.
        take: Gets it.
        clock: Measures rates.
        note: A warning for the log; empty when all is well.
    """

    listener: socket.socket
    admission: Admission
    take: Take
    clock: Clock
    counts: AnnotationCounts = field(default_factory=AnnotationCounts)
    note: str = ""
    _wake: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)
    _n_senders: int = 0

    def run(self) -> None:
        """Serve until closed; for a thread of its own."""
        self.listener.settimeout(0)
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            selector.register(self._wake[0], selectors.EVENT_READ)
            is_open = True
            while is_open:
                for key, _ in selector.select():
                    if isinstance(key.data, _Sender):
                        self._read(selector, key.data)
                    elif key.fileobj is self.listener:
                        self._accept(selector)
                    else:
                        is_open = False
            for key in list(selector.get_map().values()):
                if isinstance(key.data, _Sender):
                    self._read(selector, key.data)  # what was sent before the end counts
                    key.data.connection.close()

    def close(self) -> None:
        """Let `run` read what was sent and return."""
        with contextlib.suppress(OSError):
            self._wake[1].send(b"!")

    def release(self) -> None:
        """Free what `run` used; call it once it returned."""
        for end in self._wake:
            end.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        connection = accept_one(self.listener)
        if connection is None:
            return
        try:
            peer = read_peer(connection)
        except OSError:
            peer = None
        if peer is None or self._n_senders >= MAX_SENDERS:
            self.counts.n_refused += 1
            connection.close()
            return
        connection.settimeout(0)
        self._n_senders += 1
        selector.register(connection, selectors.EVENT_READ, _Sender(connection, peer))

    def _read(self, selector: selectors.BaseSelector, sender: _Sender) -> None:
        """Read once; the next sender has its turn before this one's rest."""
        try:
            data = sender.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, rest = (sender.unread + data).split(b"\n")
        if not data and rest:  # the last line need not end
            lines, rest = [rest], b""
        sender.unread = rest
        is_overlong = len(rest) > LINE_MAX_BYTES or any(len(one) > LINE_MAX_BYTES for one in lines)
        self.counts.n_overlong += is_overlong
        admitted = list(self._admit(lines, sender))
        if admitted:
            self.counts.n_taken += len(admitted)
            self.take(admitted)
        if is_overlong or not data:
            selector.unregister(sender.connection)
            sender.connection.close()
            self._n_senders -= 1

    def _admit(self, lines: Sequence[bytes], sender: _Sender) -> Iterator[Admitted]:
        now_ns = self.clock.mono_ns()
        if now_ns - sender.window_ns >= NS_PER_S:
            sender.window_ns, sender.n_lines = now_ns, 0
        for line in lines:
            if len(line) > LINE_MAX_BYTES:
                return
            if not line.strip():
                continue
            sender.n_lines += 1
            if sender.n_lines > LINES_PER_S:
                self.counts.n_throttled += 1
                continue
            try:
                yield self.admission.admit(decode_annotation(line), sender.peer)
            except BadDataError:
                self.counts.n_rejected += 1


@contextlib.contextmanager
def open_annotations(
    path: Path, gid: int, take: Take, clock: Clock
) -> Iterator[AnnotationListener]:
    """Take annotations on a socket until the context ends.

    Args:
        path: The socket.
        gid: Group whose members may connect; negative for none but this user.
        take: Gets what is accepted.
        clock: Both clocks.

    Raises:
        ConfigError: The path cannot be used safely.
        IngeroError: The system refused the socket.
    """
    warning = prepare_folder(path, gid)
    with open_listener(path, gid, "--annotate-socket") as (listener, note):
        serving = AnnotationListener(
            listener, Admission(clock), take, clock, note=" ".join(filter(None, (warning, note)))
        )
        thread = threading.Thread(target=serving.run, name="ingero-annotate", daemon=True)
        thread.start()
        try:
            yield serving
        finally:
            serving.close()
            thread.join(_JOIN_S)
            if not thread.is_alive():
                serving.release()
