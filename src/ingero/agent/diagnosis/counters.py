"""Reads what the kernel has counted about a process: its threads, and the quota that it is under.

Sources: Linux, Documentation/scheduler/sched-stats.rst (``schedstat``: nanoseconds on a processor, nanoseconds ready to
run, turns), Documentation/scheduler/sched-bwc.rst (``cpu.cfs_quota_us``, ``throttled_time`` in nanoseconds),
Documentation/admin-guide/cgroup-v2.rst (``cpu.max``, ``throttled_usec``), proc_pid_stat(5) (``minflt``, ``stime``;
``starttime``, in clock ticks since boot, as ``CLOCK_BOOTTIME`` counts: with time in which the machine slept),
proc_tid_children(5).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from ingero.agent.capture.discover.cgroups import Cgroups, seen_cgroups
from ingero.agent.diagnosis.processors import TICK_NS, ProcessorCounters
from ingero.model.counters import (
    ENDED,
    ProcessCounters,
    ProcessorTimes,
    Quota,
    QuotaMember,
    TaskTimes,
    ThrottledTotals,
)
from ingero.units import NS_PER_US

MAX_THREADS: Final = 256
MAX_CHILDREN: Final = 64
MAX_MEMBERS: Final = 64
"""Other processes of a cgroup whose time is read."""
MAX_CGROUPS: Final = 16
"""Cgroups in which these are looked for: the one with the quota, and those below it."""


def _read_boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class _Stat(NamedTuple):
    name: str
    parent: int
    spent_ns: int
    kernel_ns: int
    n_minor_faults: int
    nice: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class CounterFiles:
    """Where the kernel tells it.

    Attributes:
        proc: ``/proc``.
        cgroups: Those of its processes.
        boot_ns: Nanoseconds since boot.
        processors: Those of this machine.
    """

    proc: Path = Path("/proc")
    cgroups: Cgroups = field(default_factory=seen_cgroups)
    boot_ns: Callable[[], int] = _read_boot_ns
    processors: ProcessorCounters = field(default_factory=ProcessorCounters)

    def read(
        self, pid: int, mono_ns: int, before: ProcessCounters | None = None
    ) -> ProcessCounters | None:
        """One reading; None when the process has ended or may not be read.

        Args:
            pid: The process.
            mono_ns: Now.
            before: An earlier reading of it: of a thread that it knows only the counters are read.
        """
        boot_ticks = self.boot_ns() // TICK_NS
        stat = _read_stat(self.proc / str(pid))
        if stat is None:
            return None
        threads = dict(self._iter_threads(pid, stat.start_ticks, before.threads if before else {}))
        if not threads:
            return None
        folders = list(self.cgroups.find_folders(pid, "cpu"))
        allowed, processors = _find_allowed(pid), self.processors.read_due(mono_ns)
        return ProcessCounters(
            mono_ns,
            threads,
            tuple(self._iter_quotas(pid, folders)),
            len(allowed),
            stat.nice,
            dict(self._iter_children(pid, before.children if before else {})),
            boot_ticks,
            dict(_iter_throttled(folders)),
            stat.kernel_ns,
            stat.n_minor_faults,
            _add_up(one for at, one in processors.items() if at in allowed),
        )

    def _iter_threads(
        self, pid: int, start_ticks: int, known: Mapping[int, TaskTimes]
    ) -> Iterator[tuple[int, TaskTimes]]:
        folder = self.proc / str(pid) / "task"
        try:
            tids = sorted(int(one.name) for one in folder.iterdir() if one.name.isdigit())
        except OSError:
            return
        for tid in tids[:MAX_THREADS]:
            start = start_ticks if tid == pid else None
            times = _read_times(folder / str(tid), known.get(tid), start)
            if times is not None:
                yield tid, times

    def _iter_children(
        self, pid: int, known: Mapping[int, TaskTimes]
    ) -> Iterator[tuple[int, TaskTimes]]:
        """Those that its first thread has forked: a program forks its workers there."""
        text = _read(self.proc / str(pid) / "task" / str(pid) / "children")
        for child in map(int, text.split()[:MAX_CHILDREN]):
            if (times := _read_times(self.proc / str(child), known.get(child))) is not None:
                yield child, times

    def _iter_quotas(self, pid: int, folders: Iterable[Path]) -> Iterator[Quota]:
        """The quotas above a process, the innermost first; none also where its cgroup cannot be read.

        A pod has one and each of its containers too, so most processes are seen twice, and read once.
        """
        read: dict[int, _Stat | None] = {}
        for folder in folders:
            limit = _read_limit(folder)
            if limit is not None:
                others = dict(self._iter_others(folder, pid, read))
                yield Quota(limit, _read_inode(folder), others)

    def _iter_others(
        self, folder: Path, pid: int, read: dict[int, _Stat | None]
    ) -> Iterator[tuple[QuotaMember, int]]:
        """Members of a cgroup and of those below that are neither a process nor its descendants, with their time."""
        members = list(islice(_iter_members(folder), MAX_MEMBERS))
        for one in members:
            if one not in read:
                read[one] = _read_stat(self.proc / str(one))
        stats = {one: stat for one in members if (stat := read[one]) is not None}
        for one, stat in stats.items():
            if not _descends(one, pid, stats):
                yield QuotaMember(one, stat.start_ticks, stat.name), stat.spent_ns


def _iter_members(folder: Path) -> Iterator[int]:
    """Processes of a cgroup and of those below it: of version 2 only the innermost have any."""
    for place, _, _ in islice(os.walk(folder), MAX_CGROUPS):
        yield from map(int, _read(Path(place, "cgroup.procs")).split())


def _descends(one: int, ancestor: int, stats: Mapping[int, _Stat]) -> bool:
    for _ in range(len(stats) + 1):
        if one == ancestor:
            return True
        if one not in stats:
            return False
        one = stats[one].parent
    return False


def _read_stat(folder: Path) -> _Stat | None:
    """Of a process or a thread; None when it has ended."""
    name, _, rest = _read(folder / "stat").rpartition(")")
    fields = rest.split()
    if len(fields) < 20 or fields[0] == ENDED:
        return None
    in_program, in_kernel = int(fields[11]), int(fields[12])
    return _Stat(
        name.partition("(")[2],
        int(fields[1]),
        (in_program + in_kernel) * TICK_NS,
        in_kernel * TICK_NS,
        int(fields[7]),
        int(fields[16]),
        int(fields[19]),
    )


def _read_times(
    folder: Path, known: TaskTimes | None, start_ticks: int | None = None
) -> TaskTimes | None:
    """Of a thread, or of the first thread of a process; None when it has ended.

    One whose counters fell is another one. Its start is read once: reading that costs more than the counters.
    """
    fields = _read(folder / "schedstat").split()
    if len(fields) < 2:
        return None
    ran_ns, ready_ns = int(fields[0]), int(fields[1])
    if start_ticks is not None:
        return TaskTimes(ran_ns, ready_ns, start_ticks)
    if known is not None and ran_ns >= known.ran_ns and ready_ns >= known.ready_ns:
        return TaskTimes(ran_ns, ready_ns, known.start_ticks)
    stat = _read_stat(folder)
    return None if stat is None else TaskTimes(ran_ns, ready_ns, stat.start_ticks)


def _iter_throttled(folders: Iterable[Path]) -> Iterator[tuple[int, ThrottledTotals]]:
    for folder in folders:
        stat = _read_pairs(folder / "cpu.stat")
        took_ns = stat.get("throttled_time", stat.get("throttled_usec", 0) * NS_PER_US)
        yield _read_inode(folder), ThrottledTotals(took_ns, stat.get("nr_throttled", 0))


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


def _read_inode(folder: Path) -> int:
    """Of a cgroup: no later one gets it. 0 when it is gone."""
    try:
        return folder.stat().st_ino
    except OSError:
        return 0


def _read_pairs(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _find_allowed(pid: int) -> frozenset[int]:
    """Processors that a process may run on."""
    try:
        return frozenset(os.sched_getaffinity(pid))
    except OSError:
        return frozenset()


def _add_up(processors: Iterable[ProcessorTimes]) -> ProcessorTimes | None:
    times = list(processors)
    return ProcessorTimes(*map(sum, zip(*times, strict=True))) if times else None


def _read(path: Path) -> str:
    """A file's text; empty when there is none, or no process any more."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
