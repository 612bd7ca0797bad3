"""Ports for programs that must be given a number before they listen, such as the store of PyTorch and Slurm's daemons.

Source: Linux, Documentation/networking/ip-sysctl.rst, `ip_local_port_range`.
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from ingero.errors import IngeroError

_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST: Final = 10_000
_MIN_CHOICE: Final = 1000
_MAX_PORT: Final = 65_535


def find_free_ports(count: int, limits: Path = _RANGE) -> list[int]:
    """Ports of 127.0.0.1 that nobody has, and that the kernel gives to nobody who asks for any port.

    A port of the kernel's own range can be given to another program's connection before its user listens, which may
    take seconds.

    Args:
        count: How many, all different.
        limits: The file with the first and the last port that the kernel gives out; any free port will do without it.

    Raises:
        IngeroError: There are not so many free ones.
    """
    ports = _list_ports(limits)
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(ports, len(ports)):
            if len(found) == count:
                break
            taken = stack.enter_context(socket.socket())
            try:
                taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    if len(found) < count:
        raise IngeroError(f"only {len(found)} of {count} ports of 127.0.0.1 are free")
    return found


def _list_ports(limits: Path) -> range:
    """Ports outside of the kernel's range, where there is room and the range is shown."""
    every = range(_FIRST, _MAX_PORT + 1)
    try:
        first, last = map(int, limits.read_text(encoding="ascii").split())
    except OSError:
        return every
    outside = max(range(_FIRST, first), range(last + 1, _MAX_PORT + 1), key=len)
    return outside if len(outside) >= _MIN_CHOICE else every
