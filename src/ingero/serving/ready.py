"""How a program tells its supervisor that it is ready, and where it listens: one JSON line on an inherited descriptor.

`INGERO_READY_FD` names the descriptor, as s6's ``notification-fd`` or systemd's ``NOTIFY_SOCKET`` name theirs. The
line is ``{"program": "ingero-fleet", "pid": 17, "listens": {"receivers.otlp http": "127.0.0.1:4318", …}}``. A Fleet
that has reloaded its configuration writes another.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from contextlib import suppress

from ingero.config.environment import READY_FD, take_ready_fd
from ingero.errors import ConfigError


def report_ready(program: str, addresses: Mapping[str, object]) -> None:
    """Write the line where somebody asked for it; a reader that has gone is no error.

    Args:
        program: Such as ``ingero-fleet``.
        addresses: ``host:port`` by what listens there.

    Raises:
        ConfigError: The environment names no descriptor of this process.
    """
    descriptor = _find_descriptor()
    if descriptor is None:
        return
    listens = {name: str(address) for name, address in addresses.items()}
    line = json.dumps({"program": program, "pid": os.getpid(), "listens": listens}) + "\n"
    with suppress(OSError):
        os.write(descriptor, line.encode())


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
