"""What parent, fork server and worker say to each other: length-prefixed msgpack on Unix sockets, rows in memfds."""

from __future__ import annotations

import socket
import struct
from typing import Any, Final, TypeVar

import msgspec

StructT = TypeVar("StructT", bound=msgspec.Struct)

_LENGTH: Final = struct.Struct("<I")
MAX_FRAME: Final = 64 << 20


class SandboxJob(msgspec.Struct):
    """Parent → child: a statement and its limits."""

    sql: str
    tables: list[str]
    max_rows: int
    max_bytes: int
    memory_bytes: int
    timeout_s: float


class GuardReply(msgspec.Struct):
    """Child → parent: which tables and columns it needs (None is every column), or why it is refused."""

    tables: list[str] = []
    columns: list[str] | None = None
    refused: str = ""
    code: str = ""


class Data(msgspec.Struct):
    """Parent → child: names of the tables whose memfds come with this frame, in order."""

    tables: list[str]


class Result(msgspec.Struct):
    """Child → parent: the answer, or why there is none. Rows are JSON."""

    columns: list[str] = []
    rows: bytes = b"[]"
    n_rows: int = 0
    is_cut: bool = False
    failed: str = ""
    code: str = ""


class PeerGoneError(Exception):
    """The other end closed the socket."""


def send(link: socket.socket, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
    """Send one message, and descriptors with its first bytes."""
    body = msgspec.msgpack.encode(message)
    head = _LENGTH.pack(len(body))
    if fds:
        socket.send_fds(link, [head], list(fds))
    else:
        link.sendall(head)
    link.sendall(body)


def receive(
    link: socket.socket, kind: type[StructT], max_fds: int = 0
) -> tuple[StructT, list[int]]:
    """Receive one message and the descriptors that came with it.

    Raises:
        PeerGoneError: The other end is gone.
        TimeoutError: The socket's timeout passed.
    """
    if max_fds:
        head, fds, _, _ = socket.recv_fds(link, _LENGTH.size, max_fds)
        head += _exactly(link, _LENGTH.size - len(head)) if head else b""
    else:
        head, fds = _exactly(link, _LENGTH.size), []
    if not head:
        raise PeerGoneError
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME:
        raise PeerGoneError
    return msgspec.msgpack.decode(_exactly(link, length), type=kind), list(fds)


def _exactly(link: socket.socket, n_bytes: int) -> bytes:
    parts: list[Any] = []
    while n_bytes:
        part = link.recv(min(n_bytes, 1 << 20))
        if not part:
            raise PeerGoneError
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)
