"""What a file lies on, as far as it matters to which file it is."""

from __future__ import annotations

import ctypes
from typing import Final

from ingero.agent.capture.kernel import libc

_OVERLAYFS: Final = 0x794C_7630  # OVERLAYFS_SUPER_MAGIC, include/uapi/linux/magic.h
_BYTES: Final = 256  # more than struct statfs has on any machine


def is_overlay(fd: int) -> bool:
    """Whether an open file is seen through overlayfs, as in most containers.

    Raises:
        OSError: The kernel does not say.
    """
    status = ctypes.create_string_buffer(_BYTES)
    libc.call("fstatfs", fd, status)
    return int.from_bytes(status.raw[:8], "little") == _OVERLAYFS  # f_type comes first
