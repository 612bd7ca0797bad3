"""Every switch of one process for some seconds: probes of its own, loaded when it is asked about and removed after.

What the node's other probes do is not touched, and no other process is watched.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.agent.capture.probes.engine import Engine, EngineSettings
from ingero.errors import UnsupportedError
from ingero.model.arrays import Records
from ingero.model.counters import OffCpuTimes
from ingero.model.events import HostOp, OffCpuReason
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

PROBES: Final = ("sched", "memory", "fault")
_DRAIN_S: Final = 0.1
_MAX_NAMES: Final = 64
_TEXT: Final = "utf-8"

LOOK_NS: Final = 5 * NS_PER_S
"""In all, with the time that it takes to load the probes, which a busy machine stretches."""
MIN_LOOK_NS: Final = 2 * NS_PER_S
"""Once they are loaded."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of a thread for some seconds.

    Attributes:
        times: Where its time went; its operations are not counted.
        start_ns: When every switch began to be seen, on the monotonic clock.
        end_ns: When that ended.
    """

    times: OffCpuTimes
    start_ns: int
    end_ns: int


WatchSwitches = Callable[[int, int, threading.Event], Look | None]
"""Process, thread, what ends it early → what was seen in about `LOOK_NS`; None where nothing can be."""


@dataclass(slots=True)
class _Sums:
    """Nanoseconds of one thread, by what kept it."""

    pid: int
    tid: int
    by_reason: dict[int, int] = field(default_factory=dict)
    by_op: dict[int, int] = field(default_factory=dict)
    by_others: dict[str, int] = field(default_factory=dict)

    def add_switches(self, records: Records) -> None:
        """``struct ig_off_cpu``; read before this returns."""
        mine = records[records["tid"] == self.tid]
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

    def conclude(self, n_lost: int) -> OffCpuTimes:
        """What is known of it."""
        faults_ns = self.by_op.get(HostOp.PAGE_FAULT, 0)
        reclaim_ns = self.by_op.get(HostOp.DIRECT_RECLAIM, 0)
        io_ns = self.by_reason.get(OffCpuReason.BLOCKED_IO, 0)
        return OffCpuTimes(
            n_ops=0,
            stopped_ns=self.by_reason.get(OffCpuReason.STOPPED, 0),
            io_ns=max(io_ns - faults_ns - reclaim_ns, 0),
            faults_ns=faults_ns,
            reclaim_ns=reclaim_ns,
            by_others_ns=self.by_others,
            n_lost=n_lost,
        )


def watch_switches(clock: Clock, pid: int, tid: int, stop: threading.Event) -> Look | None:
    """Watch one thread; a `WatchSwitches` once it has its clock."""
    sums, began_ns = _Sums(pid, tid), clock.mono_ns()
    try:
        with contextlib.closing(Engine(EngineSettings(host_probes=PROBES))) as engine:
            engine.control.watch_pid(pid)
            # Host probes look at processes that made a call that is probed, and here none is.
            engine.maps["gpu_pids"].update(pid.to_bytes(4, "little"), (1).to_bytes(8, "little"))
            engine.start_host_probes()
            if "off_cpus" not in engine.rings:
                return None
            consume = {
                "off_cpus": sums.add_switches,
                "reclaims": sums.add_spans,
                "faults": sums.add_spans,
            }
            start_ns = clock.mono_ns()
            end_ns = max(start_ns + MIN_LOOK_NS, began_ns + LOOK_NS)
            while clock.mono_ns() < end_ns and not stop.wait(_DRAIN_S):
                engine.drain(consume)
            end_ns = clock.mono_ns()
            engine.drain(consume)
            _, counts = engine.state.read_counts()
            return Look(sums.conclude(int(counts["lost"].sum())), start_ns, end_ns)
    except UnsupportedError:
        return None
