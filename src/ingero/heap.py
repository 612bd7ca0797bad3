"""Memory that the C library keeps after it was freed."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give back to the machine what is free in the heap, as after a start that needed more than what follows it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
    if trim is not None:
        trim(0)
