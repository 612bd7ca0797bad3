"""Every switch of one process for some seconds: probes of its own, loaded when it is asked about and removed after.

What the node's other probes do is not touched, and no other process is watched but its children: a loader's workers.

Source: Linux, Documentation/scheduler/sched-stats.rst (``schedstat``: nanoseconds on a processor and ready to run).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from ingero.agent.capture.discover.processes import find_descendants
from ingero.agent.capture.probes.engine import Engine, EngineSettings
from ingero.errors import UnsupportedError
from ingero.model.arrays import Records
from ingero.model.counters import OFF_SPAN, OffCpuTimes
from ingero.model.events import HostOp, OffCpuReason
from ingero.telemetry.clock import Clock

PROBES: Final = ("sched", "memory", "fault")
_DRAIN_S: Final = 0.1
_MAX_NAMES: Final = 64
_TEXT: Final = "utf-8"

MIN_READING: Final = 0.1
"""Part of the time from which a child process that waits for a disk is one that reads."""
MIN_BUSY: Final = 0.9
"""Part of the time from which it is never idle, so that the reader of its data waits for it."""
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
    """The first thread of a child process.

    Attributes:
        pid: Which.
        first_ns: Time on a processor and ready to run, when every switch began to be seen.
        io_ns: Time blocked on I/O since.
    """

    pid: int
    first_ns: int
    io_ns: int = 0

    @classmethod
    def of(cls, pid: int) -> _Worker | None:
        """A child as it is now; None when it is gone."""
        ready_ns = _read_ready(pid)
        return None if ready_ns is None else cls(pid, ready_ns)

    def is_busy(self, window_ns: int) -> bool:
        """Whether it was hardly ever idle."""
        ready_ns = _read_ready(self.pid)
        spent_ns = 0 if ready_ns is None else ready_ns - self.first_ns + self.io_ns
        return spent_ns >= MIN_BUSY * window_ns


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
        blocked = records[records["reason"] == OffCpuReason.BLOCKED_IO]
        for tid in np.unique(blocked["tid"]).tolist():
            if tid in self.workers:
                rows = blocked[blocked["tid"] == tid]
                self.workers[tid].io_ns += int((rows["off_ns"] * rows["weight"]).sum())
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
        readers = [one for one in self.workers.values() if one.io_ns >= MIN_READING * window_ns]
        if not readers or not all(one.is_busy(window_ns) for one in readers):
            return 0
        share = sum(one.io_ns for one in readers) / (len(readers) * window_ns)
        slept_ns = min(self.by_reason.get(OffCpuReason.SLEEP, 0), window_ns)
        return round(min(share, 1.0) * slept_ns)


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
            children = sorted(find_descendants([pid]))[:MAX_WORKERS]
            for one in (pid, *children):
                engine.control.watch_pid(one)
                # Host probes look at processes that made a call that is probed, and here none is.
                engine.maps["gpu_pids"].update(one.to_bytes(4, "little"), (1).to_bytes(8, "little"))
            engine.start_host_probes()
            if "off_cpus" not in engine.rings:
                return None
            consume = {
                "off_cpus": sums.add_switches,
                "reclaims": sums.add_spans,
                "faults": sums.add_spans,
            }
            found = map(_Worker.of, children)
            sums.workers = {one.pid: one for one in found if one is not None}
            start_ns = clock.mono_ns()
            while not is_enough(start_ns, clock.mono_ns()) and not stop.wait(_DRAIN_S):
                engine.drain(consume)
            end_ns = clock.mono_ns()
            engine.drain(consume)
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
