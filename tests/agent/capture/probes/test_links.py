"""What becomes of probes when nobody waits for their removal."""

import contextlib
import fcntl
import os
from pathlib import Path

import pytest

from ingero.agent.capture.kernel.perf import UPROBE_TYPE
from ingero.agent.capture.probes.leaving import hold_removals, leave_links
from ingero.testing.waiting import wait_until

needs_uprobes = pytest.mark.skipif(
    not UPROBE_TYPE.exists(), reason="this kernel has no perf events for user-space probes"
)


def _read_children() -> str:
    return Path("/proc/thread-self/children").read_text(encoding="ascii")


def leave_pipe(**patience):
    """A pipe whose writing end is left to a remover; its reading end, and what the end was called."""
    reader, *links = os.pipe()
    links.append(os.dup(links[0]))
    held = tuple(links)
    leave_links(links, **patience)
    assert links == []
    return reader, held


def test_links_that_are_left_are_closed_here_at_once_and_in_the_end_everywhere():
    children = _read_children()
    reader, held = leave_pipe()
    assert _read_children() == children  # there is none to reap, now or later
    for fd in held:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert os.read(reader, 1) == b""  # the last holder is gone
    os.close(reader)


def test_without_links_nothing_is_started():
    before = _read_children()
    leave_links([])
    assert _read_children() == before


def find_remover(held):
    """The folder below ``/proc`` of the process that removes these links and has opened the lock."""
    words = [str(UPROBE_TYPE), "30.0", *map(str, held)]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_text().split("\0")[-len(words) - 1 : -1] != words:
                continue
            if any(fd.readlink() == UPROBE_TYPE.resolve() for fd in (folder / "fd").iterdir()):
                return folder
        except OSError:
            continue  # it ended meanwhile
    return None


def count_waits(folder):
    status = (folder / "status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@contextlib.contextmanager
def hold_removals_for_certain():
    """`hold_removals`, at a moment at which no remover of another test has the lock: then it is given up for lost."""
    with UPROBE_TYPE.open("rb") as own:
        fcntl.flock(own, fcntl.LOCK_SH)
        with hold_removals():
            fcntl.flock(own, fcntl.LOCK_UN)
            yield


@needs_uprobes
def test_removals_wait_while_somebody_attaches():
    with hold_removals_for_certain():
        reader, held = leave_pipe()
        remover = wait_until(lambda: find_remover(held))
        before = count_waits(remover)
        wait_until(lambda: count_waits(remover) > before + 3)  # it asks again and again
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)


@needs_uprobes
def test_one_who_keeps_the_lock_keeps_no_probe_in_place():
    with UPROBE_TYPE.open("rb") as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        reader, _ = leave_pipe(patience_s=0.05)
        assert os.read(reader, 1) == b""
    os.close(reader)


@needs_uprobes
def test_one_who_keeps_the_lock_keeps_nobody_from_attaching():
    with UPROBE_TYPE.open("rb") as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        with hold_removals():
            reached = True
    assert reached
