"""A link whose delay can be turned up: two tap devices, and a process of ours that carries frames between them.

It stands in for ``sch_netem``, which not every kernel has. Frames are carried whole and in order, each way; none is
lost.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from ingero.errors import UnsupportedError
from ingero.sim.launcher import run_child
from ingero.units import NS_PER_MS, NS_PER_S

# Source: linux/if_tun.h and net/if.h: struct ifreq is a name of 16 bytes and a union of 24, here its flags.
_TUNSETIFF: Final = 0x400454CA
_IFF_TAP: Final = 0x0002
_IFF_NO_PI: Final = 0x1000
_IFREQ: Final = struct.Struct("=16sH22x")
_FRAME_BYTES: Final = 1 << 16
_MAX_FRAMES: Final = 10_000
_PROGRAM: Final = "from ingero.sim.cluster.link import main; main()"
_LIMIT_S: Final = 5.0


class EmulatedLink:
    """A link in use. Make one with `open_link`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def delay(self, delay_ms: int) -> None:
        """From now on every frame takes this long, each way."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{delay_ms}\n")
        self._process.stdin.flush()


@contextmanager
def open_link(near: str, far: str) -> Iterator[EmulatedLink]:
    """Make both ends, as network devices of these names, and carry frames until the context ends.

    Raises:
        UnsupportedError: The kernel makes no tap device.
    """
    with ExitStack() as stack:
        with ExitStack() as ours:
            fds = []
            for name in (near, far):
                fds.append(_open_tap(name))
                ours.callback(os.close, fds[-1])
            command = [sys.executable, "-c", _PROGRAM, *map(str, fds)]
            process = stack.enter_context(run_child(command, _LIMIT_S, fds=fds))
        yield EmulatedLink(process)


def _open_tap(name: str) -> int:
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _TUNSETIFF, _IFREQ.pack(name.encode(), _IFF_TAP | _IFF_NO_PI))
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise UnsupportedError(
            f"no tap device {name}: {error.strerror}",
            hint="slow-link needs /dev/net/tun and root",
        ) from error
    return fd


def main() -> None:
    """The process: two tap descriptors as arguments, delays in milliseconds as lines of input; ends with its input."""
    here, there = map(int, sys.argv[1:3])
    other = {here: there, there: here}
    waiting: deque[tuple[int, int, bytes]] = deque()
    delay_ns = 0
    while True:
        timeout_s = max(waiting[0][0] - time.monotonic_ns(), 0) / NS_PER_S if waiting else None
        ready, _, _ = select.select([0, here, there], [], [], timeout_s)
        if 0 in ready:
            line = os.read(0, 4096)
            if not line:
                return
            delay_ns = int(line.split()[-1]) * NS_PER_MS
        due_ns = time.monotonic_ns() + delay_ns
        for fd in ready:
            if fd and len(waiting) < _MAX_FRAMES:
                waiting.extend((due_ns, other[fd], frame) for frame in _read_frames(fd))
        while waiting and waiting[0][0] <= time.monotonic_ns():
            _, fd, frame = waiting.popleft()
            with suppress(OSError):  # the device is not up yet, or full
                os.write(fd, frame)


def _read_frames(fd: int) -> Iterator[bytes]:
    with suppress(OSError):  # nothing more to read
        while True:
            yield os.read(fd, _FRAME_BYTES)
