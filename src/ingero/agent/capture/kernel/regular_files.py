"""Regular files whose names other people chose, opened so that no name makes us wait or leads us elsewhere.

A process's file is opened by openat2() inside of its own root directory (openat2(2), Linux 5.6; probes need 5.15). A
path below ``/proc/PID/root`` would not do: a symbolic link on it that begins with ``/`` leads to a file of ours.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path
from typing import Final

from ingero.agent.capture.kernel import libc

_OPENAT2: Final = 437  # on every processor
_NO_MAGIC_LINKS: Final = 0x02  # RESOLVE_NO_MAGICLINKS: include/uapi/linux/openat2.h
_IN_ROOT: Final = 0x10  # RESOLVE_IN_ROOT


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def open_regular(path: Path | str, *, follows_link: bool = True) -> int:
    """Open a regular file for reading; returns a descriptor.

    Args:
        path: Its name.
        follows_link: Whether the last part of the name may be a symbolic link.

    Raises:
        OSError: There is none, it may not be read, or somebody has a lease on it.
    """
    no_link = 0 if follows_link else os.O_NOFOLLOW
    return _open_found(os.open(path, os.O_PATH | os.O_CLOEXEC | no_link))


def open_inside(root: Path | str, path: str) -> int:
    """Open a regular file for reading by its name inside of another root directory; returns a descriptor.

    Args:
        root: The directory, as we see it: ``/proc/7/root``.
        path: The file's name in there. Links are followed as a process sees them whose root this is.

    Raises:
        OSError: As `open_regular`; ENOSYS where the kernel does not know openat2().
    """
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _open_found(_openat2(root_fd, path))
    finally:
        os.close(root_fd)


def open_folder_inside(root: Path | str, path: str) -> int:
    """Open a directory by its name inside of another root directory, to list it or to open what is in it.

    Args:
        root: As of `open_inside`.
        path: The directory's name in there; links are followed as by `open_inside`.

    Raises:
        OSError: There is none, or it may not be read; ENOSYS as of `open_inside`.
    """
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _openat2(root_fd, path, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(root_fd)


def _openat2(root_fd: int, path: str, flags: int = os.O_PATH) -> int:
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _IN_ROOT | _NO_MAGIC_LINKS)
    size = ctypes.c_size_t(ctypes.sizeof(how))
    return libc.call(
        "syscall", _OPENAT2, root_fd, os.fsencode(path), ctypes.byref(how), size, path=path
    )


def _open_found(path_fd: int) -> int:
    """Open what was only looked at so far: to open a pipe could wait, and to open a device do something."""
    try:
        if not stat.S_ISREG(os.fstat(path_fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        # Without waiting for a lease: fcntl(2), F_SETLEASE.
        return os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(path_fd)


def read_whole(fd: int, max_bytes: int) -> bytes:
    """What an open file holds, as far as its size says: a file of ``/proc`` has none, and reading it could wait.

    Raises:
        OSError: It has more than ``max_bytes``, or cannot be read.
    """
    n_bytes = os.fstat(fd).st_size
    if n_bytes > max_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return os.pread(fd, n_bytes, 0)


def read_inside(root: Path | str, path: str, max_bytes: int) -> bytes:
    """What a regular file holds; ``root`` and ``path`` are those of `open_inside`.

    Raises:
        OSError: As `open_inside` and `read_whole`.
    """
    fd = open_inside(root, path)
    try:
        return read_whole(fd, max_bytes)
    finally:
        os.close(fd)
