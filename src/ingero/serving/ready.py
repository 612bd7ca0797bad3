"""How a program tells its supervisor that it is ready, and where it listens.

One JSON line goes to an inherited descriptor, which `INGERO_READY_FD` names as s6's ``notification-fd`` does:
``{"program": "ingero-fleet", "pid": 17, "listens": {"receivers.otlp http": "127.0.0.1:4318", …}}``. A Fleet that has
reloaded its configuration writes another.

systemd gets ``READY=1`` where it asks for that (``Type=notify``), so that a unit is started once its program serves.
Source: sd_notify(3).
"""

from __future__ import annotations

import functools
import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from ingero.config.environment import READY_FD, take_notify_socket, take_ready_fd
from ingero.errors import ConfigError


def report_ready(program: str, addresses: Mapping[str, object]) -> None:
    """Write the line, and tell systemd, where they asked for it; a reader that has gone is no error.

    Args:
        program: Such as ``ingero-fleet``.
        addresses: ``host:port`` by what listens there.

    Raises:
        ConfigError: The environment names no descriptor of this process.
    """
    descriptor = _find_descriptor()
    if descriptor is not None:
        listens = {name: str(address) for name, address in addresses.items()}
        line = json.dumps({"program": program, "pid": os.getpid(), "listens": listens}) + "\n"
        with suppress(OSError):
            os.write(descriptor, line.encode())
    path = _find_notify_socket()
    if path is not None:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(b"READY=1", path)


@functools.cache
def _find_notify_socket() -> bytes | None:
    """A path, or a name in the abstract namespace, which is written with ``@`` in the place of the null byte."""
    text = take_notify_socket()
    return None if not text else os.fsencode(f"\0{text[1:]}" if text.startswith("@") else text)


@functools.cache
def _find_descriptor() -> int | None:
    text = take_ready_fd()
    if text is None:
        return None
    try:
        os.set_inheritable(int(text), False)  # noqa: FBT003 - what is inheritable
        return int(text)
    except (ValueError, OverflowError, OSError) as error:
        raise ConfigError(f"{READY_FD}={text} is not an open descriptor") from error
