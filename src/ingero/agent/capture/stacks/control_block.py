"""A thread's control block, which ``pthread_self()`` points at.

Where it lies from the thread pointer, and how to know one.

x86-64: the FS segment's base points at the block, which points at itself: glibc's ``tcbhead_t`` at 16, musl's ``struct
pthread`` at 0. arm64: TPIDR_EL0 points behind ``struct pthread``, whose size is the C library's: 1 856 bytes in glibc
2.36 and 1 824 in 2.41 (``_thread_db_sizeof_pthread``), 200 in musl 1.2. glibc's has the thread's id at 208 in both
(``_thread_db_pthread_tid``), musl's points at itself at 0.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

from ingero.agent.capture.discover.processes import read_status
from ingero.agent.capture.stacks.memory import RemoteMemory

IS_ARM: Final = platform.machine() == "aarch64"
MAX_BLOCK_BYTES: Final = 4096
"""Of ``struct pthread`` on arm64; blocks of two threads are further apart, since each lies at the end of a stack."""
_TID_OFFSET: Final = 208


def is_own_block(block: int, pointer: int, *, is_arm: bool = IS_ARM) -> bool:
    """Whether a ``pthread_self()`` is of the thread with this thread pointer."""
    if is_arm:
        return 0 < block <= pointer <= block + MAX_BLOCK_BYTES
    return block == pointer != 0


def is_control_block(memory: RemoteMemory, block: int, *, is_arm: bool = IS_ARM) -> bool:
    """Whether a thread's control block begins at an address, as far as that can be seen."""
    if memory.word(block) == block:
        return True
    if is_arm:
        return memory.word(block + _TID_OFFSET) & 0xFFFF_FFFF in _read_tids(memory.pid)
    return memory.word(block + 16) == block


def _read_tids(pid: int) -> frozenset[int]:
    """The threads of a process, by their numbers in its own pid namespace."""
    tids = set[int]()
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        try:
            tids.add(int(read_status(folder).get("NSpid", folder.name).split()[-1]))
        except OSError:  # it ended meanwhile
            continue
    return frozenset(tids)
