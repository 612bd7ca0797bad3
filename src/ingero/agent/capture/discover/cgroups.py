"""Cgroups of processes, also of those in other containers: paths as the host has them, and their folders.

Every path of a cgroup that the agent shows, and every file of a cgroup that it reads, is found here.

In a container with a cgroup namespace of its own the kernel shows the path of any process from the container's own
cgroup on (``/../../pod…/…``), and ``/sys/fs/cgroup`` is that cgroup. The host's folders are then found through its
first process (``/proc/1/root``), which needs the host's pid namespace and CAP_SYS_PTRACE, or where the host's
``/sys/fs/cgroup`` is mounted into the container. Where neither is there, a path that leads outside is not known.

Sources: cgroups(7), ``/proc/PID/cgroup``; cgroup_namespaces(7); proc_pid_mountinfo(5), whose root field of a cgroup
file system is relative to the reader's cgroup namespace too; Linux, kernel/cgroup/cgroup.c, ``cgroup_show_path``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")
_UP: Final = ".."
_UNIFIED: Final = ""
"""What stands for version 2 where version 1 has the name of a controller."""
_FREEZER: Final = "freezer"
_FROZEN_1: Final = ("freezer.state", "FROZEN")
_FROZEN_2: Final = ("cgroup.events", "frozen 1")


@dataclass(frozen=True, slots=True)
class CgroupMembership:
    """A process's cgroup in one hierarchy.

    Attributes:
        controllers: Of version 1, among them ``name=…`` of a hierarchy without any; empty for version 2.
        path: From the root of the hierarchy on; empty where that is not known.
        shown: As the kernel showed it to us.
    """

    controllers: tuple[str, ...]
    path: str
    shown: str


class _Place(NamedTuple):
    """A path as a cgroup namespace shows it.

    Attributes:
        n_up: How far above the namespace's own root it begins.
        names: What follows.
    """

    n_up: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Mount:
    """A folder in which a hierarchy, or a part of it, can be read.

    Attributes:
        folder: Where.
        root: What of the hierarchy is there.
        is_hosts: Seen through the first process.
    """

    folder: Path
    root: _Place
    is_hosts: bool


class _Hierarchy:
    """What can be read of one hierarchy.

    Args:
        mounts: Where, at least one.
    """

    def __init__(self, mounts: Iterable[_Mount]) -> None:
        self.mounts = sorted(
            mounts, key=lambda one: (-one.root.n_up, len(one.root.names), one.is_hosts)
        )
        n_up, names = self.mounts[0].root
        # Only the root of the hierarchy says how deep our namespace is.
        self._depth = -1 if n_up and names else n_up

    @functools.cached_property
    def _own(self) -> tuple[str, ...] | None:
        """From the hierarchy's root to that of our cgroup namespace; None where it is not found."""
        outer = self.mounts[0]
        inner = next((one for one in self.mounts if one.root == _Place(0, ())), None)
        if inner is None or outer.root.names:
            return None
        try:
            inode = inner.folder.stat().st_ino
        except OSError:
            return None
        return _find_below(outer.folder, self._depth, inode)

    def resolve(self, place: _Place) -> tuple[str, ...] | None:
        """Names from the hierarchy's root on; None where they are not known."""
        if place.n_up == self._depth:
            return place.names
        if place.n_up > self._depth or self._own is None:
            return None
        return self._own[: self._depth - place.n_up] + place.names

    def find(self, place: _Place) -> tuple[Path, Path] | None:
        """Folder of a cgroup, and that of the outermost one above it that can be read."""
        for mount in self.mounts:
            below = self._relate(place, mount.root)
            if below is not None:
                return mount.folder.joinpath(*below), mount.folder
        return None

    def _relate(self, place: _Place, root: _Place) -> tuple[str, ...] | None:
        """From a mount's root to a cgroup below it; None where it is not below, or that is not known."""
        if place.n_up == root.n_up:
            return _cut(place.names, root.names)
        names, start = self.resolve(place), self.resolve(root)
        return None if names is None or start is None else _cut(names, start)


class Cgroups:
    """The machine's cgroups as far as this process may read them; where they are mounted is read once.

    Args:
        proc: Where processes are shown.
    """

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc

    def read(self, pid: int) -> list[CgroupMembership]:
        """A process's cgroups, one for each hierarchy.

        Raises:
            OSError: The process is gone.
        """
        text = os.fsdecode((self._proc / str(pid) / "cgroup").read_bytes())
        return [self._complete(one) for one in parse_memberships(text)]

    def find_folders(self, pid: int, controller: str) -> list[Path]:
        """Folders of a process's cgroup that has a controller and of those above it, the innermost first.

        Those of version 1 where it has the controller, else those of version 2. Empty where they cannot be read.
        """
        is_v1 = controller in self._hierarchies
        try:
            members = self.read(pid)
        except OSError:
            return []
        for one in members:
            if controller in one.controllers if is_v1 else not one.controllers:
                return list(self._iter_up(controller if is_v1 else _UNIFIED, one.shown))
        return []

    def is_frozen(self, pid: int) -> bool:
        """Whether the freezer of a process's cgroup, or of one above it, holds it; of either version.

        False where that cannot be read. Source: Linux, Documentation/admin-guide/cgroup-v1/freezer-subsystem.rst and
        cgroup-v2.rst (``cgroup.events``).
        """
        try:
            members = self.read(pid)
        except OSError:
            return False
        return any(self._is_frozen(one) for one in members)

    def _is_frozen(self, one: CgroupMembership) -> bool:
        if _FREEZER not in one.controllers and one.controllers:
            return False
        name, file, line = (_FREEZER, *_FROZEN_1) if one.controllers else (_UNIFIED, *_FROZEN_2)
        folder = next(self._iter_up(name, one.shown), None)
        try:
            return folder is not None and line in (folder / file).read_text().splitlines()
        except OSError:
            return False  # the root of version 2 has no such file, and is never frozen

    def find_root(self) -> Path | None:
        """Where version 2 is mounted, alone or beside version 1, as far out as can be read; None when it is not."""
        unified = self._hierarchies.get(_UNIFIED)
        return unified.mounts[0].folder if unified is not None else None

    def find_id(self, path: str) -> int:
        """The id that the kernel gives a cgroup of version 2, which is its folder's inode; 0 when it is not there.

        Args:
            path: From the hierarchy's root on. One of version 1 alone is not found: the kernel's ids are those of
                version 2.
        """
        folder = self._find_unified(path)
        try:
            return folder.stat().st_ino if folder is not None else 0
        except OSError:
            return 0

    def find_ids(self, path: str) -> tuple[int, ...]:
        """Ids of a cgroup of version 2 and of those below it now; none when it is not there."""
        folder = self._find_unified(path)
        if folder is None or not folder.is_dir():
            return ()
        return tuple(Path(name).stat().st_ino for name, _, _ in os.walk(folder))

    def _find_unified(self, path: str) -> Path | None:
        root = self.find_root()
        return root / path.lstrip("/") if root is not None and path else None

    def _complete(self, one: CgroupMembership) -> CgroupMembership:
        hierarchy = self._hierarchies.get(one.controllers[0] if one.controllers else _UNIFIED)
        if hierarchy is None:
            return one
        names = hierarchy.resolve(_parse_place(one.shown))
        path = "" if names is None else "/" + "/".join(names)
        return CgroupMembership(one.controllers, path, one.shown)

    def _iter_up(self, name: str, shown: str) -> Iterator[Path]:
        hierarchy = self._hierarchies.get(name)
        found = hierarchy.find(_parse_place(shown)) if hierarchy is not None else None
        if found is None:
            return
        folder, top = found
        while folder != top:
            yield folder
            folder = folder.parent
        yield top

    @functools.cached_property
    def _hierarchies(self) -> dict[str, _Hierarchy]:
        """By controller; co-mounted ones have the same."""
        mounts: dict[str, list[_Mount]] = {}
        host, own = self._proc / "1", self._proc / "self"
        for process, root in ((own, Path("/")), (host, host / "root")):
            for names, mount in _iter_mounts(process / "mountinfo", root):
                for name in names:
                    mounts.setdefault(name, []).append(mount)
        return {name: _Hierarchy(places) for name, places in mounts.items()}


@functools.cache
def seen_cgroups(proc: Path = _PROC) -> Cgroups:
    """The machine's cgroups, the same object each time."""
    return Cgroups(proc)


def parse_memberships(text: str) -> list[CgroupMembership]:
    """The contents of ``/proc/PID/cgroup``, where nothing but them is known: a path that leads outside is not."""
    found = []
    for line in text.split("\n"):  # the only end that a cgroup's name may not hold
        number, is_line, rest = line.partition(":")
        names, is_whole, shown = rest.partition(":")
        if is_line and is_whole and number.isdecimal():
            path = "" if _parse_place(shown).n_up else shown
            found.append(CgroupMembership(tuple(names.split(",")) if names else (), path, shown))
    return found


def choose_path(memberships: Iterable[CgroupMembership]) -> str:
    """The path that stands for a process: that of version 2 unless it is the root, else the longest one."""
    known = [one for one in memberships if one.path]
    unified = [one.path for one in known if not one.controllers and one.path != "/"]
    return (unified or sorted((one.path for one in known), key=len, reverse=True) or [""])[0]


def _iter_mounts(mountinfo: Path, root: Path) -> Iterator[tuple[list[str], _Mount]]:
    """Cgroup file systems that can be read, with what each controls; of several in one place the last is seen."""
    try:
        lines = os.fsdecode(mountinfo.read_bytes()).split("\n")
    except OSError:
        return
    by_place: dict[str, tuple[list[str], _Mount]] = {}
    for line in lines:
        mount, _, filesystem = line.partition(" - ")
        fields, kinds = mount.split(), filesystem.split()
        if len(fields) < 5 or len(kinds) < 3 or kinds[0] not in {"cgroup", "cgroup2"}:
            continue
        folder = root / fields[4].lstrip("/")
        names = [_UNIFIED] if kinds[0] == "cgroup2" else kinds[2].split(",")
        seen = _Mount(folder, _parse_place(fields[3]), is_hosts=root != Path("/"))
        by_place[fields[4]] = names, seen
    for names, seen in by_place.values():
        if os.access(seen.folder, os.R_OK | os.X_OK):
            yield names, seen


def _parse_place(path: str) -> _Place:
    names = tuple(name for name in path.split("/") if name)
    n_up = next((i for i, name in enumerate(names) if name != _UP), len(names))
    return _Place(n_up, names[n_up:])


def _cut(names: tuple[str, ...], start: tuple[str, ...]) -> tuple[str, ...] | None:
    """What follows the start; None when it begins otherwise."""
    return names[len(start) :] if names[: len(start)] == start else None


def _find_below(folder: Path, depth: int, inode: int) -> tuple[str, ...] | None:
    """Names of the folders down to the one with an inode, so many levels below; None when there is none."""
    if not depth:
        return ()
    try:
        with os.scandir(folder) as entries:
            folders = [one for one in entries if one.is_dir(follow_symlinks=False)]
    except OSError:
        return None
    if depth == 1:
        return next(((one.name,) for one in folders if one.inode() == inode), None)
    for one in folders:
        below = _find_below(folder / one.name, depth - 1, inode)
        if below is not None:
            return (one.name, *below)
    return None
