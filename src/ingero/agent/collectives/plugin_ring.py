"""Reads what the plug-in for NCCL tells: docs/specs/nccl-ring.md, ncclprof/ring.h.

The file belongs to the traced process, so it is read and never mapped or written: one that is cut short gives nothing,
where a mapping would give SIGBUS. The writer never waits; what it overwrote before it was read is counted here.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ingero.agent.capture.discover.processes import iter_maps, read_status
from ingero.agent.capture.kernel.regular_files import open_folder_inside, open_regular
from ingero.closing import Closing
from ingero.model.arrays import BoolArray, Records

HEADER: Final = np.dtype([
    ("magic", "<u8"),
    ("version", "<u4"),
    ("n_records", "<u4"),
    ("record_bytes", "<u4"),
    ("n_comms", "<u4"),
    ("pid", "<u4"),
    ("api", "<u4"),
    ("began_ns", "<u8"),
    ("head", "<u8"),
    ("n_crowded", "<u8"),
    ("n_unended", "<u8"),
    ("n_untimed", "<u8"),
    ("n_stray", "<u8"),
    ("n_unplaced", "<u8"),
    ("reserved", "<u8", (5,)),
])
PLACE: Final = np.dtype([
    ("comm", "<u8"),
    ("entered", "<u8"),
    ("left", "<u8"),
    ("entry_ns", "<u8"),
    ("rank", "<i4"),
    ("n_ranks", "<i4"),
    ("op", "<u4"),
    ("is_live", "<u4"),
    ("reserved", "<u8", (2,)),
])
"""Where a process is on one communicator: ``struct place``."""
RECORD: Final = np.dtype([
    ("stamp", "<u8"),
    ("comm", "<u8"),
    ("seq", "<u8"),
    ("n_bytes", "<u8"),
    ("host_start_ns", "<u8"),
    ("host_stop_ns", "<u8"),
    ("host_seen_ns", "<u8"),
    ("gpu_start_ns", "<u8"),
    ("gpu_stop_ns", "<u8"),
    ("rank", "<i4"),
    ("n_ranks", "<i4"),
    ("op", "<u4"),
    ("n_channels", "<u4"),
])
"""A collective that ended: ``struct record``. Host times are of CLOCK_MONOTONIC, device times of its global timer."""

MAGIC: Final = 0x314C_4343_4E47_4E49
VERSION: Final = 1
_NUMBERS: Final = ("head", "n_crowded", "n_unended", "n_untimed", "n_unplaced")
MAX_COUNT: Final = 1 << 40
"""Of collectives of one process: a hundred thousand a second for four months."""
MAX_RECORDS: Final = 1 << 16
MAX_COMMS: Final = 1 << 12
MAX_RINGS: Final = 16
"""Of one process: a plug-in makes one, and a process may load a few."""
MAX_FILES: Final = 4096
"""That are looked through in a folder; a plug-in removes what is left of dead processes among as many."""
FOLDER: Final = "ingero-nccl-"
SUFFIX: Final = ".ring"
_PROC: Final = Path("/proc")


@dataclass(slots=True)
class RingCounts:
    """What was lost, since the ring was opened or made.

    Attributes:
        n_overwritten: Collectives that the writer wrote over before they were read.
        n_broken: Whose writer was ended before it had written them; one more where the header says what cannot be true,
            and nothing is read.
        n_crowded: That the plug-in could not follow.
        n_unended: Whose end NCCL did not tell.
        n_untimed: Whose times NCCL did not tell.
        n_unplaced: Communicators that are not in the table, which was full; their collectives are timed all the same.
    """

    n_overwritten: int = 0
    n_broken: int = 0
    n_crowded: int = 0
    n_unended: int = 0
    n_untimed: int = 0
    n_unplaced: int = 0

    @property
    def n_lost(self) -> int:
        """All collectives of these."""
        return self.n_overwritten + self.n_broken + self.n_crowded + self.n_unended + self.n_untimed


class NcclRing(Closing):
    """One process's ring.

    Args:
        fd: The file; it belongs to the ring from now on.
        header: Its beginning, one row of HEADER.
        since_ns: What a ring that was made later has lost by now is counted, on the monotonic clock. What an older one
            had written over by now is not lost: nobody was to read it. None counts neither.

    Attributes:
        counts: What was lost.
        api: Version of NCCL's interface that the process uses.
        inode: Number of the file.
    """

    def __init__(self, fd: int, header: np.void, since_ns: int | None = None) -> None:
        self.counts = RingCounts()
        self.api = int(header["api"])
        self.inode = os.fstat(fd).st_ino
        self._fd = fd
        self._n_records = int(header["n_records"])
        self._n_comms = int(header["n_comms"])
        self._records_at = HEADER.itemsize + self._n_comms * PLACE.itemsize
        # What is there already is read too.
        is_history_ours = since_ns is not None and int(header["began_ns"]) >= since_ns
        self._at = 0 if is_history_ours else max(int(header["head"]) - self._n_records, 0)
        self._stuck_at = -1
        self._is_senseless = False

    def read(self) -> Records:
        """Records since the last time, in the order in which the collectives ended; shape (n,) of RECORD."""
        head = self._read_head()
        if head is None or head <= self._at:
            return np.zeros(0, RECORD)
        oldest = max(head - self._n_records, 0)
        self._skip_to(oldest)
        stamps = self._read_slots(self._at, head)["stamp"]
        records = self._read_slots(self._at, head)
        after = self._read_head()
        if after is None or len(records) != head - self._at:
            return np.zeros(0, RECORD)
        # A slot that was stamped before the second read was whole then, unless its writer has come round since.
        wanted = np.arange(self._at + 1, head + 1, dtype=np.uint64)
        is_whole = stamps == wanted
        n_over = min(max(after - self._n_records - self._at, 0), len(records))
        records, is_whole = records[n_over:], is_whole[n_over:]
        self._skip_to(self._at + n_over)
        return self._take_whole(records, is_whole)

    def _take_whole(self, records: Records, is_whole: BoolArray) -> Records:
        """Records up to the first that is still being written; one that was so the last time too is given up."""
        if is_whole.all():
            self._at += len(records)
            return records
        first = int(np.argmin(is_whole))
        if self._at + first == self._stuck_at:
            self.counts.n_broken += 1
            taken = records[:first]
            self._at += first + 1
            rest = self._take_whole(records[first + 1 :], is_whole[first + 1 :])
            return np.concatenate([taken, rest])
        self._stuck_at = self._at + first
        self._at += first
        return records[:first]

    def _skip_to(self, position: int) -> None:
        if position > self._at:
            self.counts.n_overwritten += position - self._at
            self._at = position

    def count(self) -> int:
        """Collectives that ended since the ring was made; brings `counts` up to date."""
        return self._read_head() or 0

    def read_communicators(self) -> Records:
        """Where the process is on each communicator it has, shape (n,) of PLACE."""
        positions = self._read_at(HEADER.itemsize, self._n_comms, PLACE)
        live: Records = positions[positions["is_live"] != 0]
        return live

    def is_over(self) -> bool:
        """Whether its process removed it and all of it was read."""
        if os.fstat(self._fd).st_nlink:
            return False
        head = self._read_head()
        return head is None or head <= self._at

    def _read_head(self) -> int | None:
        """Records begun so far; None where the header is cut off or says what cannot be true."""
        rows = self._read_at(0, 1, HEADER)
        if not len(rows):
            return None
        if any(int(rows[name][0]) > MAX_COUNT for name in _NUMBERS):
            self.counts.n_broken += not self._is_senseless
            self._is_senseless = True
            return None
        self.counts.n_crowded = int(rows["n_crowded"][0])
        self.counts.n_unended = int(rows["n_unended"][0])
        self.counts.n_untimed = int(rows["n_untimed"][0])
        self.counts.n_unplaced = int(rows["n_unplaced"][0])
        return int(rows["head"][0])

    def _read_slots(self, first: int, end: int) -> Records:
        """Slots of positions ``first`` to ``end``, which may go round."""
        at, n = first % self._n_records, end - first
        n_before_end = min(n, self._n_records - at)
        parts = [self._read_at(self._records_at + at * RECORD.itemsize, n_before_end, RECORD)]
        if n > n_before_end:
            parts.append(self._read_at(self._records_at, n - n_before_end, RECORD))
        return np.concatenate(parts)

    def _read_at(self, offset: int, n: int, dtype: np.dtype[Any]) -> Records:
        data = os.pread(self._fd, n * dtype.itemsize, offset)
        return np.frombuffer(data[: len(data) - len(data) % dtype.itemsize], dtype)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def find_ring(path: Path, owner: int, since_ns: int | None = None) -> NcclRing | None:
    """Open a ring whose process lives.

    Args:
        path: The file.
        owner: Who must own it: otherwise one user could speak for another's process.
        since_ns: As of `NcclRing`.

    Returns:
        None when it is no such file, is another's, or its process is gone.
    """
    try:
        fd = open_regular(path, follows_link=False)
    except OSError:
        return None
    header = _read_header(fd, owner)
    if header is None or _is_dead(fd):
        os.close(fd)
        return None
    return NcclRing(fd, header, since_ns)


def _read_header(fd: int, owner: int) -> np.void | None:
    if os.fstat(fd).st_uid != owner:
        return None
    data = os.pread(fd, HEADER.itemsize, 0)
    if len(data) < HEADER.itemsize:
        return None
    header = np.frombuffer(data, HEADER)[0]
    is_ours = (
        header["magic"] == MAGIC
        and header["version"] == VERSION
        and header["record_bytes"] == RECORD.itemsize
        and 0 < header["n_records"] <= MAX_RECORDS
        and header["n_comms"] <= MAX_COMMS
        and all(header[name] <= MAX_COUNT for name in _NUMBERS)
    )
    return header if is_ours else None


def _is_dead(fd: int) -> bool:
    """Whether nobody holds the writer's lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def find_rings_of(
    pid: int,
    parent: Path,
    known: frozenset[str] = frozenset(),
    since_ns: int | None = None,
) -> dict[str, NcclRing]:
    """Rings of a process, in its own view of the files, which in a container is not ours.

    Args:
        pid: As we see it.
        parent: Where the plug-in puts them, as the process sees it.
        known: Names of files that need not be looked at.
        since_ns: As of `NcclRing`.

    Returns:
        By file name, those that it has mapped, with the known ones at most `MAX_RINGS`; empty when it has none, is
        gone, or may not be looked at.
    """
    folder = _PROC / str(pid)
    try:
        fields = read_status(folder)
    except OSError:
        return {}
    own_pid = fields.get("NSpid", str(pid)).split()[-1]
    owner = int(fields["Uid"].split()[1])
    try:
        # Others may fill the parent: nothing but the folder of the process's user is looked into.
        name = str(parent / f"{FOLDER}{_read_own_uid(folder, owner)}")
        folder_fd = open_folder_inside(folder / "root", name)
    except OSError:  # there is none, or the process ended meanwhile
        return {}
    try:
        with os.scandir(folder_fd) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, MAX_FILES))
        new = [
            Path(f"/proc/self/fd/{folder_fd}", name)
            for name in names
            if name.startswith(f"{own_pid}-") and name.endswith(SUFFIX) and name not in known
        ]
        return _open_mapped_rings(pid, new, owner, MAX_RINGS - len(known), since_ns)
    except OSError:
        return {}
    finally:
        os.close(folder_fd)


def _open_mapped_rings(
    pid: int, new: Sequence[Path], owner: int, most: int, since_ns: int | None
) -> dict[str, NcclRing]:
    """Those of these files that a process has mapped and that are rings, by file name."""
    if not new:
        return {}
    # Containers may share the folder, and in each of them the first process has the number 1.
    mapped = {(Path(path).name, int(inode)) for *_, inode, path in iter_maps(pid) if path}
    mapped_names = {name for name, _ in mapped}
    rings: dict[str, NcclRing] = {}
    for path in new:
        if path.name not in mapped_names or len(rings) >= most:
            continue
        ring = find_ring(path, owner, since_ns)
        if ring is not None and (path.name, ring.inode) in mapped:
            rings[path.name] = ring
        elif ring is not None:
            ring.close()
    return rings


def _read_own_uid(folder: Path, uid: int) -> int:
    """What a user is called in the user namespace of a process, user_namespaces(7).

    Args:
        folder: The process's folder in ``/proc``.
        uid: The user as we see it.

    Raises:
        OSError: It is nobody there, or the process has ended.
    """
    for line in (folder / "uid_map").read_text(encoding="ascii").splitlines():
        inside, outside, n_uids = map(int, line.split())
        if outside <= uid < outside + n_uids:
            return inside + uid - outside
    raise ProcessLookupError(errno.ESRCH, f"user {uid} is not known in the namespace")
