"""Load generators beside a rank: processes that use its processor or its disk all the time, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.errors import UnsupportedError
from ingero.sim.runner import get_program

N_SPINNERS: Final = 32
"""Generators of processor load, each of the rank's weight.

A rank that mostly sleeps is soon let in, so that few of them hardly slow it down.
"""
N_READERS: Final = 16
"""Generators that each have a read of one megabyte open at any time; a request of the rank's waits among theirs."""
_DATA: Final = "data"
_PIECE_BYTES: Final = 1 << 20
_N_PIECES: Final = 64
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_MOUNTS: Final = Path("/proc/self/mountinfo")


class LoadGenerators:
    """Processes of the simulator that only cause load."""

    def __init__(self) -> None:
        self._members: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> int:
        """Start one more; its process id."""
        # A session each: some kernels share a processor between sessions, others between processes.
        member = subprocess.Popen(
            [str(get_program().with_name("job")), *arguments],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._members.append(member)
        return member.pid

    def stop(self) -> None:
        """End them all."""
        for member in self._members:
            member.kill()
            member.wait()


class ReservedProcessor:
    """A processor that one rank has to itself until `start_load`. Make one with `reserve_processor`."""

    def __init__(self, number: int, generators: LoadGenerators) -> None:
        self.number = number
        self._generators = generators

    def pin(self, pid: int) -> None:
        """Run a process here and nowhere else."""
        os.sched_setaffinity(pid, {self.number})

    def start_load(self) -> None:
        """Start the load generators on it."""
        for _ in range(N_SPINNERS):
            self.pin(self._generators.start("spin"))


@contextmanager
def reserve_processor() -> Iterator[ReservedProcessor]:
    """Keep one processor free of this process and of all that it starts from now on.

    Raises:
        UnsupportedError: There is no second one for everybody else.
    """
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        raise UnsupportedError(
            "cpu-hog needs two processors: one for the rank and its neighbours, one for everybody else",
            hint="slow-rank:R:1.5x shows a rank that is slow by itself",
        )
    processor = ReservedProcessor(max(allowed), generators := LoadGenerators())
    os.sched_setaffinity(0, allowed - {processor.number})
    try:
        yield processor
    finally:
        generators.stop()
        os.sched_setaffinity(0, allowed)


class ReservedDisk:
    """A disk that one rank has to itself until `start_load`. Make one with `reserve_disk`.

    Attributes:
        path: The rank's data on it.
    """

    def __init__(self, path: Path, generators: LoadGenerators) -> None:
        self.path = path
        self._generators = generators

    def start_load(self) -> None:
        """Start load generators that read the same data past the page cache, over and over."""
        for _ in range(N_READERS):
            self._generators.start("read", str(self.path))


@contextmanager
def reserve_disk(folder: Path) -> Iterator[ReservedDisk]:
    """Put a rank's data on the disk, 64 MiB; the caller removes the folder.

    Raises:
        UnsupportedError: The folder is full.
    """
    path, generators = folder / _DATA, LoadGenerators()
    try:
        with path.open("wb") as file:
            for _ in range(_N_PIECES):
                file.write(os.urandom(_PIECE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UnsupportedError(
            f"io-hog cannot write 64 MiB in {folder}: {error.strerror}",
            hint="set TMPDIR to a folder with room",
        ) from error
    try:
        yield ReservedDisk(path, generators)
    finally:
        generators.stop()


def find_disk_folder(mounts: Path = _MOUNTS) -> Path:
    """A folder for temporary files that lies on a disk and not in memory.

    Source: proc_pid_mountinfo(5): the third field is major:minor of a file's st_dev, the type follows a lone ``-``.

    Raises:
        UnsupportedError: There is none.
    """
    types = {}
    for line in mounts.read_text().splitlines():
        mount, _, filesystem = line.partition(" - ")
        types[mount.split()[2]] = filesystem.split()[0]
    folders = [Path(tempfile.gettempdir()), Path("/var/tmp")]  # noqa: S108 - mkdtemp makes the name
    for folder in folders:
        device = folder.stat().st_dev
        if types.get(f"{os.major(device)}:{os.minor(device)}") not in _IN_MEMORY:
            return folder
    raise UnsupportedError(
        "io-hog needs a disk: temporary files lie in memory here",
        hint="set TMPDIR to a folder on a disk",
    )


@dataclass(frozen=True, slots=True)
class ReservedResources:
    """What is kept free for the ranks that a fault will load; None where no fault needs it.

    Attributes:
        processor: See `reserve_processor`.
        disk: See `reserve_disk`.
    """

    processor: ReservedProcessor | None = None
    disk: ReservedDisk | None = None


@contextmanager
def open_load(kinds: Collection[str], folder: Path) -> Iterator[ReservedResources]:
    """Reserve what faults of these kinds need, and end the load generators with the context.

    Raises:
        UnsupportedError: This machine has no second processor, or no room on its disk.
    """
    with ExitStack() as stack:
        yield ReservedResources(
            stack.enter_context(reserve_processor()) if "cpu-hog" in kinds else None,
            stack.enter_context(reserve_disk(folder)) if "io-hog" in kinds else None,
        )
