"""The tracing loop: find libraries, read rings, count once a second, hand all of it to observers.

The busy rings are read on a timer, because a wake-up per call would cost more than the call; process events and failed calls
wake the loop at once. A second thread probes libraries as they are loaded.
"""

from __future__ import annotations

import functools
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt

from ingero.agent.app.events import BUILDERS
from ingero.agent.app.program import HeldProgram
from ingero.agent.app.stacks import RING, StackKeeper
from ingero.agent.discover.identity import Identity, read_identity
from ingero.agent.discover.processes import (
    FileId,
    Reach,
    find_mapped,
    find_reach,
    iter_mappings,
    iter_pids,
)
from ingero.agent.kernel.abi import N_COPY_KINDS, ProcessEvent, get_dtype
from ingero.agent.kernel.perf import Mapping, MappingStream
from ingero.agent.probes.ended import EndedCounts
from ingero.agent.probes.engine import Engine, EngineSettings, Missing
from ingero.agent.probes.host import PROBES
from ingero.agent.probes.sampling import BUDGET, SamplingControl
from ingero.agent.probes.targets import find_target, is_candidate, is_library
from ingero.errors import UnsupportedError
from ingero.model.events import Events
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_MS, NS_PER_S

Records = npt.NDArray[Any]
DRAIN_MS: Final = 100
TICK_NS: Final = NS_PER_S
RESCAN_NS: Final = 2 * NS_PER_S
_MOST_EXAMINED: Final = 65_536
_WAKING_RINGS: Final = frozenset({
    "failed_calls",
    RING,
    *(probe.ring for probe in PROBES if probe.wakes),
})


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What to trace, and for how long.

    Attributes:
        engine: How the probes run.
        duration_ns: When to stop; 0 for never.
        pids: Processes to watch with their children; with neither these nor a user nor a cgroup all are watched.
        uid: A user whose processes to watch.
        cgroup_ids: Cgroups of version 2 whose own processes to watch.
        keep_one_in: A fixed sampling of ordinary calls; 0 adapts to loss.
        files: Libraries to probe before anything runs; others are found as processes load them.
        drain_ms: How often the busy rings are read. Each reading has its price, so no oftener than observers need it.
    """

    engine: EngineSettings = field(default_factory=EngineSettings)
    duration_ns: int = 0
    pids: tuple[int, ...] = ()
    uid: int | None = None
    cgroup_ids: tuple[int, ...] = ()
    keep_one_in: int = 0
    files: tuple[Path, ...] = ()
    drain_ms: int = DRAIN_MS


@dataclass(frozen=True, slots=True)
class Totals:
    """Exact counts so far, once a second and once at the end.

    Attributes:
        mono_ns: When.
        wall_ns: When.
        elapsed_ns: Since tracing began.
        keys: Process, source and operation; shape (n,).
        counts: ``struct ig_count`` since tracing began; shape (n,).
        changes: The same since the previous totals.
        losses: Losses that belong to no operation.
        in_flight: Calls that have not returned.
        keep_one_in: The sampling now.
        is_last: Whether tracing is over.
        ended_keys: As ``keys``, of processes that ended; pid 0 stands for many.
        ended_counts: As ``counts``, of processes that ended.
        copies: ``struct ig_count`` of copies since tracing began, by `CopyKind`.
        unwinding: How the native frames of stacks were found, by ``struct ig_unwinding``.
    """

    mono_ns: int
    wall_ns: int
    elapsed_ns: int
    keys: Records
    counts: Records
    changes: Records
    losses: dict[str, int]
    in_flight: Records
    keep_one_in: int
    is_last: bool = False
    ended_keys: Records = field(default_factory=lambda: EndedCounts().keys)
    ended_counts: Records = field(default_factory=lambda: EndedCounts().counts)
    copies: Records = field(default_factory=lambda: np.zeros(N_COPY_KINDS, get_dtype("count")))
    unwinding: dict[str, int] = field(default_factory=dict)

    @property
    def all_keys(self) -> Records:
        """Keys of the living and the ended; one may occur twice when a pid was used again."""
        return np.concatenate([self.keys, self.ended_keys])

    @property
    def all_counts(self) -> Records:
        """Counts of the living and the ended."""
        return np.concatenate([self.counts, self.ended_counts])


class Observer(Protocol):
    """Who is told. Called in the tracing thread; record views die with the call."""

    def on_process(self, identity: Identity) -> None:
        """A process with GPU calls or disk requests was met for the first time."""
        ...

    def on_events(self, ring: str, records: Records, events: Events) -> None:
        """A batch of one ring, as the kernel wrote it and as the model's rows."""
        ...

    def on_totals(self, totals: Totals) -> None:
        """New totals."""
        ...


class TraceSession:
    """Everything from the first probe to the last count.

    Args:
        settings: What to trace.
        observers: Who is told.
        program: A held program to release once the probes wait for it.
        clock: Both clocks.

    Raises:
        UnsupportedError: The engine cannot be loaded here.
    """

    def __init__(
        self,
        settings: TraceSettings,
        observers: Sequence[Observer],
        program: HeldProgram | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self.identities: dict[int, Identity] = {}
        self.notes: list[str] = []
        self._observers = tuple(observers)
        self._program = program
        self._clock = clock or SystemClock()
        self._offset_ns = self._clock.wall_ns() - self._clock.mono_ns()
        self._examined: set[FileId] = set()
        self._ended: list[int] = []
        self._ended_counts = EndedCounts()
        self._previous: dict[bytes, Records] = {}
        self._sampling = SamplingControl(settings.keep_one_in)
        self._n_lost = 0
        self._n_records = 0
        self._engine = Engine(settings.engine)
        self._stacks = StackKeeper(self._engine, self._observers)
        self._stream: MappingStream | None = None
        self._met: deque[Identity] = deque()
        self._consumers: dict[str, Callable[[Records], None]] = {}
        self._discovery = threading.Thread(target=self._watch_mappings, name="ingero-discover")
        self._stop_read, self._stop_write = os.pipe()
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> Engine:
        """The probes."""
        return self._engine

    @property
    def missing(self) -> tuple[Missing, ...]:
        """What this machine refused."""
        return tuple(self._engine.missing)

    @property
    def refused_interpreters(self) -> tuple[str, ...]:
        """Why Python frames of a process are not read."""
        return tuple(sorted(set(self._stacks.refused.values())))

    def _prepare(self) -> None:
        if self._program is not None:
            self._engine.watch_pid(self._program.pid)
        for pid in self.settings.pids:
            self._engine.watch_pid(pid)
        if self.settings.uid is not None:
            self._engine.watch_uid(self.settings.uid)
        for cgroup_id in self.settings.cgroup_ids:
            self._engine.watch_cgroup(cgroup_id)
        self._engine.set_keep_one_in(self._sampling.keep_one_in)
        self._engine.start_host_probes()
        self._consumers = {name: functools.partial(self._take, name) for name in self._engine.rings}
        try:
            self._stream = MappingStream()
        except UnsupportedError as error:
            self.notes.append(f"{error.message}; new processes are looked for every 2 s")
        for path in self.settings.files:
            reach = find_reach(str(path))
            if reach is not None:
                self._probe(reach, str(path))
        self._scan()
        self._discovery.start()

    def _scan(self) -> None:
        """Look at every process there is."""
        for pid in self.settings.pids or iter_pids():
            for mapping in iter_mappings(pid):
                self._discover(mapping)

    def _discover(self, mapping: Mapping) -> None:
        self._stacks.on_mapping(mapping)
        if not is_candidate(mapping):
            return
        reach = find_mapped(mapping)
        if reach is not None and self._probe(reach, mapping.path):
            self._stacks.examine(mapping.pid)
            self._meet(mapping.pid)

    def _probe(self, reach: Reach, path: str) -> bool:
        """Probe a file unless it was looked at before; whether it is probed now."""
        if self._engine.is_attached(reach.file):
            return True
        if reach.file in self._examined:
            return False
        if len(self._examined) >= _MOST_EXAMINED:
            self._examined.clear()
        self._examined.add(reach.file)
        target = find_target(reach, path)
        if target is None:
            return False
        try:
            return self._engine.attach(target)
        except UnsupportedError as error:
            self.notes.append(error.message)
            return False

    def _meet(self, pid: int) -> None:
        """Ask who a process is while it is there to be asked."""
        if pid in self.identities:
            return
        identity = read_identity(pid)
        if identity is None:
            return
        self.identities[pid] = identity
        self._met.append(identity)

    def _announce(self) -> None:
        """Tell the observers of processes met, in this thread and before their records."""
        while self._met:
            identity = self._met.popleft()
            for observer in self._observers:
                observer.on_process(identity)

    def _watch_mappings(self) -> None:
        """Body of the discovery thread: output may take its time, a library that was just loaded may not."""
        if self._stream is None:
            return
        poll = select.poll()
        for fd in (*self._stream.fds, self._stop_read):
            poll.register(fd, select.POLLIN)
        while all(fd != self._stop_read for fd, _ in poll.poll()):
            # Libraries before programs: calls are missed until they are probed.
            for mapping in sorted(self._stream.read(), key=is_library, reverse=True):
                self._discover(mapping)

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Trace until the time is over, the program ends or ``should_stop`` says so."""
        started_ns = self._clock.mono_ns()
        ends_ns = started_ns + self.settings.duration_ns if self.settings.duration_ns else None
        next_tick_ns, next_scan_ns = started_ns + TICK_NS, started_ns + RESCAN_NS
        poll = self._build_poll()
        waking = {ring.fd for name, ring in self._engine.rings.items() if name in _WAKING_RINGS}
        next_drain_ns = started_ns
        if self._program is not None:
            self._program.release()
        while not should_stop():
            ready = poll.poll(self.settings.drain_ms)
            is_over = self._program is not None and self._program.poll() is not None
            now_ns = self._clock.mono_ns()
            if now_ns >= next_drain_ns or any(fd in waking for fd, _ in ready):
                self._drain()
                next_drain_ns = now_ns + self.settings.drain_ms * NS_PER_MS
            if is_over or (ends_ns is not None and now_ns >= ends_ns):
                break
            if now_ns >= next_tick_ns:
                self._tick(started_ns)
                next_tick_ns += TICK_NS
            if self._stream is None and now_ns >= next_scan_ns:
                self._scan()
                next_scan_ns = now_ns + RESCAN_NS
        self._drain()
        self._tick(started_ns, is_last=True)

    def _build_poll(self) -> select.poll:
        poll = select.poll()
        if self._program is not None:
            poll.register(self._program.fd, select.POLLIN)
        for name, ring in self._engine.rings.items():
            if name in _WAKING_RINGS:
                poll.register(ring.fd, select.POLLIN)
        return poll

    def _drain(self) -> None:
        self._announce()
        self._n_records += self._engine.drain(self._consumers)
        if self._n_records > BUDGET:  # do not wait for the end of the round
            self._sample(0)

    def _take(self, ring: str, records: Records) -> None:
        if ring == RING:
            self._stacks.take(records)
            return
        if ring == "processes":
            is_exit = records["event"] == ProcessEvent.EXIT
            self._ended.extend(int(pid) for pid in records["pid"][is_exit])
        events = BUILDERS[ring](records, self._offset_ns)
        self._stacks.stamp(records, events)
        for observer in self._observers:
            observer.on_events(ring, records, events)

    def _tick(self, started_ns: int, *, is_last: bool = False) -> None:
        mono_ns = self._clock.mono_ns()
        keys, counts = self._engine.read_counts()
        for pid in {int(pid) for pid in keys["pid"]} - self.identities.keys() - {0}:
            self._meet(pid)
        self._announce()
        n_lost = int(counts["lost"].sum())
        changes = self._changes(keys, counts)
        keep_one_in = self._sample(max(n_lost - self._n_lost, 0))
        self._n_lost = n_lost
        totals = Totals(
            mono_ns=mono_ns,
            wall_ns=mono_ns + self._offset_ns,
            elapsed_ns=mono_ns - started_ns,
            keys=keys,
            counts=counts,
            changes=changes,
            losses=self._engine.read_losses(),
            unwinding=self._engine.read_unwinding(),
            in_flight=self._engine.read_in_flight(),
            keep_one_in=keep_one_in,
            is_last=is_last,
            ended_keys=self._ended_counts.keys,
            ended_counts=self._ended_counts.counts,
            copies=self._engine.read_copies(),
        )
        for observer in self._observers:
            observer.on_totals(totals)
        if not is_last:
            self._forget_ended(keys, counts)

    def _sample(self, n_lost: int) -> int:
        """End a round of the sampling; the new setting."""
        fill = max((ring.fill() for ring in self._engine.rings.values()), default=0.0)
        keep_one_in = self._sampling.update(n_lost, fill, self._n_records)
        self._n_records = 0
        if keep_one_in != self._engine.keep_one_in:
            self._engine.set_keep_one_in(keep_one_in)
        return keep_one_in

    def _changes(self, keys: Records, counts: Records) -> Records:
        """Counts since the last tick; extremes stay those of the whole trace."""
        changes = counts.copy()
        names = [key.tobytes() for key in keys.view(f"V{keys.dtype.itemsize}")]
        for i, key in enumerate(names):
            before = self._previous.get(key)
            if before is None:
                continue
            for name in changes.dtype.names or ():
                if name not in {"min_ns", "max_ns", "pending"}:
                    changes[name][i] -= before[name]
        self._previous = dict(zip(names, counts, strict=True))
        return changes

    def _forget_ended(self, keys: Records, counts: Records) -> None:
        """Make room: a process that ended a tick ago cannot count any more, and its pid may be used again."""
        if not self._ended:
            return
        self._ended_counts.add(self._ended, keys, counts)
        self._engine.forget(self._ended)
        self._stacks.forget(self._ended)
        for pid in self._ended:
            self.identities.pop(pid, None)
        self._ended.clear()

    def close(self) -> None:
        """Remove every probe; ends the program if it still runs. Safe to call twice."""
        if self._stop_write >= 0:
            os.close(self._stop_write)  # the reading end becomes ready
            if self._discovery.is_alive():
                self._discovery.join()
            os.close(self._stop_read)
            self._stop_write = -1
        self._stacks.close()
        self._engine.close()
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._program is not None:
            self._program.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def count_coverage(counts: Records) -> dict[str, int]:
    """What became of all calls: ``seen = emitted + sampled + lost``."""
    names = ("entered", "seen", "emitted", "sampled", "lost")
    return {name: int(np.sum(counts[name], dtype=np.uint64)) for name in names}
