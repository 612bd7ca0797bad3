"""A trace into a recording: which rows are kept, exact counts for all of them."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ingero import __version__
from ingero.agent.app.tracing import Totals
from ingero.agent.discover.identity import Identity
from ingero.agent.probes.latency import fold_octaves
from ingero.agent.store.writer import RecordingWriter, WriterSettings
from ingero.config.invoker import Invoker
from ingero.model.events import CudaOp, DriverOp, EventFlag, Events, HostOp, Source
from ingero.model.recording import AGGREGATE, COVERAGE, HISTOGRAM, Session
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_MS, NS_PER_S

Records = npt.NDArray[Any]
BUCKET_NS: Final = 60 * NS_PER_S
EVERYTHING_NS: Final = 10 * NS_PER_S
SLOW_BLOCK_NS: Final = 10 * NS_PER_MS
CLOCK_SAMPLE_NS: Final = 10 * NS_PER_S

_ALWAYS: Final = (
    (Source.CUDA, (CudaOp.STREAM_SYNC, CudaOp.DEVICE_SYNC, CudaOp.EVENT_SYNC)),
    (Source.DRIVER, (DriverOp.CTX_SYNC, DriverOp.STREAM_SYNC, DriverOp.EVENT_SYNC)),
    (
        Source.HOST,
        (HostOp.SCHED_SWITCH, HostOp.OOM_KILL, HostOp.EXEC, HostOp.EXIT, HostOp.FORK),
    ),
)
_UNCOUNTED_RINGS: Final = ("processes", "victims")
"""Rings whose records the kernel does not count by operation: every one is delivered or in ``losses``."""
_ALWAYS_SOURCES: Final = (Source.TCP, Source.NCCL, Source.CUDA_GRAPH)


def is_stored(events: Events, elapsed_ns: int) -> npt.NDArray[np.bool_]:
    """Which rows are kept one by one; all of them are counted anyway.

    Kept are the first ten seconds, what waits, what failed or was slow, collectives, graphs, process life, off-CPU spans,
    retransmits, and block requests over 10 ms.
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
        max_bytes: Size cap; 0 for none.

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
        max_bytes: int = 0,
    ) -> None:
        self._clock = clock
        self._keep_all = keep_all
        self._started_ns = clock.mono_ns()
        self._next_sample_ns = 0
        self._left_out: dict[int, int] = {}
        self._uncounted: dict[int, int] = {}
        _make_folder(path.parent, invoker)
        self.writer = RecordingWriter(path, node, WriterSettings(max_bytes=max_bytes))
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
        self.writer.put_process_names({identity.pid: identity.name}, self._clock.wall_ns())
        if identity.launcher:
            self.writer.put_ranks({identity.pid: identity.place})

    def on_events(self, ring: str, records: Records, events: Events) -> None:
        """Store the rows worth keeping."""
        if ring in _UNCOUNTED_RINGS and len(events):
            source = int(events["source"][0])
            self._uncounted[source] = self._uncounted.get(source, 0) + len(events)
        if len(records) > len(events):  # kinds that a recording has no code for
            self._left_out[Source.IO] = (
                self._left_out.get(Source.IO, 0) + len(records) - len(events)
            )
        elapsed_ns = 0 if self._keep_all else self._clock.mono_ns() - self._started_ns
        is_kept = is_stored(events, elapsed_ns)
        if is_kept.any():
            self.writer.put_events(events[is_kept])
        sources, n_rows = np.unique(events["source"][~is_kept], return_counts=True)
        for source, n_left in zip(sources.tolist(), n_rows.tolist(), strict=True):
            self._left_out[source] = self._left_out.get(source, 0) + n_left

    def on_totals(self, totals: Totals) -> None:
        """Add the exact counts of the last second to their buckets."""
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

    def close(self) -> None:
        """Write what waits and end the session."""
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
        folder.mkdir(parents=True, mode=0o755)
        _give(folder, invoker)


def _give(path: Path, invoker: Invoker) -> None:
    if os.geteuid() == 0 and path.exists():
        os.chown(path, invoker.uid, invoker.gid, follow_symlinks=False)
