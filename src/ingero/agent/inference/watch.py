"""Watches programs that serve while they are traced: an observer, once a second.

Rows of several rings arrive out of order. What ended before the totals of the second before is complete then: a
reading of all rings lies between two totals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.capture.events import find_preemptors
from ingero.agent.capture.totals import Totals
from ingero.agent.health.signals.node_facts import hash_cgroup_path
from ingero.agent.inference.causes import find_causes
from ingero.agent.inference.stream import ServingStream
from ingero.detect.inference.allocations import AllocationAges
from ingero.detect.inference.baseline import BUCKETS
from ingero.detect.inference.phases import PHASE_NAMES
from ingero.detect.inference.steps import StepFinder, build_calls, find_workloads
from ingero.model.arrays import IntArray, Records
from ingero.model.events import EVENT, Events, HostOp, Source
from ingero.model.incidents import Cause
from ingero.model.recording import ProcessRank

MAX_WORKLOADS: Final = 1024
MAX_REPORTED: Final = 32
"""Outliers that are reported with their causes, of one second; the greatest of them."""
MAX_KEPT: Final = 100_000
"""Rows that are kept for causes: 11 MiB."""
MAX_NAMES: Final = 65_536
AGE_BOUNDS_MS: Final = (
    10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 120_000, 300_000, 600_000,
)  # fmt: skip
_NS_PER_MS: Final = 1e6


@dataclass(frozen=True, slots=True)
class InferenceSettings:
    """How servers are watched.

    Attributes:
        warmup: Steps to see before a phase is named or a step is an outlier.
        outlier_ratio: Times the 95th percentile, from which an outlier is in the last bucket.
        top_n: Oldest allocations that are reported with an outlier.
        max_per_pid: Allocations that are followed of one process.
    """

    warmup: int = 30
    outlier_ratio: float = 3.0
    top_n: int = 5
    max_per_pid: int = 8192


@dataclass(frozen=True, slots=True)
class StepOutlier:
    """A step that took far longer than its like.

    Attributes:
        pid: Process.
        process: Its name.
        stream: Handle of its stream.
        phase: Such as ``decode``.
        bucket: How far, such as ``2x``.
        start_ns: First moment, Unix time.
        duration_ns: How long it took.
        p95_ns: 95th percentile of its like.
        mean_ns: Mean of its like.
        causes: Why, with shares of its time.
        ages_ms: Ages of the oldest device memory of the process, oldest first.
        cgroup_path_hash: Of the process; empty without a cgroup.
        rank: Of the process in its job; None when it has none.
        world_size: Ranks of that job; 0 when it has none.
    """

    pid: int
    process: str
    stream: int
    phase: str
    bucket: str
    start_ns: int
    duration_ns: int
    p95_ns: int
    mean_ns: int
    causes: tuple[Cause, ...]
    ages_ms: tuple[int, ...]
    cgroup_path_hash: str
    rank: int | None
    world_size: int


@dataclass(slots=True)
class InferenceCounts:
    """What was seen of all servers so far.

    Attributes:
        n_reported: Outliers that were reported.
        n_unreported: Outliers that were counted only, because there were many in one second.
        outliers: By bucket, all of them.
        throttled: By bucket, those while a device was held down.
        ages: Released allocations per bucket of `AGE_BOUNDS_MS`, not cumulative; one more than bounds.
        ages_total_ms: Sum of their ages.
        n_forgotten: Streams that were forgotten because there were too many.
    """

    n_reported: int = 0
    n_unreported: int = 0
    outliers: IntArray = field(default_factory=lambda: np.zeros(len(BUCKETS), np.int64))
    throttled: IntArray = field(default_factory=lambda: np.zeros(len(BUCKETS), np.int64))
    ages: IntArray = field(default_factory=lambda: np.zeros(len(AGE_BOUNDS_MS) + 1, np.int64))
    ages_total_ms: float = 0.0
    n_forgotten: int = 0


class InferenceWatch:
    """Finds steps, phases and outliers of every traced process that serves. Put it before the output.

    Args:
        settings: When a step counts as too long, and how much is remembered.
        report: Called with each outlier, in the tracing thread.
        is_throttled: Whether a device is held down by power or heat now.

    Attributes:
        workloads: By process and stream, newest last.
        finder: Finds the steps; has counts of what it left out.
        allocations: Device memory that is held.
        counts: What was seen so far.
    """

    def __init__(
        self,
        settings: InferenceSettings,
        report: Callable[[StepOutlier], None],
        is_throttled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.workloads: dict[tuple[int, int], ServingStream] = {}
        self.finder = StepFinder()
        self.allocations = AllocationAges(settings.max_per_pid)
        self.counts = InferenceCounts()
        self._settings = settings
        self._report = report
        self._is_throttled = is_throttled
        self._identities: dict[int, ProcessIdentity] = {}
        self._names: dict[int, str] = {}
        self._pending: list[Events] = []
        self._kept: deque[Events] = deque()
        self._until_ns = 0

    def on_process(self, identity: ProcessIdentity) -> None:
        """Remember who it is; a pid that is used again is another process."""
        known = self._identities.get(identity.pid)
        if known is not None and known.start_ticks != identity.start_ticks:
            for key in [key for key in self.workloads if key[0] == identity.pid]:
                del self.workloads[key]
        self._identities[identity.pid] = identity
        self._names[identity.pid] = identity.name
        _drop_oldest(self._identities)

    def on_events(self, ring: str, records: Records, events: Events) -> None:
        """Keep the rows for the next totals, and the names of those who took a CPU."""
        if ring == "off_cpus":
            self._names |= find_preemptors(records, self._names)
            _drop_oldest(self._names)
        self._pending.append(events)

    def on_totals(self, totals: Totals) -> None:
        """Judge what is complete."""
        rows = np.concatenate([np.zeros(0, EVENT), *self._pending])
        is_ready = rows["start_ns"] + rows["duration_ns"] <= self._until_ns
        if totals.is_last:
            is_ready[:] = True
        self._pending = [rows[~is_ready]]
        self._until_ns = totals.wall_ns
        ready = rows[is_ready]
        if len(ready) or totals.is_last:
            self._judge(ready, is_last=totals.is_last)

    def _judge(self, rows: Events, *, is_last: bool) -> None:
        self._keep(rows)
        ages_ms = self.allocations.take(rows) / _NS_PER_MS
        self.counts.ages += np.bincount(
            np.searchsorted(AGE_BOUNDS_MS, ages_ms, side="left"), minlength=len(AGE_BOUNDS_MS) + 1
        )
        self.counts.ages_total_ms += float(ages_ms.sum())
        steps = self.finder.take(build_calls(rows))
        by_stream = find_workloads(steps)
        rest = {key: np.zeros(0, np.int64) for key in self.workloads if is_last}
        found: list[tuple[Records, int, int]] = []
        for key, which in {**rest, **by_stream}.items():
            own, phases, buckets = self._find(key).take(steps[which], is_last=is_last)
            found += [
                (own[i], int(phases[i]), int(buckets[i])) for i in np.flatnonzero(buckets).tolist()
            ]
        buckets_found = np.bincount([bucket for _, _, bucket in found], minlength=len(BUCKETS))
        self.counts.outliers += buckets_found
        if found and self._is_throttled():
            self.counts.throttled += buckets_found
        found.sort(key=lambda one: -int(one[0]["end_ns"] - one[0]["start_ns"]))
        self.counts.n_unreported += len(found[MAX_REPORTED:])
        for step, phase, bucket in sorted(
            found[:MAX_REPORTED], key=lambda one: int(one[0]["end_ns"])
        ):
            self.counts.n_reported += 1
            self._report(self._build_outlier(step, phase, bucket))
        is_exit = (rows["source"] == Source.HOST) & (rows["op"] == HostOp.EXIT)
        if is_exit.any():
            ended = set(rows["pid"][is_exit].tolist())
            self.finder.forget(ended)
            self.allocations.forget(ended)

    def _build_outlier(self, step: Records, phase: int, bucket: int) -> StepOutlier:
        pid, stream = int(step["pid"]), int(step["stream"])
        record = self.workloads[pid, stream].find(phase)
        rows = np.concatenate([
            part[
                (part["start_ns"] < step["end_ns"])
                & (part["start_ns"] + part["duration_ns"] > step["start_ns"])
            ]
            for part in self._kept
        ])
        place = self._identities[pid].place if pid in self._identities else ProcessRank()
        return StepOutlier(
            pid=pid,
            process=self.find_name(pid),
            stream=stream,
            phase=PHASE_NAMES[phase],
            bucket=BUCKETS[bucket],
            start_ns=int(step["start_ns"]),
            duration_ns=int(step["end_ns"] - step["start_ns"]),
            p95_ns=round(record.baseline.p95_ns),
            mean_ns=round(record.baseline.mean_ns),
            causes=find_causes(rows, self._names, step, record.usual),
            ages_ms=self.allocations.find_oldest_ms(pid, int(step["end_ns"]), self._settings.top_n),
            cgroup_path_hash=self.find_cgroup_hash(pid),
            rank=place.rank if place.rank >= 0 else None,
            world_size=max(place.world_size, 0),
        )

    def _keep(self, rows: Events) -> None:
        """Keep rows for the causes of steps that end later."""
        self._kept.append(rows)
        n_rows = sum(map(len, self._kept))
        while len(self._kept) > 1 and n_rows > MAX_KEPT:
            n_rows -= len(self._kept.popleft())

    def _find(self, key: tuple[int, int]) -> ServingStream:
        """What is known of a stream; that which had no step for longest is forgotten beyond `MAX_WORKLOADS`."""
        workload = self.workloads.pop(key, None)
        if workload is None:
            workload = ServingStream(self._settings.warmup, self._settings.outlier_ratio)
        self.workloads[key] = workload
        if len(self.workloads) > MAX_WORKLOADS:
            del self.workloads[next(iter(self.workloads))]
            self.counts.n_forgotten += 1
        return workload

    def find_name(self, pid: int) -> str:
        """Name of a process."""
        return self._names.get(pid) or f"pid {pid}"

    def find_cgroup_hash(self, pid: int) -> str:
        """First 16 hexadecimal digits of the SHA-256 of a process's cgroup path; empty without one."""
        identity = self._identities.get(pid)
        return hash_cgroup_path(identity.cgroup) if identity is not None else ""

    def iter_phases(self) -> Iterator[tuple[int, int, str, ServingStream]]:
        """Process, stream, phase and workload of everything that is known, by process and stream."""
        for (pid, stream), workload in sorted(self.workloads.items()):
            for phase in sorted(workload.phases):
                yield pid, stream, phase, workload


def _drop_oldest(known: dict[int, Any]) -> None:
    while len(known) > MAX_NAMES:
        del known[next(iter(known))]
