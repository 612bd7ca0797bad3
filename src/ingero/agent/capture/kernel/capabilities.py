"""Capabilities of this process: which it has, and giving up those it will not need.

Numbers and layouts follow include/uapi/linux/capability.h and include/uapi/linux/prctl.h (Linux 6.13); capabilities(7)
describes the rules.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
from collections.abc import Collection
from pathlib import Path
from typing import Final

from ingero.agent.capture.kernel import libc

_STATUS: Final = Path("/proc/self/status")
_VERSION_3: Final = 0x20080522
_SET_PDEATHSIG: Final = 1
_CAPBSET_DROP: Final = 24
_SET_NO_NEW_PRIVS: Final = 38
_LAST: Final = 63


class Capability(enum.IntEnum):
    """Those that tracing has a use for, and the one that stands for all of root."""

    CHOWN = 0
    DAC_OVERRIDE = 1
    DAC_READ_SEARCH = 2
    FOWNER = 3
    KILL = 5
    NET_BIND_SERVICE = 10
    IPC_LOCK = 14
    SYS_PTRACE = 19
    SYS_ADMIN = 21
    PERFMON = 38
    BPF = 39
    CHECKPOINT_RESTORE = 40


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def read_capabilities() -> frozenset[int]:
    """Numbers of the capabilities that are in effect in this thread."""
    mask = _read_mask("CapEff")
    return frozenset(number for number in range(_LAST + 1) if mask >> number & 1)


def drop_capabilities(keep: Collection[Capability]) -> None:
    """Give up every capability but these, permanently: neither this process nor a program it starts can get one back.

    Capabilities belong to threads: call it before any is started. What is not held is not gained.

    Args:
        keep: What stays, in the effective and permitted sets.

    Raises:
        OSError: The kernel refuses.
    """
    kept = sum(1 << number for number in set(keep))
    bounding = _read_mask("CapBnd")
    for number in range(_LAST + 1):
        # Without CAP_SETPCAP the bounding set stays; `no_new_privs` closes that way all the same.
        if bounding & ~kept & 1 << number:
            with contextlib.suppress(OSError):
                _prctl(_CAPBSET_DROP, number)
    held = _read_mask("CapPrm") & kept
    words = (_Sets * 2)(
        *(_Sets(held >> shift & 0xFFFF_FFFF, held >> shift & 0xFFFF_FFFF, 0) for shift in (0, 32))
    )
    header = _Header(_VERSION_3, 0)
    libc.call("capset", ctypes.byref(header), words)
    _prctl(_SET_NO_NEW_PRIVS, 1)


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when the thread that made it ends.

    It survives exec, but neither a change of user nor a setuid program. A parent that was gone before is not noticed.
    """
    _prctl(_SET_PDEATHSIG, signal_number)


def _read_mask(name: str) -> int:
    lines = _STATUS.read_text(encoding="utf-8", errors="replace").splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith(f"{name}:"))


def _prctl(option: int, value: int) -> None:
    libc.call("prctl", option, *map(ctypes.c_ulong, (value, 0, 0, 0)))
