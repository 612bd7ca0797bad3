"""What a process's children do for some seconds, of which every switch is seen: those that read its data.

Source: Linux, Documentation/scheduler/sched-stats.rst (``schedstat``: nanoseconds on a processor and ready to run).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from ingero.agent.capture.discover.processes import find_descendants, read_state
from ingero.model.arrays import Records
from ingero.model.counters import ASLEEP, BLOCKED, ENDED
from ingero.model.events import OffCpuReason
from ingero.units import NS_PER_S

_READ_NS: Final = NS_PER_S // 2
"""Between two looks for children: all processes of the machine are gone through."""
MIN_READING: Final = 0.1
"""Part of the time from which a child process that waits for a disk is one that reads."""
MAX_IDLE: Final = 0.1
"""Part of the time up to which it is never idle, so that the reader of its data waits for it."""
MAX_WORKERS: Final = 64


@dataclass(slots=True)
class _Child:
    """The first thread of a child process, which may begin or end while it is watched.

    How long it was ready to run again is in neither of its waits.

    Attributes:
        pid: Which.
        start_ns: When it was seen first.
        first_ns: Time on a processor and ready to run, until then.
        end_ns: Until when it is known what it did; what blocks it is known once that has ended.
        ready_ns: Time on a processor and ready to run, from start to end.
        io_ns: Time blocked on I/O, from start to end.
        blocked_ns: The same, until the last record.
        slept_ns: Time asleep, until the last record.
        idle_ns: The same, from start to end.
        ran_ns: When it went on, in the last record.
        is_blocked: Whether it was blocked when it was seen first: what it did is known from when that ended.
    """

    pid: int
    start_ns: int
    first_ns: int
    end_ns: int
    ready_ns: int = 0
    io_ns: int = 0
    blocked_ns: int = 0
    slept_ns: int = 0
    idle_ns: int = 0
    ran_ns: int = 0
    is_blocked: bool = False

    @classmethod
    def of(cls, pid: int, now_ns: int) -> _Child | None:
        """A child as it is now; None when it is gone."""
        ready_ns, is_blocked = _read_ready(pid), read_state(pid) == BLOCKED
        if ready_ns is None:
            return None
        return cls(pid, now_ns, ready_ns, now_ns, is_blocked=is_blocked)

    def add(self, rows: Records) -> None:
        """Its own ``struct ig_off_cpu``."""
        if self.is_blocked:
            self.is_blocked, self.start_ns = False, int(rows["header"]["mono_ns"].min())
        took = (rows["off_ns"] - rows["wait_ns"]) * rows["weight"]
        self.blocked_ns += int(took[rows["reason"] == OffCpuReason.BLOCKED_IO].sum())
        self.slept_ns += int(took[rows["reason"] == OffCpuReason.SLEEP].sum())
        self.ran_ns = int((rows["header"]["mono_ns"] + rows["off_ns"]).max())

    def read(self, now_ns: int) -> None:
        """See how far it is; one that is gone stays as it was seen last."""
        ready_ns, state = _read_ready(self.pid), read_state(self.pid)
        if ready_ns is not None and state not in {"", ENDED}:
            self.end_ns = max(self.end_ns, self.ran_ns) if state == BLOCKED else now_ns
            self.ready_ns, self.io_ns = ready_ns - self.first_ns, self.blocked_ns
            since_ns = now_ns - max(self.ran_ns, self.start_ns) if state == ASLEEP else 0
            self.idle_ns = self.slept_ns + since_ns

    @property
    def took_ns(self) -> int:
        """How long it was watched."""
        return self.end_ns - self.start_ns

    @property
    def is_reader(self) -> bool:
        """Whether it waits for a disk."""
        return self.took_ns > 0 and self.io_ns >= MIN_READING * self.took_ns

    @property
    def is_busy(self) -> bool:
        """Whether it was hardly ever idle.

        Of what is neither time on a processor, ready or blocked some is that of interrupts and of the hypervisor.
        """
        rest_ns = self.took_ns - self.ready_ns - self.io_ns
        return min(rest_ns, self.idle_ns) <= MAX_IDLE * self.took_ns


@dataclass(slots=True)
class Children:
    """Of one process, and theirs: at most `MAX_WORKERS` in all.

    Attributes:
        parent: The process.
    """

    parent: int
    _found: dict[int, _Child] = field(default_factory=dict)
    _next_ns: int = 0

    def add(self, records: Records) -> None:
        """``struct ig_off_cpu`` of any threads; read before this returns."""
        for tid in np.unique(records["tid"]).tolist():
            if tid in self._found:
                self._found[tid].add(records[records["tid"] == tid])

    def read_due(self, watch: Callable[[int], None], now_ns: int) -> None:
        """`read` when the last time is long enough ago."""
        if now_ns >= self._next_ns:
            self.read(watch, now_ns)
            self._next_ns = now_ns + _READ_NS

    def read(self, watch: Callable[[int], None], now_ns: int) -> None:
        """See how far each is, and have those watched that have begun."""
        for one in self._found.values():
            one.read(now_ns)
        new = sorted(find_descendants([self.parent]) - set(self._found))
        for pid in new[: MAX_WORKERS - len(self._found)]:
            watch(pid)
            found = _Child.of(pid, now_ns)
            if found is not None:
                self._found[pid] = found

    def find_reading(self, window_ns: int) -> float:
        """The part of a stretch of time in which those that read waited for a disk; 0 when one was ever idle."""
        readers = [one for one in self._found.values() if one.is_reader]
        if not readers or not all(one.is_busy for one in readers):
            return 0.0
        reading = sum(one.io_ns for one in readers) / sum(one.took_ns for one in readers)
        there = _measure_union([(one.start_ns, one.end_ns) for one in readers]) / window_ns
        return min(reading, 1.0) * min(there, 1.0)


def _measure_union(spans: Sequence[tuple[int, int]]) -> int:
    """Length of what intervals cover."""
    covered = until = 0
    for start, end in sorted(spans):
        covered += max(end - max(start, until), 0)
        until = max(until, end)
    return covered


def _read_ready(pid: int) -> int | None:
    try:
        fields = Path("/proc", str(pid), "schedstat").read_text().split()
    except OSError:
        return None
    return int(fields[0]) + int(fields[1])
