"""A trace into a recording: which rows are kept, exact counts for all of them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ingero import __version__
from ingero.agent.annotations.admission import Admitted
from ingero.agent.app.measures import Kind, Series
from ingero.agent.app.tracing import Totals
from ingero.agent.discover.identity import Identity, find_cgroup_id
from ingero.agent.probes.latency import fold_octaves
from ingero.agent.stacks.resolver import Stack
from ingero.agent.store.writer import RecordingWriter, WriterSettings
from ingero.config.invoker import Invoker
from ingero.model.events import (
    CudaOp,
    DriverOp,
    EventFlag,
    Events,
    HostOp,
    OffCpuReason,
    Source,
)
from ingero.model.recording import AGGREGATE, COVERAGE, HISTOGRAM, Session
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_MS, NS_PER_S

Records = npt.NDArray[Any]
BUCKET_NS: Final = 60 * NS_PER_S
EVERYTHING_NS: Final = 10 * NS_PER_S
SLOW_BLOCK_NS: Final = 10 * NS_PER_MS
CLOCK_SAMPLE_NS: Final = 10 * NS_PER_S
_MOST_KEPT: Final = 50_000
"""Rows held between two totals: 6 MiB."""

_ALWAYS: Final = (
    (Source.CUDA, (CudaOp.STREAM_SYNC, CudaOp.DEVICE_SYNC, CudaOp.EVENT_SYNC)),
    (Source.DRIVER, (DriverOp.CTX_SYNC, DriverOp.STREAM_SYNC, DriverOp.EVENT_SYNC)),
    (
        Source.HOST,
        (
            HostOp.SCHED_SWITCH,
            HostOp.PAGE_FAULT,
            HostOp.DIRECT_RECLAIM,
            HostOp.OOM_KILL,
            HostOp.EXEC,
            HostOp.EXIT,
            HostOp.FORK,
        ),
    ),
)
_UNCOUNTED_RINGS: Final = ("processes", "victims")
"""Rings whose records the kernel does not count by operation: every one is delivered or in ``losses``."""
_ALWAYS_SOURCES: Final = (Source.TCP, Source.NCCL, Source.CUDA_GRAPH)


def is_stored(events: Events, elapsed_ns: int) -> npt.NDArray[np.bool_]:
    """Which rows are kept one by one; all of them are counted anyway.

    Kept are the first ten seconds, what waits, what failed or was slow, collectives, graphs, process life, off-CPU spans, major
    page faults, direct reclaim, retransmits, and block requests over 10 ms.
    """
    if elapsed_ns < EVERYTHING_NS:
        return np.ones(len(events), bool)
    kept = np.isin(events["source"], _ALWAYS_SOURCES)
    kept |= (events["flags"] & EventFlag.EXEMPLAR) != 0
    for source, ops in _ALWAYS:
        kept |= (events["source"] == source) & np.isin(events["op"], ops)
    kept |= (events["source"] == Source.IO) & (events["duration_ns"] > SLOW_BLOCK_NS)
    return kept


class Recorder:
    """Writes what a trace tells into a recording that belongs to the invoking user.

    Args:
        path: The recording; made with its folder when missing.
        node: This node's name.
        clock: Both clocks.
        invoker: Who owns what is created.
        keep_all: Keep every record.
        limits: Of the recording's size.

    Raises:
        StoreError: The recording cannot be written.
    """

    def __init__(
        self,
        path: Path,
        node: str,
        clock: Clock,
        *,
        invoker: Invoker,
        keep_all: bool = False,
        limits: WriterSettings | None = None,
    ) -> None:
        self._clock = clock
        self._keep_all = keep_all
        self._started_ns = clock.mono_ns()
        self._next_sample_ns = 0
        self._batches: list[Events] = []
        self._left_out: dict[int, int] = {}
        self._uncounted: dict[int, int] = {}
        self._named: set[int] = set()
        _make_folder(path.parent, invoker)
        self.writer = RecordingWriter(path, node, limits)
        _give(path, invoker)
        self.writer.put_session(
            Session(
                node=node,
                started_wall_ns=clock.wall_ns(),
                n_cpus=os.cpu_count() or 0,
                mem_total_mib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
                kernel=platform.release(),
                agent_version=__version__,
                flags="record-all" if keep_all else "record",
            )
        )

    def on_process(self, identity: Identity) -> None:
        """Name the process and its place in the job."""
        self._named.add(identity.pid)
        self.writer.put_process_names({identity.pid: identity.name}, self._clock.wall_ns())
        if identity.launcher:
            self.writer.put_ranks({identity.pid: identity.place})
        cgroup_id = find_cgroup_id(identity.cgroup) if identity.container else 0
        if cgroup_id:
            pod = identity.pod_name, identity.namespace
            self.writer.put_cgroup(cgroup_id, identity.container, identity.cgroup, pod)

    def on_events(self, ring: str, records: Records, events: Events) -> None:
        """Keep the batch for the next totals: many small batches cost more than one large one."""
        if ring in _UNCOUNTED_RINGS and len(events):
            source = int(events["source"][0])
            self._uncounted[source] = self._uncounted.get(source, 0) + len(events)
        if len(records) > len(events):  # kinds that a recording has no code for
            self._left_out[Source.IO] = (
                self._left_out.get(Source.IO, 0) + len(records) - len(events)
            )
        if ring == "off_cpus":
            self._name_preemptors(records)
        self._batches.append(events)
        if sum(map(len, self._batches)) > _MOST_KEPT:
            self._store_events()

    def _name_preemptors(self, records: Records) -> None:
        """Name who took a thread's CPU, by what the kernel read at that moment: the task may be gone by now."""
        taken = records[records["reason"] == OffCpuReason.PREEMPTED]
        pids, at = np.unique(taken["other_pid"], return_index=True)
        is_new = ~np.isin(pids, list(self._named)) & (pids != 0)
        if not is_new.any():
            return
        comms = taken["other_comm"][at[is_new]]
        names = {
            pid: comm.tobytes().partition(b"\0")[0].decode(errors="replace")
            for pid, comm in zip(pids[is_new].tolist(), comms, strict=True)
        }
        self._named.update(names)
        self.writer.put_process_names(names, self._clock.wall_ns())

    def put_facts(self, events: Events) -> None:
        """Store rows that no probe counted, such as NVML's; each is seen and stored. The tracing thread."""
        if len(events):
            source = int(events["source"][0])
            self._uncounted[source] = self._uncounted.get(source, 0) + len(events)
            self._batches.append(events)

    def _store_events(self) -> None:
        """Hand the rows worth keeping to the writer."""
        if not self._batches:
            return
        events = np.concatenate(self._batches)
        self._batches.clear()
        elapsed_ns = 0 if self._keep_all else self._clock.mono_ns() - self._started_ns
        is_kept = is_stored(events, elapsed_ns)
        if is_kept.any():
            self.writer.put_events(events[is_kept])
        sources, n_rows = np.unique(events["source"][~is_kept], return_counts=True)
        for source, n_left in zip(sources.tolist(), n_rows.tolist(), strict=True):
            self._left_out[source] = self._left_out.get(source, 0) + n_left

    def on_totals(self, totals: Totals) -> None:
        """Store the rows of the last second and add its exact counts to their buckets."""
        self._store_events()
        bucket_ns = totals.wall_ns // BUCKET_NS * BUCKET_NS
        is_active = totals.changes["seen"] > 0
        keys, changes = totals.keys[is_active], totals.changes[is_active]
        if len(keys):
            self.writer.put_aggregates(_build_aggregates(keys, changes, bucket_ns))
            self.writer.put_histograms(_build_histograms(keys, changes, bucket_ns))
        coverage = _build_coverage(keys, changes, self._left_out, self._uncounted)
        if len(coverage):
            coverage["bucket_ns"] = bucket_ns
            self.writer.put_coverage(coverage)
        self._left_out.clear()
        self._uncounted.clear()
        if totals.mono_ns >= self._next_sample_ns or totals.is_last:
            self._next_sample_ns = totals.mono_ns + CLOCK_SAMPLE_NS
            self.writer.put_clock_sample(self._clock.mono_ns(), self._clock.wall_ns())

    def on_stacks(self, stacks: Mapping[int, Stack]) -> None:
        """Store stacks that were not stored in this session."""
        self.writer.put_stacks({key: stack.to_json() for key, stack in stacks.items()})

    def on_annotations(self, admitted: Iterable[Admitted]) -> None:
        """Store what workloads said of themselves. Any thread."""
        self.writer.put_annotations(
            (
                one.wall_ns,
                json.dumps(one.labels, ensure_ascii=False),
                *(one.pid, one.start_ticks, one.span_start_ns, one.span_end_ns),
                *(one.peer.uid, one.peer.gid, one.peer.pid),
            )
            for one in admitted
        )

    def iter_series(self) -> Iterator[Series]:
        """The recording's own size and losses."""
        path = self.writer.path
        n_bytes = sum(
            part.stat().st_size
            for part in (path, path.with_name(path.name + "-wal"))
            if part.exists()
        )
        yield Series(
            "ingero.trace.db.bytes", Kind.GAUGE, "By", "Size of the recording.", (((), float(n_bytes)),),
            "ingero_trace_db_bytes",
        )  # fmt: skip
        yield Series(
            "ingero.trace.db.pruned_rows", Kind.SUM, "1", "Rows deleted to keep to --max-db.",
            (((), float(self.writer.counters.events_pruned)),), "ingero_trace_db_pruned_rows_total",
        )  # fmt: skip
        yield Series(
            "ingero.trace.db.lost_rows", Kind.SUM, "1", "Rows that the disk did not take.",
            (((), float(self.writer.counters.events_lost)),), "ingero_trace_db_lost_rows_total",
        )  # fmt: skip

    def close(self) -> None:
        """Write what waits and end the session."""
        self._store_events()
        self.writer.close(self._clock.wall_ns())


def _build_aggregates(keys: Records, changes: Records, bucket_ns: int) -> Records:
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
    ):
        rows[name] = changes[theirs]
    rows["sum_arg0"][keys["source"] == Source.IO] //= 512
    return rows


def _build_histograms(keys: Records, changes: Records, bucket_ns: int) -> Records:
    octaves = np.stack([fold_octaves(histogram) for histogram in changes["hist"]])
    which, powers = np.nonzero(octaves)
    rows = np.zeros(len(which), HISTOGRAM)
    rows["bucket_ns"] = bucket_ns
    for name in ("source", "op", "pid"):
        rows[name] = keys[name][which]
    rows["log2_ns"], rows["count"] = powers, octaves[which, powers]
    return rows


def _build_coverage(
    keys: Records, changes: Records, left_out: dict[int, int], uncounted: dict[int, int]
) -> Records:
    """What became of every call, by source; the writer itself counts what it stored and what it could not."""
    sources = sorted({*keys["source"].tolist(), *left_out, *uncounted})
    rows = np.zeros(len(sources), COVERAGE)
    rows["source"] = sources
    for i, source in enumerate(sources):
        is_it = keys["source"] == source
        for name, theirs in (("seen", "seen"), ("sampled_out", "sampled"), ("lost", "lost")):
            rows[name][i] = changes[theirs][is_it].sum()
        rows["seen"][i] += uncounted.get(source, 0)
        rows["sampled_out"][i] += left_out.get(source, 0)
    return rows


def _make_folder(folder: Path, invoker: Invoker) -> None:
    if not folder.exists():
        folder.mkdir(parents=True, mode=0o700)
        _give(folder, invoker)


def _give(path: Path, invoker: Invoker) -> None:
    if os.geteuid() == 0 and path.exists():
        os.chown(path, invoker.uid, invoker.gid, follow_symlinks=False)
