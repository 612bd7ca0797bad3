"""Notices at once that what files hold is changed: inotify(7), ``struct inotify_event``.

Not noticed are writes through a shared mapping, and those of other machines to a network filesystem.
"""

from __future__ import annotations

import os
import struct
from typing import Final

from ingero.agent.capture.kernel import libc
from ingero.closing import Closing

_MODIFY: Final = 0x2  # IN_MODIFY: written to, or made shorter or longer
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC  # IN_NONBLOCK, IN_CLOEXEC
_EVENT: Final = struct.Struct("=iIII")
_QUEUE_OVERFLOW: Final = 0x4000
_READ_BYTES: Final = 65_536


class FileChanges(Closing):
    """Watches files.

    Attributes:
        fd: A descriptor that can be read once a file was changed.

    Raises:
        OSError: The machine has no descriptor or no inotify instance left for us.
    """

    def __init__(self) -> None:
        self.fd = libc.call("inotify_init1", _FLAGS)

    def watch(self, fd: int) -> int:
        """Watch an open file, whatever becomes of its names; returns a number that stands for it.

        Raises:
            OSError: As many files are watched as this user may, or the filesystem does not take it.
        """
        path = f"/proc/self/fd/{fd}"
        return libc.call("inotify_add_watch", self.fd, os.fsencode(path), _MODIFY, path=path)

    def forget(self, number: int) -> None:
        """Watch a file no more.

        Raises:
            OSError: It is not watched.
        """
        libc.call("inotify_rm_watch", self.fd, number)

    def read(self) -> tuple[set[int], bool]:
        """Numbers of the files that were changed since the last time, and whether there may be others."""
        changed = set[int]()
        has_lost = False
        while data := self._read():
            at = 0
            while at < len(data):
                number, mask, _, n_bytes = _EVENT.unpack_from(data, at)
                at += _EVENT.size + n_bytes
                has_lost |= bool(mask & _QUEUE_OVERFLOW)
                if mask & _MODIFY:
                    changed.add(number)
        return changed, has_lost

    def _read(self) -> bytes:
        try:
            return os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Let go of all; safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
