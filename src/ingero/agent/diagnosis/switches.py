"""Every switch of one process for some seconds: probes of its own, loaded when it is asked about and removed after.

What the node's other probes do is not touched, and no other process is watched but its children: a loader's workers.

Source: Linux, Documentation/scheduler/sched-stats.rst (``schedstat``: nanoseconds on a processor and ready to run).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from ingero.agent.capture.discover.processes import find_descendants, read_state
from ingero.agent.capture.probes.engine import Engine, EngineSettings
from ingero.errors import UnsupportedError
from ingero.model.arrays import Records
from ingero.model.counters import ASLEEP, BLOCKED, ENDED, OFF_SPAN, OffCpuTimes
from ingero.model.events import HostOp, OffCpuReason
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

PROBES: Final = ("sched", "memory", "fault")
_DRAIN_S: Final = 0.1
_WORKERS_NS: Final = NS_PER_S // 2
"""Between two looks for children: all processes of the machine are gone through."""
_MAX_NAMES: Final = 64
_TEXT: Final = "utf-8"

MIN_READING: Final = 0.1
"""Part of the time from which a child process that waits for a disk is one that reads."""
MAX_IDLE: Final = 0.1
"""Part of the time up to which it is never idle, so that the reader of its data waits for it."""
MAX_WORKERS: Final = 64


@dataclass(frozen=True, slots=True)
class SwitchTimes:
    """What was seen of a thread for some seconds.

    Attributes:
        times: Where its time went; its operations are not counted.
        start_ns: When every switch began to be seen, on the monotonic clock.
        end_ns: When that ended.
        spans: Its stretches of time off a processor, rows of `OFF_SPAN`, by their start.
    """

    times: OffCpuTimes
    start_ns: int
    end_ns: int
    spans: Records = field(default_factory=lambda: np.zeros(0, OFF_SPAN))


IsEnough = Callable[[int, int], bool]
"""When every switch began to be seen, and now, on the monotonic clock → whether to stop watching."""
WatchSwitches = Callable[[int, int, threading.Event, IsEnough], SwitchTimes | None]
"""Process, thread, what ends it early, what ends it → what was seen until then; None where nothing can be."""


@dataclass(slots=True)
class _Worker:
    """The first thread of a child process, which may begin or end while it is watched.

    Attributes:
        pid: Which.
        start_ns: When it was seen first.
        first_ns: Time on a processor and ready to run, until then.
        end_ns: Until when it is known what it did; what blocks it is known once that has ended.
        ready_ns: Time on a processor and ready to run, from start to end.
        io_ns: Time blocked on I/O, from start to end.
        blocked_ns: The same, until the last record.
        slept_ns: Time asleep, until the last record; how long it was ready to run again is not in it.
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
    def of(cls, pid: int, now_ns: int) -> _Worker | None:
        """A child as it is now; None when it is gone."""
        ready_ns, is_blocked = _read_ready(pid), read_state(pid) == BLOCKED
        if ready_ns is None:
            return None
        return cls(pid, now_ns, ready_ns, now_ns, is_blocked=is_blocked)

    def add(self, rows: Records) -> None:
        """Its own ``struct ig_off_cpu``."""
        if self.is_blocked:
            self.is_blocked, self.start_ns = False, int(rows["header"]["mono_ns"].min())
        blocked = rows[rows["reason"] == OffCpuReason.BLOCKED_IO]
        self.blocked_ns += int((blocked["off_ns"] * blocked["weight"]).sum())
        asleep = rows[rows["reason"] == OffCpuReason.SLEEP]
        self.slept_ns += int(((asleep["off_ns"] - asleep["wait_ns"]) * asleep["weight"]).sum())
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
class _Sums:
    """Nanoseconds of one thread, by what kept it; and what its process's children waited for."""

    pid: int
    tid: int
    workers: dict[int, _Worker] = field(default_factory=dict)
    by_reason: dict[int, int] = field(default_factory=dict)
    by_op: dict[int, int] = field(default_factory=dict)
    by_others: dict[str, int] = field(default_factory=dict)
    spans: list[Records] = field(default_factory=list)

    def add_switches(self, records: Records) -> None:
        """``struct ig_off_cpu``; read before this returns."""
        for tid in np.unique(records["tid"]).tolist():
            if tid in self.workers:
                self.workers[tid].add(records[records["tid"] == tid])
        mine = records[records["tid"] == self.tid]
        self.spans.append(_read_spans(mine))
        took = mine["off_ns"] * mine["weight"]
        for reason in np.unique(mine["reason"]).tolist():
            spent_ns = int(took[mine["reason"] == reason].sum())
            self.by_reason[reason] = self.by_reason.get(reason, 0) + spent_ns
        others = mine[
            (mine["reason"] == OffCpuReason.PREEMPTED)
            & (mine["other_pid"] != 0)
            & (mine["other_pid"] != self.pid)
        ]
        for record in others:
            name = bytes(record["other_comm"]).split(b"\0")[0].decode(_TEXT, "replace")
            if name in self.by_others or len(self.by_others) < _MAX_NAMES:
                self.by_others[name] = self.by_others.get(name, 0) + int(record["off_ns"])

    def add_spans(self, records: Records) -> None:
        """``struct ig_span``; read before this returns."""
        mine = records[records["tid"] == self.tid]
        for op in np.unique(mine["op"]).tolist():
            rows = mine[mine["op"] == op]
            spent_ns = int((rows["duration_ns"] * rows["weight"]).sum())
            self.by_op[op] = self.by_op.get(op, 0) + spent_ns

    def conclude(self, n_lost: int, window_ns: int) -> OffCpuTimes:
        """What is known of it after so long."""
        faults_ns = self.by_op.get(HostOp.PAGE_FAULT, 0)
        reclaim_ns = self.by_op.get(HostOp.DIRECT_RECLAIM, 0)
        io_ns = self.by_reason.get(OffCpuReason.BLOCKED_IO, 0)
        return OffCpuTimes(
            n_ops=0,
            stopped_ns=self.by_reason.get(OffCpuReason.STOPPED, 0),
            io_ns=max(io_ns - faults_ns - reclaim_ns, 0),
            faults_ns=faults_ns,
            reclaim_ns=reclaim_ns,
            worker_io_ns=self._find_wait_for_workers(window_ns),
            by_others_ns=self.by_others,
            n_lost=n_lost,
        )

    def _find_wait_for_workers(self, window_ns: int) -> int:
        """The part of its sleep in which it waited for children that read, when none of these is ever idle."""
        readers = [one for one in self.workers.values() if one.is_reader]
        if not readers or not all(one.is_busy for one in readers):
            return 0
        reading = sum(one.io_ns for one in readers) / sum(one.took_ns for one in readers)
        there = _measure_union([(one.start_ns, one.end_ns) for one in readers]) / window_ns
        slept_ns = min(self.by_reason.get(OffCpuReason.SLEEP, 0), window_ns)
        return round(min(reading, 1.0) * min(there, 1.0) * slept_ns)

    def find_workers(self, watch: Callable[[int], None], now_ns: int) -> None:
        """Watch children that have begun, at most `MAX_WORKERS` in all, and see how far the others are."""
        for one in self.workers.values():
            one.read(now_ns)
        new = sorted(find_descendants([self.pid]) - set(self.workers))
        for pid in new[: MAX_WORKERS - len(self.workers)]:
            watch(pid)
            found = _Worker.of(pid, now_ns)
            if found is not None:
                self.workers[pid] = found


def _measure_union(spans: Sequence[tuple[int, int]]) -> int:
    """Length of what intervals cover."""
    covered = until = 0
    for start, end in sorted(spans):
        covered += max(end - max(start, until), 0)
        until = max(until, end)
    return covered


def _read_spans(records: Records) -> Records:
    """``struct ig_off_cpu`` of one thread as rows of `OFF_SPAN`."""
    spans = np.zeros(len(records), OFF_SPAN)
    spans["start_ns"] = records["header"]["mono_ns"]
    for name in ("off_ns", "wait_ns", "reason"):
        spans[name] = records[name]
    return spans


def _read_ready(pid: int) -> int | None:
    try:
        fields = Path("/proc", str(pid), "schedstat").read_text().split()
    except OSError:
        return None
    return int(fields[0]) + int(fields[1])


def watch_switches(
    clock: Clock, pid: int, tid: int, stop: threading.Event, is_enough: IsEnough
) -> SwitchTimes | None:
    """Watch one thread and its process's children; a `WatchSwitches` once it has its clock."""
    sums, settings = _Sums(pid, tid), EngineSettings(host_probes=PROBES, probes_calls=False)
    try:
        with contextlib.closing(Engine(settings)) as engine:

            def watch(child: int) -> None:
                engine.control.watch_pid(child)
                # Host probes look at processes that made a call that is probed, and here none is.
                engine.maps["gpu_pids"].update(
                    child.to_bytes(4, "little"), (1).to_bytes(8, "little")
                )

            watch(pid)
            engine.start_host_probes()
            if "off_cpus" not in engine.rings:
                return None
            consume = {
                "off_cpus": sums.add_switches,
                "reclaims": sums.add_spans,
                "faults": sums.add_spans,
            }
            start_ns = next_ns = clock.mono_ns()
            while not is_enough(start_ns, now_ns := clock.mono_ns()):
                engine.drain(consume)
                if now_ns >= next_ns:
                    sums.find_workers(watch, now_ns)
                    next_ns = now_ns + _WORKERS_NS
                if stop.wait(_DRAIN_S):
                    break
            end_ns = clock.mono_ns()
            engine.drain(consume)
            sums.find_workers(watch, end_ns)
            _, counts = engine.state.read_counts()
            n_lost = int(counts["lost"].sum())
            spans = np.concatenate([np.zeros(0, OFF_SPAN), *sums.spans])
            return SwitchTimes(
                sums.conclude(n_lost, end_ns - start_ns),
                start_ns,
                end_ns,
                spans[np.argsort(spans["start_ns"], kind="stable")],
            )
    except UnsupportedError:
        return None
