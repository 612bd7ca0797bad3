"""Calls a GPU library from Python functions within functions, for the frames that a tracer finds."""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Final

_PAUSE_S: Final = 4.0  # stacks are read while the process is there
_LIBRARY = ctypes.CDLL(sys.argv[1])


def inner() -> None:
    """The call."""
    _LIBRARY.cudaStreamSynchronize(None)


def middle() -> None:
    """Between."""
    inner()


def outer(n_calls: int) -> None:
    """So many calls."""
    for _ in range(n_calls):
        middle()


if __name__ == "__main__":
    outer(1)
    sys.stdin.readline()  # the tracer learns meanwhile which Python this is
    outer(int(sys.argv[2]))
    time.sleep(_PAUSE_S)
