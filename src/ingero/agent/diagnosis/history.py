"""The last two minutes of the node's ranks: counters twice a second, and what their collectives took.

Lossy on purpose: what is older is dropped, and so are operations beyond `MAX_OPS` of a process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import numpy as np

from ingero.agent.diagnosis.counters import CounterFiles
from ingero.model.arrays import Records
from ingero.model.collectives import FULL_LIMIT, UNKNOWN_NS, Rank
from ingero.model.counters import CudaWait, ProcessCounters, TaskTimes, Work
from ingero.recording.causal.work_rates import find_busiest, find_limit_use, find_wanted_ns
from ingero.units import NS_PER_MS

READ_NS: Final = 500 * NS_PER_MS
"""Between two readings."""
MAX_READINGS: Final = 300
MAX_OPS: Final = 200_000
_N_LATE: Final = 10
"""Readings that tell what a process does now: a loader's workers are others with each epoch."""
_OP: Final = np.dtype([("entry_ns", "<i8"), ("own_ns", "<i8")])


@dataclass(slots=True)
class _Followed:
    """One process.

    Attributes:
        rank: Who it is to Fleet.
        readings: Oldest first.
        calls: When, and time in calls of CUDA until then, oldest first.
        ops: Its operations in pieces, as they were taken.
        limit_use: What was in use of its CPU limit at the last reading, as in COLLECTIVE_OP.
    """

    rank: Rank
    readings: deque[ProcessCounters] = field(default_factory=lambda: deque(maxlen=MAX_READINGS))
    calls: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_READINGS))
    ops: deque[Records] = field(default_factory=deque)
    n_ops: int = 0
    limit_use: int = 0


class CounterHistory:
    """Follows every process that has collectives. Any thread.

    Args:
        offset_ns: Wall clock less monotonic clock, as in the entry times that Fleet is sent.
        files: Where the counters are.

    Attributes:
        offset_ns: As given.
    """

    def __init__(self, offset_ns: int, files: CounterFiles | None = None) -> None:
        self.offset_ns = offset_ns
        self._files = files or CounterFiles()
        self._lock = threading.Lock()
        self._followed: dict[int, _Followed] = {}
        self._open_calls: Mapping[int, CudaWait] = {}
        self._read_ns = 0

    def add_ops(self, pid: int, rank: Rank, ops: Records) -> int:
        """Operations of a process, rows of COLLECTIVE_OP with entries on the monotonic clock.

        Returns:
            What was in use of late of the CPU limit that it came closest to, in thousandths; 0 without one.
        """
        kept = np.zeros(len(ops), _OP)
        kept["entry_ns"], kept["own_ns"] = ops["entry_ns"], ops["own_ns"]
        with self._lock:
            one = self._followed.setdefault(pid, _Followed(rank))
            one.rank = rank
            one.ops.append(kept)
            one.n_ops += len(kept)
            while one.n_ops > MAX_OPS and len(one.ops) > 1:
                one.n_ops -= len(one.ops.popleft())
            return one.limit_use

    def add_calls(self, mono_ns: int, took_ns: Mapping[int, float]) -> None:
        """Time that processes spent in calls of CUDA since the last time, by pid; one that is not named made none."""
        with self._lock:
            for pid, one in self._followed.items():
                so_far_ns = one.calls[-1][1] if one.calls else 0.0
                one.calls.append((mono_ns, so_far_ns + took_ns.get(pid, 0.0)))

    def note_open_calls(self, calls: Mapping[int, CudaWait]) -> None:
        """The call of CUDA that the first thread of each process is in now, by pid."""
        self._open_calls = calls

    def find_open_call(self, pid: int, since_ns: int) -> CudaWait | None:
        """The call of CUDA that a process's first thread entered before a moment and is still in, at the last look."""
        call = self._open_calls.get(pid)
        return call if call is not None and call.since_ns <= since_ns else None

    def read_due(self, mono_ns: int) -> None:
        """Take a reading when the last is `READ_NS` old."""
        if mono_ns - self._read_ns >= READ_NS:
            self.read(mono_ns)

    def read(self, mono_ns: int) -> None:
        """Take a reading of each process that is followed.

        One that cannot be read is forgotten: its last operations may come after its end, and a rank that begins again
        on this node is another process.
        """
        self._read_ns = mono_ns
        with self._lock:
            before = {
                pid: one.readings[-1] if one.readings else None
                for pid, one in self._followed.items()
            }
        for pid, last in before.items():
            reading = self._files.read(pid, mono_ns, last)
            with self._lock:
                one = self._followed.get(pid)
                if reading is None or (last and _is_another(pid, last, reading)):
                    self._followed.pop(pid, None)
                elif one is not None:
                    one.readings.append(reading)
                    one.limit_use = _find_limit_use(one)
                    self._drop_old(one)

    def _drop_old(self, one: _Followed) -> None:
        oldest_ns = one.readings[0].mono_ns
        while len(one.ops) > 1 and len(one.readings) == MAX_READINGS:
            if len(one.ops[0]) and one.ops[0]["entry_ns"][-1] >= oldest_ns:
                return
            one.n_ops -= len(one.ops.popleft())

    def find(self, rank: int, job: str) -> tuple[int, Rank] | None:
        """The process of a rank, and who it is to Fleet; None when there is none."""
        with self._lock:
            for pid, one in self._followed.items():
                if (one.rank.rank, one.rank.job) == (rank, job):
                    return pid, one.rank
        return None

    def find_work(self, pid: int, start_ns: int, end_ns: int) -> Work | None:
        """What a process did between its first and its last reading in a stretch of time; None without two of them.

        Readings from before its first operation are left out: what a program does to start is no part of its work.
        Of children that take each other's places the first reading holds what makes them one.
        """
        with self._lock:
            one = self._followed.get(pid)
            if one is None:
                return None
            ops = list(one.ops)
            begun_ns = min((int(part["entry_ns"].min()) for part in ops if len(part)), default=0)
            start_ns = max(start_ns, begun_ns)
            readings = [at for at in one.readings if start_ns <= at.mono_ns <= end_ns]
            calls = list(one.calls)
        if len(readings) < 2:
            return None
        first, last = replace(readings[0], children=_carry_workers(readings)), readings[-1]
        n_ops, own_ns = _sum_up(ops, first.mono_ns, last.mono_ns)
        cuda_ns = _find_cuda_ns(calls, first.mono_ns, last.mono_ns)
        return Work(first, last, n_ops, own_ns, cuda_ns)

    def find_busiest(self, pid: int) -> int:
        """The thread of a process that was on a processor longest; the process itself where that is not known."""
        with self._lock:
            one = self._followed.get(pid)
            readings = list(one.readings) if one is not None else []
        if not readings:
            return pid
        first, last = readings[0], readings[-1]
        return find_busiest(first, last)

    def find_worker(self, pid: int) -> int | None:
        """A child of a process that of late wanted a processor longer than the process's own busiest thread."""
        with self._lock:
            one = self._followed.get(pid)
            readings = list(one.readings)[-_N_LATE:] if one is not None else []
        if not readings:
            return None
        first, last = readings[0], readings[-1]
        wanted = {child: find_wanted_ns(first, last, child) for child in last.children}
        own = find_wanted_ns(first, last, find_busiest(first, last))
        busiest = max(wanted, key=lambda child: (wanted[child], -child), default=None)
        is_busier = busiest is not None and wanted[busiest] > own
        return busiest if is_busier else None

    def find_ops(self, pid: int, start_ns: int, end_ns: int) -> Records:
        """Operations that a process entered in a stretch of time: rows of ``entry_ns own_ns``, by entry.

        Those whose own time is known: nobody saw what was before a process's first one.
        """
        with self._lock:
            one = self._followed.get(pid)
            ops = np.concatenate([np.zeros(0, _OP), *(one.ops if one is not None else ())])
        is_known = ops["own_ns"] != UNKNOWN_NS
        is_wanted = is_known & (ops["entry_ns"] > start_ns) & (ops["entry_ns"] <= end_ns)
        found: Records = ops[is_wanted]
        return found[np.argsort(found["entry_ns"], kind="stable")]

    def has_op_since(self, pid: int, since_ns: int) -> bool:
        """Whether an operation is known that a process entered after a moment."""
        with self._lock:
            one = self._followed.get(pid)
            ops = list(one.ops) if one is not None else []
        return any((piece["entry_ns"] > since_ns).any() for piece in ops)

    def count_ops(self, pid: int, start_ns: int, end_ns: int) -> int:
        """Operations that a process entered in a stretch of time."""
        with self._lock:
            one = self._followed.get(pid)
            ops = list(one.ops) if one is not None else []
        return _sum_up(ops, start_ns, end_ns)[0]


def _find_limit_use(one: _Followed) -> int:
    """As `_Followed.limit_use`, over the last readings."""
    readings = list(one.readings)[-_N_LATE:]
    if len(readings) < 2 or not readings[-1].quotas:
        return 0
    first, last = replace(readings[0], children=_carry_workers(readings)), readings[-1]
    cuda_ns = _find_cuda_ns(list(one.calls), first.mono_ns, last.mono_ns)
    used = find_limit_use(Work(first, last, 0, 0, cuda_ns))
    return round(min(used, 1.0) * FULL_LIMIT)


def _carry_workers(readings: Sequence[ProcessCounters]) -> dict[int, TaskTimes]:
    """Children at the first reading, each that took the place of one that ended with what that one did as its own.

    A loader's workers are others with each epoch, and do the same: those of the last reading may just have begun.
    """
    began = dict(readings[0].children)
    free: deque[TaskTimes] = deque()
    for was, now in pairwise(readings):
        if was.children.keys() == now.children.keys():
            continue
        for pid in sorted(was.children.keys() - now.children.keys()):
            if (first := began.pop(pid, None)) is not None:
                last = was.children[pid]
                free.append(TaskTimes(last.ran_ns - first.ran_ns, last.ready_ns - first.ready_ns))
        for pid in sorted(now.children.keys() - was.children.keys()):
            start_ticks = now.children[pid].start_ticks
            if start_ticks >= was.boot_ticks:
                done = free.popleft() if free else TaskTimes(0, 0)
                began[pid] = TaskTimes(-done.ran_ns, -done.ready_ns, start_ticks)
    return began


def _is_another(pid: int, last: ProcessCounters, now: ProcessCounters) -> bool:
    """Whether a process has ended and its number was given to another one."""
    was, found = last.threads.get(pid), now.threads.get(pid)
    return was is not None and found is not None and was.start_ticks != found.start_ticks


def _find_cuda_ns(calls: list[tuple[int, float]], start_ns: int, end_ns: int) -> float | None:
    """Time in calls of CUDA between two moments, from what is known every second.

    None where none was made, and where less than half of the time is covered.
    """
    known = [(at, so_far) for at, so_far in calls if start_ns <= at <= end_ns]
    if len(known) < 2 or calls[-1][1] <= 0:
        return None
    (first_ns, before), (last_ns, after) = known[0], known[-1]
    if 2 * (last_ns - first_ns) < end_ns - start_ns:
        return None
    return (after - before) * (end_ns - start_ns) / (last_ns - first_ns)


def _sum_up(pieces: list[Records], start_ns: int, end_ns: int) -> tuple[int, int]:
    """Number and own time of the operations entered between two moments."""
    n_ops = own_ns = 0
    for piece in pieces:
        is_in = (piece["entry_ns"] > start_ns) & (piece["entry_ns"] <= end_ns)
        n_ops += int(is_in.sum())
        own_ns += int(piece["own_ns"][is_in & (piece["own_ns"] != UNKNOWN_NS)].sum())
    return n_ops, own_ns
