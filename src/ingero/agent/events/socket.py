"""The local event stream: a Unix socket where any number of readers learn of episodes as they happen.

One thread serves all readers with non-blocking writes and a bounded queue each, so a slow reader loses its own messages
(counted) and no other's. A reader that connects during an episode first receives its state.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ingero.errors import ConfigError, IngeroError
from ingero.wire.uds import KnownMessage, StragglerResolved, StragglerState, encode_message

QUEUE_LIMIT: Final = 1024
"""Messages that wait for one reader."""
MAX_READERS: Final = 64
_BACKLOG: Final = 128
"""All ranks of a node may connect at one moment."""
_PRIVATE_UMASK: Final = 0o077
_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE_S: Final = 0.1


@dataclass(slots=True)
class StreamCounts:
    """What the stream did since the start.

    Attributes:
        n_published: Messages offered to the readers of their time.
        n_sent: Deliveries, one per message and reader, replays included.
        n_dropped: Messages that a reader was too slow for.
        n_without_reader: Messages published while no reader was connected.
        n_refused: Readers turned away because there were too many.
    """

    n_published: int = 0
    n_sent: int = 0
    n_dropped: int = 0
    n_without_reader: int = 0
    n_refused: int = 0


@dataclass(slots=True)
class _Reader:
    connection: socket.socket
    queue: deque[bytes] = field(default_factory=deque)
    unsent: bytes = b""

    @property
    def has_more(self) -> bool:
        return bool(self.unsent or self.queue)


class LocalEventServer:
    """Publishes messages to local readers.

    Args:
        listener: A bound, listening Unix socket; see `open_listener`.
        queue_limit: Messages that wait for one reader before it loses some.
    """

    def __init__(self, listener: socket.socket, queue_limit: int = QUEUE_LIMIT) -> None:
        listener.settimeout(0)
        self._listener = listener
        self._queue_limit = queue_limit
        self._lock = threading.Lock()
        self._readers: list[_Reader] = []
        self._open: dict[tuple[str, str], bytes] = {}
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.settimeout(0)
        self._wake_in.settimeout(0)
        self._is_closing = False
        self.counts = StreamCounts()

    def publish(self, message: KnownMessage) -> None:
        """Hand one message to every reader; never blocks."""
        line = encode_message(message)
        with self._lock:
            self._remember(message, line)
            self.counts.n_published += 1
            self.counts.n_without_reader += not self._readers
            for reader in self._readers:
                if len(reader.queue) >= self._queue_limit:
                    self.counts.n_dropped += 1
                else:
                    reader.queue.append(line)
        self._wake()

    def run(self) -> None:
        """Serve until closed; for a thread of its own."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_in, selectors.EVENT_READ)
            while not self._is_closing:
                for key, events in selector.select():
                    self._handle(selector, key, events)
                self._watch_writers(selector)
            self._end(selector)

    def close(self) -> None:
        """Let `run` send what it can without waiting, close every connection and return."""
        self._is_closing = True
        self._wake()

    @property
    def n_readers(self) -> int:
        """Readers connected now."""
        with self._lock:
            return len(self._readers)

    def _remember(self, message: KnownMessage, line: bytes) -> None:
        if isinstance(message, StragglerState):
            self._open[message.cluster_id, message.node_id] = line
        elif isinstance(message, StragglerResolved):
            self._open.pop((message.cluster_id, message.node_id), None)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_out.send(b"!")

    def _handle(
        self, selector: selectors.BaseSelector, key: selectors.SelectorKey, events: int
    ) -> None:
        if key.fileobj is self._listener:
            self._accept(selector)
        elif key.fileobj is self._wake_in:
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(4096)
        elif isinstance(key.data, _Reader):
            is_alive = not events & selectors.EVENT_READ or _is_connected(key.data.connection)
            if not is_alive or not self._send(key.data):
                self._drop(selector, key.data)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        connection = accept_one(self._listener)
        if connection is None:
            return
        connection.settimeout(0)
        reader = _Reader(connection)
        with self._lock:
            if len(self._readers) >= MAX_READERS:
                self.counts.n_refused += 1
                connection.close()
                return
            reader.queue.extend(self._open.values())
            self._readers.append(reader)
        selector.register(connection, selectors.EVENT_READ, reader)

    def _watch_writers(self, selector: selectors.BaseSelector) -> None:
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            events = selectors.EVENT_READ
            if reader.has_more:
                events |= selectors.EVENT_WRITE
            if selector.get_key(reader.connection).events != events:
                selector.modify(reader.connection, events, reader)

    def _send(self, reader: _Reader) -> bool:
        """Send what the connection takes now; False when it is broken."""
        try:
            while self._fill(reader):
                sent = reader.connection.send(reader.unsent)
                reader.unsent = reader.unsent[sent:]
                self.counts.n_sent += not reader.unsent
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _fill(self, reader: _Reader) -> bool:
        """Take the next message up when the last one is out; False when there is nothing to send."""
        with self._lock:
            if not reader.unsent and reader.queue:
                reader.unsent = reader.queue.popleft()
        return bool(reader.unsent)

    def _drop(self, selector: selectors.BaseSelector, reader: _Reader) -> None:
        selector.unregister(reader.connection)
        reader.connection.close()
        with self._lock:
            self._readers.remove(reader)
            self.counts.n_dropped += len(reader.queue) + bool(reader.unsent)

    def _end(self, selector: selectors.BaseSelector) -> None:
        for reader in list(self._readers):
            self._send(reader)
            self._drop(selector, reader)
        self._wake_in.close()
        self._wake_out.close()


def accept_one(listener: socket.socket) -> socket.socket | None:
    """The next connection; None where it has gone, or no descriptor is left.

    In the latter case it keeps waiting, and the listener stays readable: a moment passes first, as who asks again at
    once would keep a processor busy.
    """
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno in _FULL:
            time.sleep(_PAUSE_S)
        return None


@contextlib.contextmanager
def open_listener(
    path: Path, gid: int, option: str = "--remediate-socket"
) -> Iterator[tuple[socket.socket, str]]:
    """Bind the socket; remove it at the end.

    The socket is private from its first moment (mode 0700); with a group it becomes 0770 once it belongs to that group.
    A path on which a process listens is never taken; a leftover socket is; anything else is refused.

    Args:
        path: Where.
        gid: Group whose members may read; negative for none.
        option: What chooses another path, for errors.

    Yields:
        The listening socket, and a warning for the log (empty when all went well).

    Raises:
        ConfigError: The path is taken or is no socket.
        IngeroError: The system refused the socket.
    """
    _make_way(path, option)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind_private(listener, path)
        inode = path.lstat().st_ino
    except OSError as error:
        listener.close()
        raise IngeroError(
            f"cannot listen on {path}: {error.strerror or error}",
            hint=f"choose another path with {option}",
        ) from error
    try:
        yield listener, _admit_group(path, gid)
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if path.lstat().st_ino == inode:
                path.unlink()


def _bind_private(listener: socket.socket, path: Path) -> None:
    before = os.umask(_PRIVATE_UMASK)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)


def _admit_group(path: Path, gid: int) -> str:
    if gid < 0:
        return ""
    try:
        os.chown(path, -1, gid, follow_symlinks=False)
        path.chmod(0o770)
    except OSError as error:
        reason = error.strerror or error
        return f"only this user can read {path}: it cannot be given to group {gid} ({reason})"
    return ""


def _make_way(path: Path, option: str) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is not a socket", hint="remove it yourself")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            pass
        except OSError as error:
            raise ConfigError(f"{path}: cannot find its owner: {error}") from error
        else:
            raise ConfigError(
                f"another process already listens on {path}",
                hint=f"give this agent its own path with {option}",
            )
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _is_connected(connection: socket.socket) -> bool:
    """Readers send nothing; what they do send is skipped, and the end of their stream means that they are gone."""
    try:
        return bool(connection.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False
