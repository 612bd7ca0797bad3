"""Processes and the executable files they have mapped.

A file is known by device and inode, so one library reached by two paths is one, and two copies of it are two.
Containers of one image have a file of its lower layer in common, under a device number of each: the kernel probes what
lies beneath, so that is one file too, or every call of the one would be counted with those of the other.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.agent.capture.discover.cgroups import seen_cgroups
from ingero.agent.capture.kernel.filesystems import is_overlay
from ingero.agent.capture.kernel.perf import Mapping
from ingero.agent.capture.kernel.regular_files import open_inside, open_regular
from ingero.closing import Closing

_PROC: Final = Path("/proc")
_SHOWN_FROZEN: Final = frozenset("SD")
_MAX_THREADS: Final = 1024
_MAX_STAT_BYTES: Final = 4096  # 52 numbers and a name of 64 bytes at most


@dataclass(frozen=True, slots=True)
class FileId:
    """A file, whatever it is called.

    Attributes:
        device: Major and minor number; of a file seen through overlayfs what it shares with the same file in other
            mounts: its times, which copies do not have in common to the nanosecond.
        inode: Its number; overlayfs shows that of the file beneath.
    """

    device: tuple[int, int]
    inode: int


@dataclass(frozen=True, slots=True)
class FileState:
    """A file and when it was changed last: what was found in it holds as long as this is the same.

    A number alone would not do: the next file may get the inode of one that was removed.
    """

    file: FileId
    size: int
    changed_ns: int


class OpenFile(Closing):
    """A file that stays the same one from the first look to the last, whatever becomes of its names and mappings.

    Args:
        fd: A descriptor, which is closed with this.

    Attributes:
        fd: The descriptor.
        file: What it is. By stat(): on overlayfs perf and ``/proc`` name different inodes for one file.
        state: The same with its last change.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._status = status = os.fstat(fd)
        device = os.major(status.st_dev), os.minor(status.st_dev)
        if is_overlay(fd):
            device = status.st_mtime_ns, status.st_ctime_ns
        self.file = FileId(device, status.st_ino)
        self.state = FileState(self.file, status.st_size, status.st_ctime_ns)

    @property
    def reach(self) -> str:
        """A path by which the kernel finds it as long as it is open."""
        return f"/proc/self/fd/{self.fd}"

    def is_unchanged(self) -> bool:
        """Whether it still holds what it held when it was opened; one of its names may be gone or new.

        A name that comes or goes changes the ctime too, and that alone is no write: inode(7).
        """
        then, now = self._status, os.fstat(self.fd)
        if (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
            return False
        return now.st_ctime_ns == then.st_ctime_ns or now.st_nlink != then.st_nlink

    def close(self) -> None:
        """Let go of it; safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_file(path: Path | str) -> OpenFile:
    """Open a regular file for reading.

    Raises:
        OSError: There is none, or it may not be read.
    """
    return OpenFile(open_regular(path))


def open_mapped(mapping: Mapping) -> OpenFile:
    """Open a mapped file by the first way that works.

    Through ``/proc/PID/map_files``, which works across mount namespaces and for deleted files: by the addresses of the
    mapping, then by those that the file has by now, because the loader maps a whole file first and its segments over
    it. Then through the process's root, then by the plain name, which may still serve when the process is gone; another
    file may have the name by then.

    Raises:
        OSError: None of them works; ESTALE where another file has the name, else the first reason that is not about
            these addresses.
    """
    folder = _PROC / str(mapping.pid)
    reasons: list[OSError] = []
    for way in _iter_ways(mapping, folder):
        try:
            return OpenFile(way())
        except OSError as error:
            reasons.append(error)
    if has_ended(mapping.pid):
        raise ProcessLookupError(errno.ESRCH, "the process ended before it could be looked at")
    if stale := next((r for r in reasons if r.errno == errno.ESTALE), None):
        raise stale
    raise next((r for r in reasons if not isinstance(r, FileNotFoundError)), reasons[0])


def _iter_ways(mapping: Mapping, folder: Path) -> Iterator[Callable[[], int]]:
    """Ways to open a mapped file, the surest first."""
    yield functools.partial(open_regular, f"{folder}/map_files/{mapping.start:x}-{mapping.end:x}")
    others = (
        one for one in iter_mappings(mapping.pid, is_executable=False) if one.path == mapping.path
    )
    # The number is a hint only: perf and /proc may name different ones on overlayfs.
    for other in sorted(others, key=lambda one: one.inode != mapping.inode):
        yield functools.partial(open_regular, f"{folder}/map_files/{other.start:x}-{other.end:x}")
    for way in (
        functools.partial(open_inside, f"{folder}/root", mapping.path),
        functools.partial(open_regular, mapping.path),
    ):
        yield functools.partial(open_same, way, mapping.inode)


def open_same(way: Callable[[], int], inode: int) -> int:
    """Open a mapped file by its name, if it is still that file; returns a descriptor.

    Args:
        way: Opens it by its name.
        inode: Its number, as ``/proc/PID/maps`` has it: on overlayfs that is not the one of stat(), and not asked for.

    Raises:
        OSError: As ``way``; ESTALE where another file has the name.
    """
    fd = way()
    if os.fstat(fd).st_ino == inode or is_overlay(fd):
        return fd
    os.close(fd)
    raise OSError(
        errno.ESTALE,
        "another file has its name since it was loaded; with CAP_CHECKPOINT_RESTORE it could still be opened",
    )


def iter_mappings(pid: int, *, is_executable: bool = True) -> Iterator[Mapping]:
    """File mappings of a process, the executable ones or all; nothing when it is gone or may not be read."""
    for addresses, access, _, device, inode, path in iter_maps(pid):
        if not path.startswith("/") or (is_executable and "x" not in access):
            continue
        start, _, end = addresses.partition("-")
        major, _, minor = device.partition(":")
        yield Mapping(
            pid, int(start, 16), int(end, 16), (int(major, 16), int(minor, 16)), int(inode), path
        )


def find_users(files: dict[FileId, str]) -> dict[FileId, set[int]]:
    """Processes that have files mapped, by file; those that may not be read are taken for no users.

    Args:
        files: The files, each with a path that ends with its name in every process: a child has those of its parent.

    Raises:
        OSError: It cannot be found out now, as without a descriptor left.
    """
    by_name: dict[str, set[FileId]] = {}
    for file, path in files.items():
        by_name.setdefault(path.rpartition("/")[2], set()).add(file)
    found: dict[FileId, set[int]] = {file: set() for file in files}
    for pid in iter_pids():
        try:
            data = (_PROC / str(pid) / "maps").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if any(os.fsencode(name) in data for name in by_name):
            for file in _find_mapped(pid, by_name) & files.keys():
                found[file].add(pid)
    return found


def _find_mapped(pid: int, by_name: dict[str, set[FileId]]) -> set[FileId]:
    """Which files of these names a process has mapped; of one that cannot be opened all that it may be."""
    names = {mapping.path: mapping for mapping in iter_mappings(pid)}
    found = set[FileId]()
    for path, mapping in names.items():
        candidates = by_name.get(path.rpartition("/")[2])
        if candidates is None:
            continue
        try:
            with open_mapped(mapping) as opened:
                found.add(opened.file)
        except ProcessLookupError:
            return set()
        except OSError:
            found |= candidates
    return found


def iter_maps(pid: int) -> Iterator[list[str]]:
    """Every mapping of a process by address, as ``/proc/PID/maps`` writes it; nothing when it may not be read.

    Yields:
        Addresses, access, offset, device, inode and path, the path without ``(deleted)`` and empty where there is none.
    """
    try:
        data = (_PROC / str(pid) / "maps").read_bytes()
    except OSError:
        return
    # Of a name the kernel escapes nothing but line feeds (show_map_vma of fs/proc/task_mmu.c): it may hold all else
    # that str.splitlines() and str.split() cut at.
    for line in os.fsdecode(data).split("\n"):
        fields = line.split(" ", 5)
        if len(fields) == 6:
            fields[5] = fields[5].lstrip(" ").removesuffix(" (deleted)")
            yield fields


def read_status(folder: Path) -> dict[str, str]:
    """The fields of the ``status`` of a process or thread.

    Args:
        folder: Its folder in ``/proc``.

    Raises:
        OSError: It has ended, or may not be read.
    """
    # Lines end with a line feed alone: a name may hold all else that str.splitlines() and text files take for an end.
    text = (folder / "status").read_bytes().decode("utf-8", "replace")
    return dict(line.split(":", 1) for line in text.split("\n") if ":" in line)


def iter_open_files(pid: int, proc: Path = _PROC) -> Iterator[str]:
    """What each descriptor of a process is: ``socket:[7]``, ``/dev/null``. Such a path is what the process calls it.

    Raises:
        OSError: It has ended, or may not be read.
    """
    for entry in (proc / str(pid) / "fd").iterdir():
        try:
            yield str(entry.readlink())
        except OSError:  # it was closed meanwhile
            continue


def iter_pids() -> Iterator[int]:
    """Every process there is now."""
    with os.scandir(_PROC) as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name)


def has_ended(pid: int, start_ticks: int = 0) -> bool:
    """Whether a process is known to be over; one whose first thread alone has ended is not.

    Args:
        pid: The process.
        start_ticks: When it started, in clock ticks since boot: another process may have its pid by now. 0 where that
            is not known.
    """
    try:
        fields = _read_stat(pid).rpartition(b")")[2].split()
        if start_ticks and int(fields[19]) != start_ticks:
            return True
        return fields[0] in b"ZX" and len(list((_PROC / str(pid) / "task").iterdir())) == 1
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return True
    except OSError:  # as when we have no descriptor left: that says nothing of the process
        return False


def read_start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot.

    Raises:
        OSError: It has ended, or may not be read.
    """
    fields = _read_stat(pid).rpartition(b")")[2].split()
    if len(fields) < 20:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return int(fields[19])


def _read_stat(pid: int) -> bytes:
    """``/proc/PID/stat``. Asked of every known process once a second: half of what a buffered file takes."""
    fd = os.open(f"{_PROC}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _MAX_STAT_BYTES)
    finally:
        os.close(fd)


def read_state(pid: int) -> str:
    """The letter of the state of a process's first thread (proc_pid_stat(5)); empty when it cannot be read.

    One that the freezer of its cgroup holds is ``T``, too: the kernel shows it as asleep or as blocked.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return ""
    state = "".join(text.rpartition(")")[2].split()[:1])
    return "T" if state in _SHOWN_FROZEN and seen_cgroups().is_frozen(pid) else state


def is_stopped(pid: int) -> bool:
    """Whether a process is known to be stopped by a signal, a tracer or the freezer of its cgroup."""
    return read_state(pid) in {"T", "t"}


def find_descendants(pids: Collection[int]) -> set[int]:
    """Children of these processes, and theirs, as they are now."""
    children: dict[int, list[int]] = {}
    for pid in iter_pids():
        try:
            text = (_PROC / str(pid) / "stat").read_text(errors="replace")
        except OSError:
            continue
        parent = int(text.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(pid)
    found, waiting = set[int](), list(pids)
    while waiting:
        new = [pid for pid in children.get(waiting.pop(), ()) if pid not in found]
        found.update(new)
        waiting.extend(new)
    return found


def find_family(pid: int) -> dict[int, int]:
    """Parent by child, of a process and of the children that its threads have now; what cannot be read is absent."""
    folder, family = _PROC / str(pid), dict[int, int]()
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = (folder / "stat").read_text(errors="replace")
        family[pid] = int(text.rpartition(")")[2].split()[1])
        for thread in itertools.islice((folder / "task").iterdir(), _MAX_THREADS):
            with contextlib.suppress(OSError):  # it ended, or the kernel shows no children
                children = (thread / "children").read_text().split()
                family |= dict.fromkeys(map(int, children), pid)
    return family


def is_program(mapping: Mapping) -> bool:
    """Whether a mapping is the process's own executable, where a static runtime would be."""
    try:
        program = str((_PROC / str(mapping.pid) / "exe").readlink())
    except OSError:
        return False
    # The mapping's path begins at the process's root, the link's at ours.
    return program.removesuffix(" (deleted)").endswith(mapping.path)
