"""Which rows of a trace are kept, with the exact counts of all calls: chosen once, for all sinks.

For ten seconds every record is kept. After that kinds that are sampled (`ingero.model.sampling`) are thinned further.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.capture.events import find_preemptors
from ingero.agent.capture.kernel.abi import ProcessEvent
from ingero.agent.capture.open_calls import RING as OPEN_RING
from ingero.agent.capture.totals import Totals
from ingero.agent.trace.thinning import thin
from ingero.model.arrays import Records
from ingero.model.events import Events, Source
from ingero.model.gpu_view import GpuView
from ingero.model.latency import build_bucket_edges_ns
from ingero.model.recording import AGGREGATE, COVERAGE, HISTOGRAM, ProcessRank
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

BUCKET_NS: Final = 60 * NS_PER_S
EVERYTHING_NS: Final = 10 * NS_PER_S
_N_SOURCES: Final = 256
_MAX_PENDING: Final = 50_000
"""Rows held between two totals: 6 MiB."""
NAMED_NS: Final = 60 * NS_PER_S
"""How long the name of a task that took a CPU holds: of most such tasks no end is seen, and a pid is used again."""

_UNCOUNTED_RINGS: Final = ("processes", "victims", OPEN_RING)
"""Rings whose records the kernel does not count by operation: every one is delivered or in ``losses``."""


FindFamily = Callable[[int], Mapping[int, int]]


class Sink(Protocol):
    """Keeps what was chosen. Called in the tracing thread; what it is given is not changed afterwards."""

    def put_events(self, events: Events, /) -> object:
        """Rows of EVENT; ``stored`` of the counts is theirs to add."""
        ...

    def put_aggregates(self, rows: Records, /) -> object:
        """Rows of AGGREGATE to add up."""
        ...

    def put_histograms(self, rows: Records, /) -> object:
        """Rows of HISTOGRAM to add up."""
        ...

    def put_coverage(self, rows: Records, /) -> object:
        """Rows of COVERAGE to add up."""
        ...

    def put_snapshots(self, snapshots: Records, /) -> object:
        """Rows of SNAPSHOT."""
        ...

    def put_gpu_model(self, model: str, /) -> object:
        """Which GPUs this run sees."""
        ...

    def put_process_names(self, names: Mapping[int, str], seen_wall_ns: int, /) -> object:
        """Names of processes and threads."""
        ...

    def put_parents(self, parents: Mapping[int, int], /) -> object:
        """Parents of processes, other than those whose forks are among the rows."""
        ...

    def put_gpu_views(self, views: Mapping[int, GpuView], /) -> object:
        """Which GPUs processes are shown."""
        ...

    def put_ranks(self, ranks: Mapping[int, ProcessRank], /) -> object:
        """Places of processes in their job."""
        ...


class Selection:
    """Chooses rows and builds counts, and hands them to its sinks; an observer.

    Args:
        clock: Both clocks.
        sinks: Keep what is chosen.
        keep_all: Keep every record.
        find_family: Parent by child, of a process and of the children that it has when it is first seen.
    """

    def __init__(
        self,
        clock: Clock,
        sinks: Sequence[Sink],
        *,
        keep_all: bool = False,
        find_family: FindFamily | None = None,
    ) -> None:
        self._clock = clock
        self._sinks = list(sinks)
        self._keep_all = keep_all
        self._find_family = find_family
        self._started_ns = clock.mono_ns()
        self._batches: list[Events] = []
        self._left_out: dict[int, int] = {}
        self._n_host_lost = 0
        self._uncounted: dict[int, int] = {}
        self._processes: set[int] = set()
        self._preemptors: dict[int, int] = {}  # when each was named, the oldest first

    def add(self, sink: Sink) -> None:
        """Hand what is chosen from now on to one more."""
        self._sinks.append(sink)

    def on_process(self, identity: ProcessIdentity) -> None:
        """Name the process, its place in the job, its parent and its children."""
        self._processes.add(identity.pid)
        family = self._find_family(identity.pid) if self._find_family else {}
        for sink in self._sinks:
            sink.put_process_names({identity.pid: identity.name}, self._clock.wall_ns())
            if identity.assignment.gpus is not None:
                sink.put_gpu_views({identity.pid: identity.assignment.gpus})
            if family:
                sink.put_parents(family)
            if identity.launcher:
                sink.put_ranks({identity.pid: identity.place})

    def on_events(self, ring: str, records: Records, events: Events) -> None:
        """Keep the batch for the next totals: many small batches cost more than one large one."""
        if ring in _UNCOUNTED_RINGS:
            self._note_uncounted(events)
        if len(records) > len(events):  # kinds that a recording has no code for
            self._left_out[Source.IO] = (
                self._left_out.get(Source.IO, 0) + len(records) - len(events)
            )
        if ring == "off_cpus":
            self._name_preemptors(records)
        elif ring == "processes":
            self._processes.difference_update(
                records["pid"][records["event"] == ProcessEvent.EXIT].tolist()
            )
        self._batches.append(events)
        if sum(map(len, self._batches)) > _MAX_PENDING:
            self.flush()

    def on_unrecorded_ends(self, pids: Collection[int]) -> None:
        """Processes ended that no record tells of."""
        self._processes.difference_update(pids)

    def _name_preemptors(self, records: Records) -> None:
        """Name the tasks that took a thread's CPU, as the kernel read it then: a task may be gone by now."""
        now_ns = self._clock.mono_ns()
        while self._preemptors and now_ns - next(iter(self._preemptors.values())) >= NAMED_NS:
            del self._preemptors[next(iter(self._preemptors))]
        names = find_preemptors(records, self._processes | self._preemptors.keys())
        if not names:
            return
        self._preemptors |= dict.fromkeys(names, now_ns)
        for sink in self._sinks:
            sink.put_process_names(names, self._clock.wall_ns())

    def put_facts(self, events: Events) -> None:
        """Keep rows that no probe counted, such as NVML's; each is seen and stored. The tracing thread."""
        if len(events):
            self._note_uncounted(events)
            self._batches.append(events)

    def put_snapshots(self, snapshots: Records) -> None:
        """Keep samples of the whole machine (SNAPSHOT). The tracing thread."""
        for sink in self._sinks:
            sink.put_snapshots(snapshots)

    def put_gpu_model(self, model: str) -> None:
        """Note which GPUs this run sees."""
        for sink in self._sinks:
            sink.put_gpu_model(model)

    def _note_uncounted(self, events: Events) -> None:
        sources, n_rows = np.unique(events["source"], return_counts=True)
        for source, n in zip(sources.tolist(), n_rows.tolist(), strict=True):
            self._uncounted[source] = self._uncounted.get(source, 0) + n

    def flush(self) -> None:
        """Hand over the rows worth keeping."""
        if not self._batches:
            return
        events = np.concatenate(self._batches)
        self._batches.clear()
        kept = events
        if not self._keep_all and self._clock.mono_ns() - self._started_ns >= EVERYTHING_NS:
            kept = thin(events)
        if len(kept):
            for sink in self._sinks:
                sink.put_events(kept)
        n_left = np.bincount(events["source"], minlength=_N_SOURCES) - np.bincount(
            kept["source"], minlength=_N_SOURCES
        )
        for source in np.flatnonzero(n_left).tolist():
            self._left_out[source] = self._left_out.get(source, 0) + int(n_left[source])

    def on_totals(self, totals: Totals) -> None:
        """Hand over the rows of the last second and its exact counts."""
        self.flush()
        bucket_ns = totals.wall_ns // BUCKET_NS * BUCKET_NS
        is_active = totals.changes["seen"] > 0
        keys, changes = totals.keys[is_active], totals.changes[is_active]
        n_host_lost = totals.losses.get("host_lost", 0)  # rows that nothing else counts
        lost_now = max(n_host_lost - self._n_host_lost, 0)
        self._n_host_lost = max(n_host_lost, self._n_host_lost)
        coverage = build_coverage(keys, changes, self._left_out, self._uncounted, lost_now)
        coverage["bucket_ns"] = bucket_ns
        aggregates = build_aggregates(keys, changes, bucket_ns)
        histograms = build_histograms(keys, changes, bucket_ns)
        for sink in self._sinks:
            if len(keys):
                sink.put_aggregates(aggregates)
                sink.put_histograms(histograms)
            if len(coverage):
                sink.put_coverage(coverage)
        self._left_out.clear()
        self._uncounted.clear()


def build_aggregates(keys: Records, changes: Records, bucket_ns: int) -> Records:
    """Rows of AGGREGATE from the changes of ``struct ig_count`` since the last totals."""
    rows = np.zeros(len(keys), AGGREGATE)
    rows["bucket_ns"] = bucket_ns
    for name in ("source", "op", "pid"):
        rows[name] = keys[name]
    for name, theirs in (
        ("count", "seen"),
        ("sum_duration_ns", "total_ns"),
        ("min_duration_ns", "min_ns"),
        ("max_duration_ns", "max_ns"),
        ("sum_arg0", "bytes"),
        ("errors", "errors"),
        ("lost", "lost"),
    ):
        rows[name] = changes[theirs]
    rows["sum_arg0"][keys["source"] == Source.IO] //= 512
    return rows


def build_histograms(keys: Records, changes: Records, bucket_ns: int) -> Records:
    """Rows of HISTOGRAM, likewise."""
    which, buckets = np.nonzero(changes["hist"])
    edges_ns = build_bucket_edges_ns().astype(np.int64)
    rows = np.zeros(len(which), HISTOGRAM)
    rows["bucket_ns"] = bucket_ns
    for name in ("source", "op", "pid"):
        rows[name] = keys[name][which]
    rows["from_ns"], rows["to_ns"] = edges_ns[buckets], edges_ns[buckets + 1]
    rows["count"] = changes["hist"][which, buckets]
    return rows


def build_coverage(
    keys: Records,
    changes: Records,
    left_out: dict[int, int],
    uncounted: dict[int, int],
    n_host_lost: int,
) -> Records:
    """What became of every call, by source; the writer itself counts what it stored and what it could not."""
    host = {int(Source.HOST)} if n_host_lost else set()
    sources = sorted({*keys["source"].tolist(), *left_out, *uncounted, *host})
    rows = np.zeros(len(sources), COVERAGE)
    rows["source"] = sources
    for i, source in enumerate(sources):
        is_it = keys["source"] == source
        for name, theirs in (("seen", "seen"), ("sampled_out", "sampled"), ("lost", "lost")):
            rows[name][i] = changes[theirs][is_it].sum()
        rows["seen"][i] += uncounted.get(source, 0)
        rows["sampled_out"][i] += left_out.get(source, 0)
        if source == Source.HOST:
            rows["seen"][i] += n_host_lost
            rows["lost"][i] += n_host_lost
    return rows
