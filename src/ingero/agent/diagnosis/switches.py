"""Every switch of one process for some seconds: probes of its own, loaded when it is asked about and removed after.

What the node's other probes do is not touched, and no other process is watched but its children: a loader's workers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.agent.capture.probes.engine import Engine, EngineSettings
from ingero.agent.diagnosis.children import Children
from ingero.errors import UnsupportedError
from ingero.model.arrays import Records
from ingero.model.counters import OFF_SPAN, OffCpuTimes
from ingero.model.events import HostOp, OffCpuReason
from ingero.telemetry.clock import Clock

PROBES: Final = ("sched", "memory", "fault")
_DRAIN_S: Final = 0.1
_MAX_NAMES: Final = 64
_TEXT: Final = "utf-8"


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
class _Sums:
    """Nanoseconds of one thread, by what kept it. When it was ready to run again is in no reason's time."""

    pid: int
    tid: int
    children: Children
    by_reason: dict[int, int] = field(default_factory=dict)
    by_op: dict[int, int] = field(default_factory=dict)
    by_others: dict[str, int] = field(default_factory=dict)
    spans: list[Records] = field(default_factory=list)

    def add_switches(self, records: Records) -> None:
        """``struct ig_off_cpu``; read before this returns."""
        self.children.add(records)
        mine = records[records["tid"] == self.tid]
        self.spans.append(_read_spans(mine))
        took = (mine["off_ns"] - mine["wait_ns"]) * mine["weight"]
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
        slept_ns = min(self.by_reason.get(OffCpuReason.SLEEP, 0), window_ns)
        return OffCpuTimes(
            n_ops=0,
            stopped_ns=self.by_reason.get(OffCpuReason.STOPPED, 0),
            io_ns=max(io_ns - faults_ns - reclaim_ns, 0),
            faults_ns=faults_ns,
            reclaim_ns=reclaim_ns,
            worker_io_ns=round(self.children.find_reading(window_ns) * slept_ns),
            by_others_ns=self.by_others,
            n_lost=n_lost,
        )


def _read_spans(records: Records) -> Records:
    """``struct ig_off_cpu`` of one thread as rows of `OFF_SPAN`."""
    spans = np.zeros(len(records), OFF_SPAN)
    spans["start_ns"] = records["header"]["mono_ns"]
    for name in ("off_ns", "wait_ns", "reason"):
        spans[name] = records[name]
    return spans


def watch_switches(
    clock: Clock, pid: int, tid: int, stop: threading.Event, is_enough: IsEnough
) -> SwitchTimes | None:
    """Watch one thread and its process's children; a `WatchSwitches` once it has its clock."""
    settings = EngineSettings(host_probes=PROBES, probes_calls=False)
    sums = _Sums(pid, tid, Children(pid))
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
            start_ns = clock.mono_ns()
            while not is_enough(start_ns, now_ns := clock.mono_ns()):
                engine.drain(consume)
                sums.children.read_due(watch, now_ns)
                if stop.wait(_DRAIN_S):
                    break
            end_ns = clock.mono_ns()
            engine.drain(consume)
            sums.children.read(watch, end_ns)
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
