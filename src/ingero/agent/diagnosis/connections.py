"""What the kernel knows of a process's TCP connections: two readings some seconds apart, by host at the other end.

The sockets are those of the process's own network namespace, asked for by ``sock_diag`` and joined with its open files.

Sources: sock_diag(7), netlink(7), setns(2); ``linux/inet_diag.h``, ``linux/tcp.h`` (``struct tcp_info`` only grows; its
times of busy and of limited connections came with Linux 4.10, that of timeouts with 6.7); proc_pid_net(5).
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final, TypeAlias

from ingero.agent.capture.discover.processes import iter_open_files
from ingero.agent.capture.kernel import libc
from ingero.model.counters import HostTraffic, Traffic
from ingero.units import NS_PER_MS, NS_PER_US

LOOK_S: Final = 5.0
"""Between the two readings."""
_PROC: Final = Path("/proc")
_CLONE_NEWNET: Final = 0x40000000
_SOCK_DIAG: Final = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY: Final = 20  # SOCK_DIAG_BY_FAMILY
_REQUEST_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR: Final = 2
_DONE: Final = 3
_ESTABLISHED: Final = 1 << 1
_WITH_INFO: Final = 1 << 1  # 1 << (INET_DIAG_INFO - 1)
_INFO: Final = 2
_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBxI48x")
_MESSAGE: Final = struct.Struct("=B3x4x16x16s4x8s16xI")
"""Of ``struct inet_diag_msg``: family, address at the other end, cookie, inode."""
_ATTRIBUTE: Final = struct.Struct("=HH")
_TCP_INFO: Final = struct.Struct("=68xII24xI16xQ20xI4xIQQQQ")
"""Round trip and its mean deviation, segments sent again, bytes acknowledged, least round trip, data segments, delivery
rate, and the times of outstanding data, of a full receive window and of a full send buffer.

Times are in microseconds, the rate in bytes a second.
"""
_TIMEOUTS: Final = struct.Struct("=244xI")
"""Milliseconds in which nothing was acknowledged until a timer ran out."""
_RECEIVE_BYTES: Final = 1 << 18
_TIMEOUT_S: Final = 2.0
_N_FIELDS: Final = 16  # of an interface in /proc/net/dev
_ERRORS: Final = {
    "receive errors": 2,
    "receive drops": 3,
    "transmit errors": 10,
    "transmit drops": 11,
    "carrier errors": 14,
}
"""Fields of an interface in ``/proc/PID/net/dev``."""

LookAtTraffic: TypeAlias = Callable[[int, threading.Event], Traffic]
"""Process, what ends it early → its connections in about `LOOK_S`."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """One reading of one connection.

    Attributes:
        inode: Of its socket.
        host: Address at the other end.
        totals: Since it began.
    """

    inode: int
    host: str
    totals: HostTraffic


@dataclass(frozen=True, slots=True)
class _Reading:
    """What there was of a process's network namespace.

    Attributes:
        connections: All by cookie, others' too: one of them may become the process's.
        sockets: Inodes of the process's own.
        errors: What its interfaces counted.
    """

    connections: dict[bytes, _Connection]
    sockets: set[int]
    errors: dict[str, int]


def look_at_traffic(pid: int, stop: threading.Event) -> Traffic:
    """Read a process's connections twice, `LOOK_S` apart or less where asked to stop."""
    try:
        first = _read(pid)
        stop.wait(LOOK_S)
        last = _read(pid)
    except OSError as error:
        return Traffic(reason=f"its connections cannot be read: {error.strerror or error}")
    return _build_traffic(first, last)


def _build_traffic(first: _Reading, last: _Reading) -> Traffic:
    by_host: dict[str, list[HostTraffic]] = {}
    for cookie, now in last.connections.items():
        if now.inode not in last.sockets:
            continue
        then = first.connections.get(cookie)
        traffic = now.totals if then is None else now.totals.since(then.totals)
        if traffic.n_segments > 0:
            by_host.setdefault(now.host, []).append(traffic)
    errors = {name: count - first.errors.get(name, count) for name, count in last.errors.items()}
    return Traffic(
        {host: HostTraffic.join(found) for host, found in by_host.items()},
        {name: count for name, count in errors.items() if count > 0},
    )


def _read(pid: int) -> _Reading:
    with ThreadPoolExecutor(1) as beside:  # the thread that enters the namespace ends with it
        found = dict(beside.submit(_list_connections, pid).result())
    return _Reading(found, _find_sockets(pid), _read_errors(pid))


def _find_sockets(pid: int) -> set[int]:
    """Inodes of a process's sockets."""
    names = iter_open_files(pid)
    return {int(name[len("socket:[") : -1]) for name in names if name.startswith("socket:[")}


def _list_connections(pid: int) -> list[tuple[bytes, _Connection]]:
    """Every established connection of a process's network namespace; for a thread that ends afterwards."""
    fd = os.open(_PROC / str(pid) / "ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_ino != Path("/proc/thread-self/ns/net").stat().st_ino:
            libc.call("setns", fd, _CLONE_NEWNET)
    finally:
        os.close(fd)
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG
    ) as asked:
        asked.settimeout(_TIMEOUT_S)
        return [one for family in (socket.AF_INET, socket.AF_INET6) for one in _ask(asked, family)]


def _ask(asked: socket.socket, family: socket.AddressFamily) -> Iterator[tuple[bytes, _Connection]]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, _WITH_INFO, _ESTABLISHED)
    asked.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST_DUMP, 0, 0) + request)
    while True:
        answer = asked.recv(_RECEIVE_BYTES)
        at = 0
        while at + _HEADER.size <= len(answer):
            length, kind, *_ = _HEADER.unpack_from(answer, at)
            if kind == _DONE:
                return
            if kind == _ERROR or length < _HEADER.size:
                number = -struct.unpack_from("=i", answer, at + _HEADER.size)[0]
                raise OSError(number, os.strerror(number))
            if (found := _parse(answer[at + _HEADER.size : at + length])) is not None:
                yield found
            at += (length + 3) & ~3


def _parse(message: bytes) -> tuple[bytes, _Connection] | None:
    """A connection by its cookie; None where the kernel tells too little."""
    if len(message) < _MESSAGE.size:
        return None
    family, remote, cookie, inode = _MESSAGE.unpack_from(message)
    at = _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            return None
        if kind == _INFO:
            info = message[at + _ATTRIBUTE.size : at + length]
            host = _name(remote[:4] if family == socket.AF_INET else remote)
            if len(info) < _TCP_INFO.size:
                return None
            return cookie, _Connection(inode, host, _build(info))
        at += (length + 3) & ~3
    return None


def _name(packed: bytes) -> str:
    address = ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _build(info: bytes) -> HostTraffic:
    rtt, rtt_var, n_again, n_bytes, min_rtt, n_segments, rate, *times = _TCP_INFO.unpack_from(info)
    busy, window, buffer = times
    has_timeouts = len(info) >= _TIMEOUTS.size
    return HostTraffic(
        n_connections=1,
        rtt_ns=rtt * NS_PER_US,
        rtt_var_ns=rtt_var * NS_PER_US,
        min_rtt_ns=min_rtt * NS_PER_US,
        n_segments=n_segments,
        n_again=n_again,
        n_bytes=n_bytes,
        rate=rate,
        busy_ns=busy * NS_PER_US,
        window_ns=window * NS_PER_US,
        buffer_ns=buffer * NS_PER_US,
        timeout_ns=_TIMEOUTS.unpack_from(info)[0] * NS_PER_MS if has_timeouts else 0,
    )


def _read_errors(pid: int) -> dict[str, int]:
    """Errors and drops of the interfaces that a process has, by what and where: ``eth0 receive errors``."""
    found = {}
    text = (_PROC / str(pid) / "net/dev").read_bytes().decode("utf-8", "replace")
    for line in text.split("\n"):  # an interface's name may hold what else ends a line
        name, separator, counts = line.partition(":")
        fields = counts.split()
        if separator and len(fields) >= _N_FIELDS:
            for what, at in _ERRORS.items():
                found[f"{name.strip()} {what}"] = int(fields[at])
    return found
