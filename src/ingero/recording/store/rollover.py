"""Files of recordings: made for their owner alone, and set aside when they are large.

The name of a file set aside is that of the existing generation: ``<stem>.<UTC yyyymmddThhmmss.nnnnnnnnnZ>-<8 hex>.db``.
"""

from __future__ import annotations

import glob
import os
import re
import secrets
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_SIDE_FILES: Final = ("-wal", "-shm")
_ASIDE: Final = re.compile(r"\.\d{8}T\d{6}(\.\d{9})?Z-[0-9a-f]{8}\.db")


def create_private(path: Path, owner: tuple[int, int] | None = None) -> None:
    """Make an empty file that only its owner reads, unless it is there.

    SQLite gives its side files the same mode and, as root, the same owner, so the owner must be right before it opens
    the file.

    Args:
        path: The file.
        owner: User and group of a new file; None leaves the process's own.
    """
    if not path.exists():
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if owner is not None:
            os.fchown(fd, *owner)
        os.close(fd)


def size_of(path: Path) -> int:
    """Bytes of a recording and its side files."""
    return sum(file.stat().st_size for file in _list_files(path) if file.exists())


def delete_recording(path: Path) -> None:
    """Delete a recording that nobody has open, and its side files; what cannot be deleted stays."""
    for file in _list_files(path):
        with suppress(OSError):  # such as a folder that nobody may write to
            file.unlink(missing_ok=True)


def _list_files(path: Path) -> list[Path]:
    return [path, *(path.with_name(path.name + end) for end in _SIDE_FILES)]


def list_aside(path: Path) -> list[Path]:
    """Files set aside from a recording, oldest first."""
    found = path.parent.glob(f"{glob.escape(path.stem)}.*.db")
    return sorted(file for file in found if _ASIDE.fullmatch(file.name[len(path.stem) :]))


def set_aside(path: Path, keep: int) -> Path:
    """Rename a closed recording, begin an empty one of the same owner, and delete what is too many.

    Returns:
        The file set aside.
    """
    owner = path.stat()
    now_ns = owner.st_mtime_ns
    stamp = f"{datetime.fromtimestamp(now_ns // 10**9, UTC):%Y%m%dT%H%M%S}.{now_ns % 10**9:09d}Z"
    aside = path.with_name(f"{path.stem}.{stamp}-{secrets.token_hex(4)}.db")
    path.rename(aside)
    create_private(path, (owner.st_uid, owner.st_gid) if os.geteuid() == 0 else None)
    files = list_aside(path)
    for old in files[: max(len(files) - keep, 0)]:
        old.unlink(missing_ok=True)
    return aside
