"""The C library of this process, for what Python's standard library does not offer. Opened once."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any, path: str | None = None) -> int:  # noqa: ANN401 - whatever C takes
    """Call a function that returns -1 and sets ``errno`` where it fails.

    Args:
        name: The function.
        arguments: Its arguments; a Python integer goes as ``int``.
        path: Of which file an error tells.

    Returns:
        What it returned, as ``long``.

    Raises:
        OSError: It returned less than 0.
    """
    function = getattr(_LIBC, name)
    function.restype = ctypes.c_long if name == "syscall" else ctypes.c_int
    result = int(function(*arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return result
