"""C++ names as people write them, by the C++ runtime of this machine.

``__cxa_demangle`` is part of the Itanium C++ ABI and so of every ``libstdc++.so.6``. Where there is none names stay as
they are.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

_LIBRARIES: Final = ("libstdc++.so.6", "libc++abi.so.1")
_MAX_CHARS: Final = 4096  # a longer one costs more to read than it tells


@functools.cache
def _load() -> tuple[Any, Any] | None:
    for name in _LIBRARIES:
        try:
            run = ctypes.CDLL(name)["__cxa_demangle"]
        except (OSError, AttributeError):
            continue
        run.restype = ctypes.c_void_p
        run.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        free = ctypes.CDLL(None)["free"]
        free.restype = None
        free.argtypes = (ctypes.c_void_p,)
        return run, free
    return None


@functools.lru_cache(maxsize=65_536)
def demangle(name: str) -> str:
    """A mangled C++ name in words; any other name as it is."""
    calls = _load()
    if calls is None or not name.startswith("_Z") or len(name) > _MAX_CHARS:
        return name
    run, free = calls
    result = run(name.encode(), None, None, None)
    if not result:
        return name
    try:
        return ctypes.string_at(result).decode("utf-8", "replace")
    finally:
        free(result)
