"""The tracing loop: find libraries, read rings, count once a second, hand all of it to observers.

The busy rings are read on a timer, because a wake-up per call would cost more than the call; process events and failed
calls wake the loop at once. Other threads probe libraries as they are loaded.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ingero.agent.capture.delivery import EventDelivery, Observer
from ingero.agent.capture.discover.processes import iter_pids
from ingero.agent.capture.discovery import Discovery, Watch, find_new
from ingero.agent.capture.kernel.features import forget_names
from ingero.agent.capture.kernel.perf import PerfEvents
from ingero.agent.capture.probes.engine import Engine, EngineSettings, Missing
from ingero.agent.capture.probes.host import PROBES, find_software_events
from ingero.agent.capture.probes.sampling import BUDGET
from ingero.agent.capture.processes import (
    TracedProcesses,
    check_pids,
    describe_namespace,
)
from ingero.agent.capture.program import HeldProgram
from ingero.agent.capture.stack_keeper import RING
from ingero.agent.capture.totals import CountReader, Times
from ingero.closing import Closing
from ingero.heap import trim_heap
from ingero.model.recording import Unprobed, describe_unprobed
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_MS, NS_PER_S

DRAIN_MS: Final = 100
TICK_NS: Final = NS_PER_S
_MAX_DRAINS: Final = 8
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
        kubelet: Socket of the kubelet, which is asked for the devices of processes in pods; None asks nobody.
        drain_ms: How often the busy rings are read. Each reading has its price: no more often than observers need it.
    """

    engine: EngineSettings = field(default_factory=EngineSettings)
    duration_ns: int = 0
    pids: tuple[int, ...] = ()
    uid: int | None = None
    cgroup_ids: tuple[int, ...] = ()
    keep_one_in: int = 0
    files: tuple[Path, ...] = ()
    kubelet: Path | None = None
    drain_ms: int = DRAIN_MS


class TraceSession(Closing):
    """Everything from the first probe to the last count.

    Args:
        settings: What to trace.
        observers: What gets the results.
        program: A held program to release once the probes wait for it.
        clock: Both clocks.
        events: perf's events, opened before privileges were given up; closed with this. None opens them now.
        notify: Called with a sentence about what goes wrong while it traces.

    Raises:
        UnsupportedError: The engine cannot be loaded here, or processes cannot be chosen by their pid.
    """

    def __init__(
        self,
        settings: TraceSettings,
        observers: Sequence[Observer],
        program: HeldProgram | None = None,
        clock: Clock | None = None,
        events: PerfEvents | None = None,
        notify: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.settings = settings
        self._notify = notify
        self._unprobed: tuple[Unprobed, ...] = ()
        self._program = program
        has_pids = bool(settings.pids) or program is not None
        if has_pids:
            check_pids()
        self._clock = clock or SystemClock()
        self._events = events or PerfEvents(find_software_events(settings.engine.host_probes))
        self._engine = Engine(settings.engine)
        self._processes = TracedProcesses(self._engine, settings.pids, settings.kubelet)
        offset_ns = self._clock.wall_ns() - self._clock.mono_ns()
        self._delivery = EventDelivery(self._engine, self._processes, observers, offset_ns)
        self._counts = CountReader(self._engine, settings.keep_one_in)
        self._times = Times(0, self._clock.mono_ns(), offset_ns)
        self._discovery = Discovery(
            self._engine,
            self._delivery.stacks,
            Watch(self._engine, has_pids, settings.uid, settings.cgroup_ids),
            self._processes.meet,
            self._events,
            self._clock,
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
    def has_lost_all(self) -> bool:
        """Whether tracing ended because every process that was named has ended, with its children."""
        return self._processes.has_lost_all

    @property
    def missing(self) -> tuple[Missing, ...]:
        """What this machine refused."""
        return tuple(self._engine.missing)

    @property
    def refused_interpreters(self) -> tuple[str, ...]:
        """Why Python frames of a process are not read."""
        return tuple(sorted(set(self._delivery.stacks.refused.values())))

    @property
    def notes(self) -> tuple[str, ...]:
        """What this machine refused at the start, besides `missing`."""
        return describe_namespace() + self._discovery.notes

    def _prepare(self) -> None:
        if self._program is not None:
            self._engine.control.watch_pid(self._program.pid)
        if self.settings.uid is not None:
            self._engine.control.watch_uid(self.settings.uid)
        for cgroup_id in self.settings.cgroup_ids:
            self._engine.control.watch_cgroup(cgroup_id)
        self._engine.start_host_probes(self._events)
        self._processes.follow_children()
        self._discovery.probe_files(self.settings.files)
        if self._program is not None:
            for path in self._program.paths:
                self._discovery.probe_program(path, self._program.pid)
        self._discovery.scan(
            self._engine.control.read_watched_pids() if self.settings.pids else iter_pids()
        )
        self._discovery.start()

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Trace until the time is over, the program ends or ``should_stop`` says so."""
        forget_names()
        trim_heap()  # the kernel's types, which loading probes needs, take 5 to 11 MB
        started_ns = self._clock.mono_ns()
        self._times = replace(self._times, started_ns=started_ns)
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
            is_over = is_over or self._processes.is_deserted()
            if is_over or (ends_ns is not None and now_ns >= ends_ns):
                break
            if now_ns >= next_tick_ns:
                self._tick()
                next_tick_ns += TICK_NS
        self._end()
        self._tick(is_last=True)

    def _end(self) -> None:
        """Stop counting, so that every call that was counted has its record, and read all of them."""
        self._delivery.read_open_stacks(self._clock.mono_ns(), is_last=True)
        self._engine.control.end()
        for _ in range(_MAX_DRAINS):  # a probe that was running may still write
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
        self._delivery.announce()
        n_records = self._engine.drain(self._delivery.consumers)
        if self._delivery.n_sampled > BUDGET:  # do not wait for the end of the round
            self._counts.sample(self._delivery.pop_n_sampled())
        return n_records

    def _tick(self, *, is_last: bool = False) -> None:
        """Once a second and at the end: exact counts, and calls that do not return."""
        mono_ns = self._clock.mono_ns()
        self._processes.drop_ended()
        self._report_unknown()
        keys, counts = self._engine.state.read_counts()
        self._processes.meet_counted(keys)
        self._delivery.announce()
        if not is_last:
            self._delivery.announce_ends(keys)
            self._delivery.read_open_stacks(mono_ns)
        self._delivery.deliver_ended(keys, counts)
        if is_last:
            self._delivery.deliver_open(mono_ns, keys, counts)
        totals = self._counts.build(
            (keys, counts),
            replace(self._times, mono_ns=mono_ns),
            self._delivery.pop_n_sampled(),
            self._unprobed,
            is_last=is_last,
        )
        for note in self._counts.pop_notes():
            self._notify(note)
        self._delivery.deliver_totals(totals)
        if not is_last and (ended := self._processes.pop_ended()):
            self._counts.forget(ended, keys, counts)
            self._delivery.stacks.forget(ended)

    def _report_unknown(self) -> None:
        """Say which libraries could not be probed and what is not known of processes, each once."""
        opened = self._events.open_late()
        self._engine.follow_late(opened)
        late = self._discovery.note_late(opened)
        for note in (*self._processes.pop_notes(), *self._discovery.pop_notes(), *late):
            self._notify(note)
        before, self._unprobed = self._unprobed, self._discovery.unprobed
        for line in describe_unprobed(find_new(before, self._unprobed)):
            self._notify(line)

    def close(self) -> None:
        """Remove every probe; ends the program if it still runs. Safe to call twice."""
        self._discovery.close()
        self._processes.close()
        self._delivery.stacks.close()
        self._engine.close()
        self._events.close()
        if self._program is not None:
            self._program.end()
