"""Which annotations are accepted: who may annotate which process, and when it was.

A sender annotates the whole node or of processes of its own user, root included. A process is its pid and start time,
read here and never taken from the line, because pids are used again.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ingero.errors import BadDataError
from ingero.telemetry.clock import Clock
from ingero.wire.annotations import Annotation

_PROC: Final = Path("/proc")
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred, unix(7): pid, uid, gid
_START_TIME: Final = 19  # of the fields after the name; proc_pid_stat(5), field 22


class Peer(NamedTuple):
    """The other end of a connection, as the kernel knew it at connect()."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """An annotation that is accepted.

    Attributes:
        wall_ns: When it was sent, on the recording's clock.
        labels: Keys and values.
        pid: The process they describe; 0 is the whole node.
        start_ticks: When that process started; 0 with ``pid`` 0.
        span_start_ns: From when the labels hold; 0 for an instant.
        span_end_ns: Until when.
        peer: Who sent it.
    """

    wall_ns: int
    labels: dict[str, str]
    pid: int
    start_ticks: int
    span_start_ns: int
    span_end_ns: int
    peer: Peer


def read_peer(connection: socket.socket) -> Peer:
    """The process at the other end of a socket.

    Raises:
        OSError: The kernel does not report it.
    """
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(data))


class Admission:
    """Checks annotations: who sent them, and whom they may be about.

    A recording's times are those of the monotonic clock plus its offset at the start, so that a clock that is set does
    not tear it. A sender's time is moved by as much as the wall clock moved since.

    Args:
        clock: Both clocks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ns = clock.wall_ns() - clock.mono_ns()

    def admit(self, annotation: Annotation, peer: Peer) -> Admitted:
        """Check one annotation.

        Raises:
            BadDataError: It is about a process that is gone, is another than meant, or belongs to another user.
        """
        now_ns = self._clock.mono_ns() + self._offset_ns
        shift_ns = now_ns - self._clock.wall_ns()
        pid = peer.pid if annotation.is_self else annotation.pid
        if annotation.is_self and not pid:
            raise BadDataError("the sender's process cannot be seen from here")
        return Admitted(
            wall_ns=annotation.ts + shift_ns if annotation.ts else now_ns,
            labels=annotation.labels,
            pid=pid,
            start_ticks=self._find_start(pid, peer, annotation.start_time) if pid else 0,
            span_start_ns=annotation.span_start + shift_ns if annotation.span_start else 0,
            span_end_ns=annotation.span_end + shift_ns if annotation.span_end else 0,
            peer=peer,
        )

    def _find_start(self, pid: int, peer: Peer, wanted_ticks: int) -> int:
        folder = _PROC / str(pid)
        try:
            stat = (folder / "stat").read_text(errors="replace")
            status = (folder / "status").read_text(errors="replace")
            start_ticks = int(stat[stat.rindex(")") + 1 :].split()[_START_TIME])
            uid = int(status.partition("\nUid:")[2].split(maxsplit=1)[0])
        except (OSError, ValueError, IndexError) as error:
            raise BadDataError(f"process {pid} cannot be read") from error
        if uid != peer.uid:
            raise BadDataError(
                f"process {pid} belongs to user {uid}, the sender is user {peer.uid}"
            )
        if wanted_ticks and wanted_ticks != start_ticks:
            raise BadDataError(f"process {pid} started at tick {start_ticks}, not {wanted_ticks}")
        return start_ticks
