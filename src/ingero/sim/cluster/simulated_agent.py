"""A live agent without probes: the simulated rank reports its own calls, and they go where a kernel's records would.

For machines where no probe can be loaded. Everything behind the records is the real agent;
docs/specs/simulator-calls.md has their layout.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from ingero.agent.capture.kernel.abi import get_dtype
from ingero.agent.capture.probes.state import build_in_flight
from ingero.agent.capture.session import DRAIN_MS, TICK_NS
from ingero.agent.capture.totals import Totals
from ingero.agent.health.service import AgentSettings
from ingero.agent.push.live import LiveCallbacks, LiveObserver, open_live
from ingero.model.arrays import Records
from ingero.model.events import CudaOp, NcclOp, Source
from ingero.sim.job import COLLECTIVE, REPORT, WAIT
from ingero.telemetry.clock import Clock, SystemClock

_MAX_BYTES: Final = 1 << 20
_COUNTED: Final = (
    (Source.CUDA, CudaOp.LAUNCH_KERNEL),
    (Source.NCCL, NcclOp.ALL_REDUCE),
    (Source.CUDA, CudaOp.STREAM_SYNC),
)


def build_collectives(rows: Records, pid: int) -> Records:
    """Rows of REPORT that are collectives as ``struct ig_collective``, in order."""
    rows = rows[rows["what"] == COLLECTIVE]
    records = np.zeros(len(rows), get_dtype("collective"))
    for name in ("duration_ns", "seq", "bytes", "rank"):
        records[name] = rows[name]
    records["header"]["mono_ns"] = rows["mono_ns"]
    records["nranks"], records["comm_hash"] = rows["n_ranks"], rows["comm"]
    records["pid"], records["weight"] = pid, 1
    records["source"], records["op"] = Source.NCCL, NcclOp.ALL_REDUCE
    return records


def build_waits(rows: Records, pid: int) -> Records:
    """Rows of REPORT that are synchronisations as ``struct ig_call``, in order."""
    rows = rows[rows["what"] == WAIT]
    records = np.zeros(len(rows), get_dtype("call"))
    records["header"]["mono_ns"], records["duration_ns"] = rows["mono_ns"], rows["duration_ns"]
    records["pid"], records["weight"] = pid, 1
    records["source"], records["op"] = Source.CUDA, CudaOp.STREAM_SYNC
    return records


@dataclass(slots=True)
class _Counts:
    """What a rank called, by the kinds of `_COUNTED`.

    Calls and nanoseconds, since the start and since the last totals.
    """

    pid: int
    sums: Records = field(default_factory=lambda: np.zeros((len(_COUNTED), 2), np.int64))
    before: Records = field(default_factory=lambda: np.zeros((len(_COUNTED), 2), np.int64))

    def add(self, rows: Records) -> None:
        """Take the next rows of REPORT."""
        self.sums[0, 0] += int(rows["n_launches"].sum())
        for at, what in ((1, COLLECTIVE), (2, WAIT)):
            mine = rows[rows["what"] == what]
            self.sums[at] += len(mine), int(mine["duration_ns"].sum())

    def take(self, mono_ns: int, wall_ns: int, started_ns: int) -> Totals:
        """The totals of now."""
        keys = np.zeros(len(_COUNTED), get_dtype("count_key"))
        keys["pid"] = self.pid
        keys["source"], keys["op"] = np.array(_COUNTED).T
        counts, changes = (np.zeros(len(keys), get_dtype("count")) for _ in range(2))
        for table, sums in ((counts, self.sums), (changes, self.sums - self.before)):
            for name in ("entered", "seen", "emitted"):
                table[name] = sums[:, 0]
            table["total_ns"] = sums[:, 1]
        self.before = self.sums.copy()
        in_flight = build_in_flight()
        return Totals(
            mono_ns,
            wall_ns,
            mono_ns - started_ns,
            keys,
            counts,
            changes,
            {},
            in_flight,
            keep_one_in=1,
        )


class ReportReader:
    """Reads what a rank appended to its file.

    Args:
        path: The file; not there yet is no error.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> Records:
        """Rows of REPORT since the last time, shape (n,)."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read(_MAX_BYTES)
        except FileNotFoundError:
            data = b""
        whole = len(data) - len(data) % REPORT.itemsize
        self._at += whole
        return np.frombuffer(data[:whole], REPORT)


@dataclass(slots=True)
class SimulatedAgent:
    """The live agent of a host whose rank reports its own calls; `run` ends when its event is set.

    Attributes:
        health: Who it is and where Fleet is.
        pid: The rank's process.
        rank: Its global rank.
        path: The file in which it reports its calls.
        on_ready: Called once everything runs.
    """

    health: AgentSettings
    pid: int
    rank: int
    path: Path
    on_ready: Callable[[], None] = lambda: None
    clock: Clock = field(default_factory=SystemClock)

    def run(self, stop: threading.Event) -> None:
        """Read and push.

        Raises:
            IngeroError: The local socket cannot be used.
        """
        pidfd = os.pidfd_open(self.pid)
        try:
            with open_live(self.health, self.clock, LiveCallbacks(can_probe=False)) as observer:
                observer.pusher.note_process(self.pid, self.rank)
                self.on_ready()
                self._follow(observer, pidfd, stop)
        finally:
            os.close(pidfd)

    def _follow(self, observer: LiveObserver, pidfd: int, stop: threading.Event) -> None:
        reader, counts = ReportReader(self.path), _Counts(self.pid)
        started_ns = self.clock.mono_ns()
        next_tick_ns = started_ns + TICK_NS
        process = select.poll()
        process.register(pidfd, select.POLLIN)
        while not stop.wait(DRAIN_MS / 1000):
            is_over = bool(process.poll(0))  # before the read: its last reports are still taken
            rows = reader.read()
            if len(rows):
                observer.pusher.add_collectives(build_collectives(rows, self.pid))
                observer.pusher.add_calls(build_waits(rows, self.pid))
                counts.add(rows)
            if is_over:
                observer.pusher.note_exit(self.pid)
                process.unregister(pidfd)
            mono_ns = self.clock.mono_ns()
            if mono_ns >= next_tick_ns:
                next_tick_ns += TICK_NS
                observer.on_totals(counts.take(mono_ns, self.clock.wall_ns(), started_ns))
