"""Layouts and numbers of ``bpf/include/ingero/record.h``.

The numbers of sources, operations and off-CPU reasons are those of `ingero.model.events`.

Layouts are read from the built object's BTF. Numbers that code names are repeated here as enumerations;
``tests/agent/capture/kernel/test_abi.py`` fails when they drift from the header.
"""

from __future__ import annotations

import enum
import functools
from typing import Any, Final

import numpy as np

from ingero.agent.capture.kernel.btf import Btf, read_btf
from ingero.agent.capture.kernel.objects import find_object


class Flag(enum.IntFlag):
    """Why a call's record looks as it does."""

    NESTED = 1
    ERROR = 2
    GROUPED = 4
    SLOW = 8
    FIRST = 16
    NO_TIME = 32
    LARGE = 64
    EXACT = 128


class Stacks(enum.IntEnum):
    """Which records of calls carry the stack that they were made from."""

    NONE = 0
    ALL = 1
    NOTABLE = 2  # of the slow and the failed; of those in flight user space reads them


class Act(enum.IntEnum):
    """What the engine does at the return of a function."""

    NONE = 0
    OUT = 1
    ALLOC = 2
    FREE = 3
    SET_DEVICE = 4
    COMM_INIT = 5
    COMM_INIT_ALL = 6
    COMM_SPLIT = 7
    COMM_END = 8
    COLLECTIVE = 9
    P2P = 10
    GROUP_START = 11
    GROUP_END = 12
    COMM_RANK = 13
    COMM_COUNT = 14
    OPEN_CONTEXT = 15
    GLOO_GROUP = 16
    GLOO_CONNECT = 17
    GLOO_CLOSE = 18
    GLOO_CAUGHT = 19
    GLOO_NEXT = 20
    SET_CONTEXT = 21
    COPY = 32
    COPY_H2D = 33
    COPY_D2H = 34
    COPY_D2D = 35
    COPY_DEFAULT = 36


class Role(enum.IntEnum):
    """What an argument of a probed function means."""

    SIZE0 = 0
    SIZE1 = 1
    SIZE2 = 2
    HANDLE = 3
    STREAM = 4
    AUX = 5
    OUT = 6
    COMM = 7
    COUNT = 8
    DTYPE = 9
    REDOP = 10
    PEER = 11
    RANK = 12
    NRANKS = 13
    ID = 14
    GRID_X = 15
    GRID_Y = 16
    GRID_Z = 17
    BLOCK_X = 18
    BLOCK_Y = 19
    BLOCK_Z = 20
    COLOR = 21
    TAG = 22


class Selector(enum.IntEnum):
    """Bits that say how to fetch an argument."""

    PLACE = 0x1F
    W32 = 0x20
    HIGH = 0x40
    DEREF = 0x80
    ADDRESS = 0x100
    OFFSET_SHIFT = 9


class StackFlag(enum.IntFlag):
    """How a stack was found, and what is missing from it."""

    PYTHON_CUT = 1
    PYTHON_BROKEN = 2
    NO_PYTHON = 4
    UNWOUND = 8
    COPIED = 16
    NATIVE_CUT = 32
    NO_RULE = 64


class UnwindKind(enum.IntEnum):
    """How to get from a frame to its caller."""

    SP = 1
    BP = 2
    REALIGNED = 3
    SIGNAL = 4
    END = 5
    UNKNOWN = 6
    RECORD = 7


class PythonFrameFlag(enum.IntFlag):
    """How a Python frame lies among the native ones."""

    ENTRY = 1


class ProcessEvent(enum.IntEnum):
    """What happened to a process; the numbers are host operations of the recorded databases."""

    OOM = 4
    EXEC = 5
    EXIT = 6
    FORK = 7


N_ROLES: Final = 24
N_REGISTERS: Final = 8
MAX_DESCRIPTORS: Final = 1024
N_COPY_KINDS: Final = 6
MAX_NATIVE: Final = 127
MAX_PYTHON: Final = 128
RETURN_BIT: Final = 1 << 63
"""In ``struct ig_unwind_key``: the address is one that a call returns to."""
NO_OFFSET: Final = 0xFFFF
"""In ``struct ig_python``: the interpreter has no such field."""


@functools.cache
def get_btf() -> Btf:
    """The BTF of the engine's object, which holds every layout."""
    return read_btf(find_object("calls"))


@functools.cache
def get_dtype(name: str) -> np.dtype[Any]:
    """The dtype of ``struct ig_<name>``."""
    return get_btf().build_dtype(f"ig_{name}")
