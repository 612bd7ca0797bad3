"""Reads what the kernel has counted about a process: its threads, and the quota that it is under.

Sources: Linux, Documentation/scheduler/sched-stats.rst (``schedstat``: nanoseconds on a processor, nanoseconds ready to
run, turns), Documentation/scheduler/sched-bwc.rst (``cpu.cfs_quota_us``, ``throttled_time`` in nanoseconds),
Documentation/admin-guide/cgroup-v2.rst (``cpu.max``, ``throttled_usec``), proc_pid_stat(5), proc_tid_children(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from ingero.agent.capture.discover.cgroups import Cgroups, seen_cgroups
from ingero.model.counters import ENDED, ProcessCounters, Quota
from ingero.units import NS_PER_S, NS_PER_US

MAX_THREADS: Final = 256
MAX_CHILDREN: Final = 64
MAX_MEMBERS: Final = 64
"""Other processes of a cgroup whose time is read."""
_TICK_NS: Final = NS_PER_S // os.sysconf("SC_CLK_TCK")


class _Stat(NamedTuple):
    name: str
    parent: int
    spent_ns: int
    n_major_faults: int
    nice: int


@dataclass(frozen=True, slots=True)
class CounterFiles:
    """Where the kernel tells it.

    Attributes:
        proc: ``/proc``.
        cgroups: Those of its processes.
    """

    proc: Path = Path("/proc")
    cgroups: Cgroups = field(default_factory=seen_cgroups)

    def read(self, pid: int, mono_ns: int) -> ProcessCounters | None:
        """One reading; None when the process has ended or may not be read."""
        stat = self._read_stat(pid)
        threads = dict(self._iter_threads(pid))
        if stat is None or not threads:
            return None
        return ProcessCounters(
            mono_ns,
            threads,
            self._read_quota(pid),
            stat.n_major_faults,
            _count_allowed(pid),
            stat.nice,
            dict(self._iter_children(pid)),
        )

    def _iter_threads(self, pid: int) -> Iterator[tuple[int, tuple[int, int]]]:
        folder = self.proc / str(pid) / "task"
        try:
            tids = sorted(int(one.name) for one in folder.iterdir() if one.name.isdigit())
        except OSError:
            return
        for tid in tids[:MAX_THREADS]:
            if (took := _read_schedstat(folder / str(tid))) is not None:
                yield tid, took

    def _iter_children(self, pid: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Those that its first thread has forked: a program forks its workers there."""
        for child in _read(self.proc / str(pid) / "task" / str(pid) / "children").split()[
            :MAX_CHILDREN
        ]:
            if (took := _read_schedstat(self.proc / child)) is not None:
                yield int(child), took

    def _read_stat(self, pid: int) -> _Stat | None:
        name, _, rest = _read(self.proc / str(pid) / "stat").rpartition(")")
        fields = rest.split()
        if len(fields) < 17 or fields[0] == ENDED:
            return None
        spent = int(fields[11]) + int(fields[12])
        return _Stat(
            name.partition("(")[2],
            int(fields[1]),
            spent * _TICK_NS,
            int(fields[9]),
            int(fields[16]),
        )

    def _read_quota(self, pid: int) -> Quota | None:
        """The narrowest quota above a process; None also where its cgroup cannot be read."""
        found = [
            (limit, folder)
            for folder in self.cgroups.find_folders(pid, "cpu")
            if (limit := _read_limit(folder)) is not None
        ]
        if not found:
            return None
        n_processors, folder = min(found)
        stat = _read_pairs(folder / "cpu.stat")
        throttled_ns = stat.get("throttled_time", stat.get("throttled_usec", 0) * NS_PER_US)
        others = dict(self._iter_others(folder, pid))
        return Quota(n_processors, throttled_ns, stat.get("nr_throttled", 0), others)

    def _iter_others(self, folder: Path, pid: int) -> Iterator[tuple[str, int]]:
        """Members of a cgroup that are neither a process nor its descendants, with their processor time."""
        members = [int(text) for text in _read(folder / "cgroup.procs").split()[:MAX_MEMBERS]]
        stats = {one: stat for one in members if (stat := self._read_stat(one)) is not None}
        for one, stat in stats.items():
            if not _descends(one, pid, stats):
                yield f"{stat.name} ({one})", stat.spent_ns


def _descends(one: int, ancestor: int, stats: Mapping[int, _Stat]) -> bool:
    for _ in range(len(stats) + 1):
        if one == ancestor:
            return True
        if one not in stats:
            return False
        one = stats[one].parent
    return False


def _read_schedstat(folder: Path) -> tuple[int, int] | None:
    """Of a thread, or of the first thread of a process."""
    fields = _read(folder / "schedstat").split()
    return (int(fields[0]), int(fields[1])) if len(fields) >= 2 else None


def _read_limit(folder: Path) -> float | None:
    """Processors that a cgroup may use; None without a limit."""
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if not quota:
        quota, _, period = _read(folder / "cpu.max").partition(" ")
    try:
        limit = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max", or no such file
    return limit if limit > 0 else None


def _read_pairs(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _count_allowed(pid: int) -> int:
    try:
        return len(os.sched_getaffinity(pid))
    except OSError:
        return 0


def _read(path: Path) -> str:
    """A file's text; empty when there is none, or no process any more."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
