"""A trace into a recording: exact counts of all calls, a row of each that is never sampled, and some of the others."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero import __version__
from ingero.agent.annotations.admission import Admitted
from ingero.agent.capture.discover.cgroups import seen_cgroups
from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.capture.discover.processes import find_family
from ingero.agent.capture.stacks.resolver import Stack
from ingero.agent.capture.totals import Totals
from ingero.agent.metrics.series import Kind, Series
from ingero.agent.trace.selection import Selection
from ingero.config.invoker import Invoker
from ingero.errors import StoreError
from ingero.model.arrays import Records
from ingero.model.events import Events, op_name
from ingero.model.recording import Session, Unprobed
from ingero.recording.store.losses import Loss
from ingero.recording.store.settings import WriterSettings
from ingero.recording.store.writer import RecordingWriter
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

CLOCK_SAMPLE_NS: Final = 10 * NS_PER_S
_MAX_LISTED: Final = 5


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of the rows that were to be stored.

    Attributes:
        path: The recording.
        n_rows: Rows in it, of this trace.
        n_counts_lost: Writes of exact counts and names that it does not have.
        losses: Rows that it does not have, by operation and cause, most first.
    """

    path: Path
    n_rows: int
    n_counts_lost: int
    losses: tuple[Loss, ...]

    def describe_loss(self) -> str:
        """One line; empty when everything is stored."""
        n_lost = sum(loss.n_rows for loss in self.losses)
        if not n_lost and not self.n_counts_lost:
            return ""
        parts = []
        if n_lost:
            causes = sorted({loss.cause for loss in self.losses})
            by_op = [f"{op_name(loss.source, loss.op)} {loss.n_rows}" for loss in self.losses]
            listed = ", ".join(by_op[:_MAX_LISTED]) + (", …" if len(by_op) > _MAX_LISTED else "")
            parts.append(f"{n_lost} rows are not in it: {'; '.join(causes)} ({listed})")
        if self.n_counts_lost:
            parts.append(f"{self.n_counts_lost} writes of counts and names are not in it")
        return f"{self.path} is incomplete: {'; '.join(parts)}"


def check_complete(stored: Stored) -> None:
    """Say at the end what is not in the recording.

    Raises:
        StoreError: Something is not.
    """
    if loss := stored.describe_loss():
        raise StoreError(loss, hint="make room, or keep less with --max-db")


class Recorder:
    """Writes a trace into a recording that belongs to the invoking user.

    Args:
        path: The recording; made with its folder when missing.
        node: This node's name.
        clock: Both clocks.
        invoker: Owner of what is created.
        keep_all: Keep every record.
        limits: Of the recording's size.

    Attributes:
        writer: Writes the file.
        selection: Chooses what is written.
        session: This run of the agent.

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
        self._offset_ns = (
            clock.wall_ns() - clock.mono_ns()
        )  # of the rows, whatever the wall clock does since
        self._next_sample_ns = 0
        self._unprobed: tuple[Unprobed, ...] = ()
        _make_folder(path.parent, invoker)
        owner = (invoker.uid, invoker.gid) if os.geteuid() == 0 else None
        self.writer = RecordingWriter(path, node, limits, owner)
        self.selection = Selection(clock, [self.writer], keep_all=keep_all, find_family=find_family)
        for end in ("", "-wal", "-shm"):
            _give(path.with_name(path.name + end), invoker)
        self.session = build_session(node, clock, "record-all" if keep_all else "record")
        self.writer.put_session(self.session)

    def on_process(self, identity: ProcessIdentity) -> None:
        """Name the process, its place in the job and its container."""
        self.selection.on_process(identity)
        cgroup_id = seen_cgroups().find_id(identity.cgroup) if identity.container else 0
        if cgroup_id:
            pod = identity.pod.name, identity.pod.namespace
            self.writer.put_cgroup(cgroup_id, identity.container, identity.cgroup, pod)

    def on_events(self, ring: str, records: Records, events: Events) -> None:
        """Keep the batch for the next totals."""
        self.selection.on_events(ring, records, events)

    def on_unrecorded_ends(self, pids: Collection[int]) -> None:
        """Processes ended that no record tells of."""
        self.selection.on_unrecorded_ends(pids)

    def on_totals(self, totals: Totals) -> None:
        """Store the rows of the last second and add its exact counts to their buckets."""
        self._offset_ns = totals.wall_ns - totals.mono_ns
        self.selection.on_totals(totals)
        self._store_unprobed(totals)
        if totals.mono_ns >= self._next_sample_ns or totals.is_last:
            self._next_sample_ns = totals.mono_ns + CLOCK_SAMPLE_NS
            self.writer.put_clock_sample(self._clock.mono_ns(), self._clock.wall_ns())
        if totals.is_last:
            self.writer.flush()  # observers that come later read what was stored

    def _store_unprobed(self, totals: Totals) -> None:
        """Note libraries that cannot be probed, as far as that changed."""
        before, now = self._unprobed, totals.unprobed
        if before != now:
            self._unprobed = now
            self.writer.put_unprobed(set(now) - set(before), set(before) - set(now), totals.wall_ns)

    def on_stacks(self, stacks: Mapping[int, Stack]) -> None:
        """Store stacks that were not stored in this session."""
        self.writer.put_stacks({key: stack.to_json() for key, stack in stacks.items()})

    def on_annotations(self, admitted: Iterable[Admitted]) -> None:
        """Store annotations of workloads. Any thread."""
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

    def stored(self) -> Stored:
        """What the recording holds and what it could not take, so far. Any thread."""
        counters = self.writer.counters
        return Stored(
            self.writer.path,
            counters.events_stored,
            counters.counts_lost,
            tuple(self.writer.losses()),
        )

    def close(self) -> None:
        """Write what waits and end the session, at a time on the clock of the rows."""
        self.selection.flush()
        self.writer.close(self._clock.mono_ns() + self._offset_ns)


def build_session(node: str, clock: Clock, flags: str) -> Session:
    """A run of the agent that begins now, on this machine."""
    return Session(
        node=node,
        started_wall_ns=clock.wall_ns(),
        n_cpus=os.cpu_count() or 0,
        mem_total_mib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
        kernel=platform.release(),
        agent_version=__version__,
        flags=flags,
    )


def _make_folder(folder: Path, invoker: Invoker) -> None:
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        for one in reversed(missing):
            one.mkdir(mode=0o700)
            _give(one, invoker)
    except OSError as error:
        raise StoreError(
            f"{folder}: {error.strerror}", hint="choose another file with --db"
        ) from error


def _give(path: Path, invoker: Invoker) -> None:
    if os.geteuid() == 0 and path.exists():
        os.chown(path, invoker.uid, invoker.gid, follow_symlinks=False)
