"""Probes by perf events that are no longer wanted: a process of its own removes them, and lets others attach meanwhile.

For each of them the kernel waits until no processor can be in its handler (perf_trace_event_unreg,
kernel/trace/trace_event_perf.c: 0.1 s here), one after another, and holds a lock that each new one needs too. So a
tracer that ends cannot wait for all, and one that starts then would get its probes as slowly as the others go: the
remover holds a lock of ours around each removal, and the process that attaches takes that lock for all of a file's.

The lock is advisory, and of a file that every user may open: both wait for it for a bounded time and then go on, the
remover without asking again, so that nobody can keep probes in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from typing import Final

from ingero.agent.capture.kernel.perf import UPROBE_TYPE

_PATIENCE_S: Final = 1.0
"""Of one who attaches: the remover holds the lock for one removal at a time."""
_REMOVER_PATIENCE_S: Final = 30.0
"""Far more than attaching to all files of a node takes."""
_POLL_S: Final = 0.002
_PAUSE_S: Final = 0.02
"""Between removals, so that one who polls gets its turn."""
_REMOVE: Final = f"""
import fcntl, os, sys, time
if os.fork():
    os._exit(0)
os.read(0, 1)
lock, patience_s = os.open(sys.argv[1], os.O_RDONLY), float(sys.argv[2])
for fd in map(int, sys.argv[3:]):
    until = time.monotonic() + patience_s
    while patience_s:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= until:
                patience_s = 0.0
            time.sleep({_PAUSE_S})
        else:
            break
    os.close(fd)
    fcntl.flock(lock, fcntl.LOCK_UN)
    time.sleep({_PAUSE_S})
"""


def leave_links(links: list[int], patience_s: float = _REMOVER_PATIENCE_S) -> None:
    """Have a process of its own remove probes, and do not wait for it.

    Args:
        links: Descriptors; the list is empty afterwards.
        patience_s: How long it waits for those who attach, in seconds; then it asks nobody any more.
    """
    if not links:
        return
    read_fd, release = os.pipe()
    for fd in links:
        os.set_inheritable(fd, True)  # noqa: FBT003 - the standard library's
    arguments = (str(UPROBE_TYPE), str(patience_s), *map(str, links))
    starter = os.posix_spawn(
        sys.executable,
        # The one that waits is a child of the first, which ends: nobody here has to reap it.
        (sys.executable, "-I", "-S", "-c", _REMOVE, *arguments),
        {},
        file_actions=(
            (os.POSIX_SPAWN_DUP2, read_fd, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ),
        setsid=True,
    )
    os.close(read_fd)
    os.waitpid(starter, 0)
    for fd in links:  # the other process holds them, so this is quick
        os.close(fd)
    links.clear()
    os.close(release)


@contextlib.contextmanager
def hold_removals() -> Iterator[None]:
    """While the context lasts, removers of this machine wait, each for half a minute at most.

    Nothing is raised where there is no such lock or somebody else keeps it: attaching is then slower.
    """
    try:
        lock = os.open(UPROBE_TYPE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        until_s = time.monotonic() + _PATIENCE_S
        while not _take(lock) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(lock)


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
