"""Whether a rank of a real job has come to where all ranks meet: it has loaded its libraries then.

Source: Linux, Documentation/networking/proc_net_tcp.rst; the states, include/net/tcp_states.h.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_ESTABLISHED: Final = "01"
_LOCAL, _REMOTE, _STATE = 1, 2, 3


def has_met(pid: int, port: int, proc: Path = _PROC) -> bool:
    """Whether the host of a process has a connection to or from this port.

    Args:
        pid: The process.
        port: Of the store at which ranks meet, `MASTER_PORT`.
        proc: Where the kernel shows processes.

    Returns:
        False of a process that has ended, too.
    """
    end = f":{port:04X}"
    for name in ("tcp", "tcp6"):
        try:
            lines = (proc / str(pid) / "net" / name).read_text().splitlines()
        except OSError:
            continue
        for line in lines[1:]:
            fields = line.split()
            if fields[_STATE] == _ESTABLISHED and (
                fields[_LOCAL].endswith(end) or fields[_REMOTE].endswith(end)
            ):
                return True
    return False
