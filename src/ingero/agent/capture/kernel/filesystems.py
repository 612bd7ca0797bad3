"""What a file lies on, as far as it matters to which file it is."""

from __future__ import annotations

import ctypes
import os
from typing import Final

_OVERLAYFS: Final = 0x794C_7630  # OVERLAYFS_SUPER_MAGIC, include/uapi/linux/magic.h
_BYTES: Final = 256  # more than struct statfs has on any machine

_libc = ctypes.CDLL(None, use_errno=True)


def is_overlay(fd: int) -> bool:
    """Whether an open file is seen through overlayfs, as in most containers.

    Raises:
        OSError: The kernel does not say.
    """
    status = ctypes.create_string_buffer(_BYTES)
    if _libc.fstatfs(fd, status) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int.from_bytes(status.raw[:8], "little") == _OVERLAYFS  # f_type comes first
