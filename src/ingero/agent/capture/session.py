"""The tracing loop: find libraries, read rings, count once a second, hand all of it to observers.

The busy rings are read on a timer, because a wake-up per call would cost more than the call; process events and failed calls
wake the loop at once. Other threads probe libraries as they are loaded.
"""

from __future__ import annotations

import functools
import select
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

import numpy as np

from ingero.agent.capture.discover.identity import ProcessIdentity, find_cgroup_id, read_identity
from ingero.agent.capture.discover.processes import find_descendants, has_ended, iter_pids
from ingero.agent.capture.discovery import Discovery, Watch, find_new
from ingero.agent.capture.events import BUILDERS, build_off_cpu_events
from ingero.agent.capture.kernel.abi import N_COPY_KINDS, Flag, ProcessEvent, get_dtype
from ingero.agent.capture.kernel.perf import PerfEvents
from ingero.agent.capture.open_calls import RING as OPEN_RING
from ingero.agent.capture.open_calls import OpenCalls
from ingero.agent.capture.probes.ended import EndedCounts
from ingero.agent.capture.probes.engine import Engine, EngineSettings, Missing
from ingero.agent.capture.probes.host import PROBES, find_software_events
from ingero.agent.capture.probes.sampling import BUDGET, SamplingControl
from ingero.agent.capture.program import HeldProgram
from ingero.agent.capture.stack_keeper import RING, StackKeeper
from ingero.model.arrays import Records
from ingero.model.events import EventFlag, Events
from ingero.model.recording import Unprobed, describe_unprobed
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_MS, NS_PER_S

DRAIN_MS: Final = 100
TICK_NS: Final = NS_PER_S
_MOST_DRAINS: Final = 8
_NOT_SUMS: Final = frozenset({
    "min_ns",
    "max_ns",
    "pending",
    "window",
    "n_kept",
    "n_stacks",
    "reserved",
})
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
        keep_one_in: A fixed sampling of the kinds that are sampled; 0 adapts to loss.
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
        unprobed: Libraries whose calls are missing from all of this.
        probe_mode: How library functions are probed.
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
    unprobed: tuple[Unprobed, ...] = ()
    probe_mode: str = ""

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

    def on_process(self, identity: ProcessIdentity) -> None:
        """A process with GPU calls or disk requests was met for the first time."""
        ...

    def on_events(self, ring: str, records: Records, events: Events) -> None:
        """A batch of one ring, as the kernel wrote it and as the model's rows; of ``in_flight`` as the kernel would have."""
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
        events: perf's events, opened before privileges were given up; closed with this. None opens them now.
        tell: Told in a sentence what goes wrong while it traces.

    Attributes:
        has_lost_all: Whether tracing ended because every process that was named has ended, with its children.

    Raises:
        UnsupportedError: The engine cannot be loaded here.
    """

    def __init__(
        self,
        settings: TraceSettings,
        observers: Sequence[Observer],
        program: HeldProgram | None = None,
        clock: Clock | None = None,
        events: PerfEvents | None = None,
        tell: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.settings = settings
        self.identities: dict[int, ProcessIdentity] = {}
        self.has_lost_all = False
        self._tell = tell
        self._unprobed: tuple[Unprobed, ...] = ()
        self._may_be_over = bool(settings.pids)
        self._observers = tuple(observers)
        self._program = program
        self._clock = clock or SystemClock()
        self._offset_ns = self._clock.wall_ns() - self._clock.mono_ns()
        self._ended: list[int] = []
        self._ended_counts = EndedCounts()
        self._previous: dict[bytes, Records] = {}
        self._sampling = SamplingControl(settings.keep_one_in)
        self._n_lost = 0
        self._n_sampled = 0
        self._events = events or PerfEvents(find_software_events(settings.engine.host_probes))
        self._engine = Engine(settings.engine)
        self._stacks = StackKeeper(self._engine, self._observers)
        self._open = OpenCalls(self._engine, self._stacks)
        self._met: deque[ProcessIdentity] = deque()
        self._consumers: dict[str, Callable[[Records], None]] = {}
        has_pids = bool(settings.pids) or program is not None
        watch = Watch(self._engine, has_pids, settings.uid, settings.cgroup_ids)
        self._discovery = Discovery(
            self._engine, self._stacks, watch, self._meet, self._events, self._clock
        )
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
        self._engine.start_host_probes(self._events)
        self._consumers = {name: functools.partial(self._take, name) for name in self._engine.rings}
        self._follow_children()
        self._discovery.probe_files(self.settings.files)
        self._discovery.scan(
            self._engine.read_watched_pids() if self.settings.pids else iter_pids()
        )
        self._discovery.start()

    def _follow_children(self) -> None:
        """Watch the children that the named processes have by now; later ones are followed by the kernel's side."""
        if not self.settings.pids:
            return
        self._drop_ended()
        watched = self._engine.read_watched_pids()
        while new := find_descendants(watched) - watched:
            for pid in new:
                self._engine.watch_pid(pid)
            watched |= new

    def _drop_ended(self) -> None:
        """A named process that ended unseen, as before the probes were there, is not waited for."""
        for pid in self._engine.read_watched_pids():
            if has_ended(pid):
                self._engine.forget_pid(pid)

    @property
    def notes(self) -> tuple[str, ...]:
        """What this machine refused at the start, besides `missing`."""
        return self._discovery.notes

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

    def _is_deserted(self) -> bool:
        """Whether all processes that were named have ended, and their children."""
        if not self._may_be_over:
            return False
        self._may_be_over = False
        self.has_lost_all = not self._engine.read_watched_pids()
        return self.has_lost_all

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Trace until the time is over, the program ends or ``should_stop`` says so."""
        started_ns = self._clock.mono_ns()
        ends_ns = started_ns + self.settings.duration_ns if self.settings.duration_ns else None
        next_tick_ns = started_ns + TICK_NS
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
            is_over = is_over or self._is_deserted()
            if is_over or (ends_ns is not None and now_ns >= ends_ns):
                break
            if now_ns >= next_tick_ns:
                self._tick(started_ns)
                next_tick_ns += TICK_NS
        self._end()
        self._tick(started_ns, is_last=True)

    def _end(self) -> None:
        """Stop counting, so that every call that was counted has its record, and read all of them."""
        self._open.look(self._clock.mono_ns(), is_last=True)
        self._engine.end()
        for _ in range(_MOST_DRAINS):  # a probe that was running may still write
            if not self._drain():
                break

    def _build_poll(self) -> select.poll:
        poll = select.poll()
        if self._program is not None:
            poll.register(self._program.fd, select.POLLIN)
        for name, ring in self._engine.rings.items():
            if name in _WAKING_RINGS:
                poll.register(ring.fd, select.POLLIN)
        return poll

    def _drain(self) -> int:
        """Read every ring; how many records there were."""
        self._announce()
        n_records = self._engine.drain(self._consumers)
        if self._n_sampled > BUDGET:  # do not wait for the end of the round
            self._sample(0)
        return n_records

    def _take(self, ring: str, records: Records) -> None:
        if ring == RING:
            self._stacks.take(records)
            return
        if ring == "unfinished":
            self._open.take_ended(records)
            return
        if "flags" in (records.dtype.names or ()):
            self._n_sampled += int(np.count_nonzero(records["flags"] & Flag.EXACT == 0))
        if ring == "processes":
            is_exit = records["event"] == ProcessEvent.EXIT
            self._ended.extend(int(pid) for pid in records["pid"][is_exit])
            self._may_be_over |= bool(self.settings.pids) and bool(is_exit.any())
        events = BUILDERS[ring](records, self._offset_ns)
        self._stacks.stamp(records, events)
        for observer in self._observers:
            observer.on_events(ring, records, events)

    def _tick(self, started_ns: int, *, is_last: bool = False) -> None:
        mono_ns = self._clock.mono_ns()
        if self.settings.pids:
            self._drop_ended()
            self._may_be_over = True
        self._tell_unprobed()
        keys, counts = self._engine.read_counts()
        for pid in {int(pid) for pid in keys["pid"]} - self.identities.keys() - {0}:
            self._meet(pid)
        self._announce()
        if not is_last:
            self._open.look(mono_ns)
        self._tell_unfinished(self._open.pop_ended(), keys, counts)
        if is_last:
            still_open = self._open.read_open(mono_ns, self._find_cgroup)
            self._tell_unfinished(still_open, keys, counts)
            self._tell_stopped(self._open.build_stopped(still_open, mono_ns))
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
            unprobed=self._unprobed,
            probe_mode=self._engine.mode.value,
        )
        for observer in self._observers:
            observer.on_totals(totals)
        if not is_last:
            self._forget_ended(keys, counts)

    def _tell_unprobed(self) -> None:
        """Say which libraries could not be probed, each once."""
        before, self._unprobed = self._unprobed, self._discovery.unprobed
        for line in describe_unprobed(find_new(before, self._unprobed)):
            self._tell(line)

    def _tell_unfinished(self, unfinished: Records, keys: Records, counts: Records) -> None:
        """Tell the observers of calls that did not return (``struct ig_unfinished``)."""
        for records, events in self._open.build(unfinished, keys, counts, self._offset_ns):
            for observer in self._observers:
                observer.on_events(OPEN_RING, records, events)

    def _tell_stopped(self, records: Records) -> None:
        """Tell the observers of threads that are stopped inside of a call (``struct ig_off_cpu``)."""
        if not len(records):
            return
        events = build_off_cpu_events(records, self._offset_ns)
        events["flags"] |= np.uint8(EventFlag.IN_FLIGHT)
        for observer in self._observers:
            observer.on_events(OPEN_RING, records, events)

    def _find_cgroup(self, pid: int) -> int:
        identity = self.identities.get(pid)
        return find_cgroup_id(identity.cgroup) if identity is not None and identity.cgroup else 0

    def _sample(self, n_lost: int) -> int:
        """End a round of the sampling; the new setting."""
        fill = max((ring.fill() for ring in self._engine.rings.values()), default=0.0)
        keep_one_in = self._sampling.update(n_lost, fill, self._n_sampled)
        self._n_sampled = 0
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
                if name not in _NOT_SUMS:
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
        self._discovery.close()
        self._stacks.close()
        self._engine.close()
        self._events.close()
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
