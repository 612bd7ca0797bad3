"""Where the annotation socket is, and a folder in which no other user can create a socket."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from ingero.errors import ConfigError
from ingero.wire.annotations import SYSTEM_SOCKET, USER_SOCKET

_PASSABLE: Final = 0o711
"""Every user may pass through, none may list: the socket's own mode limits who may connect."""
_OTHERS_WRITE: Final = 0o022


def choose_socket(home: str) -> Path:
    """Where this agent listens: below ``/run`` where it may write, else in its user's home."""
    if os.access(SYSTEM_SOCKET.parent.parent, os.W_OK) or not home:
        return SYSTEM_SOCKET
    return Path(home) / USER_SOCKET


def prepare_folder(path: Path, gid: int) -> str:
    """Make the socket's folder, or check the one that is there, which is not changed.

    Args:
        path: The socket.
        gid: Group whose members shall reach it; negative for none.

    Returns:
        A warning for the log; empty when all is well.

    Raises:
        ConfigError: Another user could replace the socket, or the folder cannot be made.
    """
    folder = path.parent
    hint = "choose another path with --annotate-socket"
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            folder.chmod(_PASSABLE)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}", hint=hint) from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder} is not a directory, or a link to one", hint=hint)
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
        raise ConfigError(
            f"{folder} belongs to another user or can be written to by others: they could replace the socket",
            hint=hint,
        )
    is_passable = status.st_mode & stat.S_IXOTH or (
        status.st_gid == gid and status.st_mode & stat.S_IXGRP
    )
    if gid >= 0 and not is_passable:
        return f"group {gid} cannot pass {folder} to the annotation socket: chmod o+x {folder}"
    return ""
