"""Whether the pids of ``/proc`` are those that the kernel's programs tell of, which are the host's.

Source: include/linux/proc_ns.h, PROC_PID_INIT_INO; pid_namespaces(7).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

NAMESPACE: Final = Path("/proc/self/ns/pid")
_HOST_INODE: Final = 0xEFFF_FFFC
FIX: Final = (
    "run the agent in the host's pid namespace: docker run --pid=host, in a pod hostPID: true"
)
"""What helps where they are others."""


@functools.cache
def has_host_pids() -> bool:
    """Whether this process is in the host's pid namespace; True where that cannot be found out."""
    try:
        return NAMESPACE.stat().st_ino == _HOST_INODE
    except OSError:
        return True
