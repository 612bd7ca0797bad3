"""Say what happened, get the recording: a cursor per thread, every row typed."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Self

import numpy as np

from ingero.model.events import EVENT, Events, OffCpuReason, Source
from ingero.model.recording import COVERAGE, SNAPSHOT, ProcessRank, Recording, Session
from ingero.recording.store.writer import RecordingWriter
from ingero.units import NS_PER_S

START_NS: Final = 1_767_225_600 * NS_PER_S
"""2026-01-01T00:00:00Z: where a built recording begins."""

_MINUTE_NS: Final = 60 * NS_PER_S


class RecordingBuilder:
    """A recording of one node under construction.

    Every method takes times in ns from the start of the recording and returns nothing to keep: ``build`` hands over the
    rows, ``write`` stores them.

    Args:
        node: Node name.
        n_cpus: Processors of the machine.
        gpu_model: As a session names it, with its size: "Tesla T4, 15360 MiB".
    """

    def __init__(self, node: str = "node-0", n_cpus: int = 8, gpu_model: str = "") -> None:
        self._node = node
        self._n_cpus = n_cpus
        self._gpu_model = gpu_model
        self._rows: list[dict[str, int]] = []
        self._names: dict[int, str] = {}
        self._ranks: dict[int, ProcessRank] = {}
        self._snapshots: list[tuple[int, float, float, int, int, float]] = []

    def name(self, pid: int, name: str) -> Self:
        """Name a process or thread."""
        self._names[pid] = name
        return self

    def rank(self, pid: int, rank: int, world_size: int) -> Self:
        """Place a process in the job."""
        self._ranks[pid] = ProcessRank(rank, rank, world_size)
        return self

    def call(
        self, op: tuple[Source, int], at_ns: int, duration_ns: int, pid: int, **fields: int
    ) -> int:
        """Add one row; returns when it ends. `fields` are fields of EVENT; ``tid`` is the pid unless given."""
        source, code = op
        self._rows.append({
            "start_ns": START_NS + at_ns,
            "duration_ns": duration_ns,
            "pid": pid,
            "tid": pid,
            "weight": 1,
            **fields,
            "source": int(source),
            "op": int(code),
        })
        return at_ns + duration_ns

    def off_cpu(
        self, at_ns: int, duration_ns: int, tid: int, reason: OffCpuReason, **fields: int
    ) -> int:
        """Keep a thread off its CPU; ``pid`` is the tid unless given, ``other_pid`` who took the CPU."""
        return self.call(
            (Source.HOST, 1), at_ns, duration_ns, fields.pop("pid", tid), tid=tid,
            reason=int(reason), **fields,
        )  # fmt: skip

    def snapshot(
        self, at_ns: int, *, cpu_pct: float, mem_pct: float = 40.0, load1: float = 1.0
    ) -> None:
        """Note the machine's state at one moment."""
        self._snapshots.append((START_NS + at_ns, cpu_pct, mem_pct, 8192, 0, load1))

    def events(self) -> Events:
        """The rows so far, sorted by start."""
        rows = np.zeros(len(self._rows), EVENT)
        for name in EVENT.names or ():
            rows[name] = [row.get(name, 0) for row in self._rows]
        return rows[np.argsort(rows["start_ns"], kind="stable")]

    def build(self) -> Recording:
        """The recording, complete: everything seen is stored."""
        events = self.events()
        return Recording(
            events=events,
            nodes=(self._node,),
            process_names={(0, pid): name for pid, name in self._names.items()},
            ranks={(0, pid): rank for pid, rank in self._ranks.items()},
            coverage=self._coverage(events),
            snapshots=self._snapshot_rows(),
            sessions=(self._session(),),
            n_events_stored=len(events),
        )

    def write(self, path: Path) -> None:
        """Store the recording as the agent would."""
        events = self.events()
        with RecordingWriter(path, self._node) as writer:
            writer.put_session(self._session())
            writer.put_ranks(self._ranks)
            writer.put_process_names(self._names, START_NS)
            writer.put_events(events)
            writer.put_coverage(self._coverage(events))
            writer.put_snapshots(self._snapshot_rows())

    def _session(self) -> Session:
        return Session(
            self._node, START_NS, gpu_model=self._gpu_model, n_cpus=self._n_cpus, flags="built"
        )

    def _snapshot_rows(self) -> Events:
        rows = np.zeros(len(self._snapshots), SNAPSHOT)
        names = ("wall_ns", "cpu_pct", "mem_pct", "mem_available_mib", "swap_mib", "load1")
        for i, name in enumerate(names):
            rows[name] = [snapshot[i] for snapshot in self._snapshots]
        return rows

    @staticmethod
    def _coverage(events: Events) -> Events:
        ends = events["start_ns"] + events["duration_ns"]
        buckets = ends // _MINUTE_NS * _MINUTE_NS
        pairs = sorted(set(zip(buckets.tolist(), events["source"].tolist(), strict=True)))
        rows = np.zeros(len(pairs), COVERAGE)
        for i, (bucket, source) in enumerate(pairs):
            n_rows = int(((buckets == bucket) & (events["source"] == source)).sum())
            rows[i] = (bucket, 0, source, n_rows, n_rows, 0, 0)
        return rows
