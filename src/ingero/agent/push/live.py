"""The live agent: probes, exact counts and collectives of one node, pushed to a Fleet while they happen.

Three threads: the tracing loop (the caller's), the health loop, and the collective pushes. None of them can hold up a
traced process: probes write to rings, and what cannot be sent is kept up to a bound and then counted as lost.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.capture.kernel.abi import ProcessEvent
from ingero.agent.capture.session import TraceSession, TraceSettings
from ingero.agent.capture.totals import Totals
from ingero.agent.collectives.device import DeviceCollectives
from ingero.agent.collectives.host import CollectiveTracker
from ingero.agent.collectives.push import CollectivePusher, PushPace
from ingero.agent.collectives.run_queue import RunQueue
from ingero.agent.diagnosis.examiner import AskedTransport, Examiner, Looks
from ingero.agent.diagnosis.history import CounterHistory
from ingero.agent.diagnosis.switches import watch_switches
from ingero.agent.health.collective_counts import CollectiveCounts
from ingero.agent.health.open_episodes import FindLabels
from ingero.agent.health.service import (
    AgentSettings,
    HealthAgent,
    OnSample,
    build_transport,
    open_agent,
)
from ingero.agent.health.signals.reading import Reading, Signals
from ingero.agent.health.spill import open_spill
from ingero.agent.metrics.machine import Processors
from ingero.agent.push.rounds import PushRounds
from ingero.config.environment import ring_parent
from ingero.model.arrays import FloatArray, Records
from ingero.model.counters import CudaWait
from ingero.model.events import Events, Source, op_name
from ingero.model.operations import GPU_SOURCES, OpKind, find_kinds
from ingero.model.progress import Ending
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_S

_CUDA_SOURCES: Final = (Source.CUDA, Source.DRIVER, Source.CUDA_GRAPH)
STALE_NS: Final = 3 * NS_PER_S
"""Counts older than this are no reading."""
_SIGNAL: Final = 0x7F
_STATUS_BITS: Final = 8
# Of the kernel's exit code, as wait(2) gives it: the signal below the core-dump bit, the exit status above both.
_END_S: Final = 10.0
"""How long the last pushes may take, at least: the machine may be busy, not only Fleet."""


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """A node's live agent.

    Attributes:
        trace: What is probed.
        health: Who this is, where Fleet is, how often.
    """

    trace: TraceSettings
    health: AgentSettings


class CounterSource:
    """Readings from the exact kernel counts of the last second: a `SignalSource`.

    What the counts do not hold is absent: the memory signal needs NVML, and a second without totals is no reading.
    """

    def __init__(self) -> None:
        self._processors = Processors()
        self._lock = threading.Lock()
        self._totals: Totals | None = None
        self._window_ns = 0
        self._workload = ""

    def on_totals(self, totals: Totals, workload: str) -> None:
        """Take the counts of a second."""
        with self._lock:
            before = self._totals
            self._window_ns = totals.mono_ns - before.mono_ns if before else 0
            self._totals, self._workload = totals, workload

    @property
    def is_over(self) -> bool:
        """Never: the agent waits for work."""
        return False

    def read(self, wall_ns: int, mono_ns: int) -> Reading | None:
        """The newest second; None before there is one and when it is old."""
        with self._lock:
            totals, window_ns, workload = self._totals, self._window_ns, self._workload
        if totals is None or window_ns <= 0 or mono_ns - totals.mono_ns > STALE_NS:
            return None
        launches, compute = _sum_up(totals, window_ns)
        in_flight = totals.in_flight
        oldest_ns = int(in_flight["frame"]["entry_ns"].min()) if len(in_flight) else totals.mono_ns
        return Reading(
            signals=Signals(
                launches * NS_PER_S / window_ns, compute, None, self._processors.read_idle()
            ),
            launches=launches,
            is_pending=totals.mono_ns - oldest_ns >= window_ns,
            workload=workload,
            wall_ns=wall_ns,
        )


def _sum_up(totals: Totals, window_ns: int) -> tuple[int, float | None]:
    """Launches of the window, and the share of it that processes spent in GPU calls; None without a process."""
    keys, changes = totals.keys, totals.changes
    own = changes["seen"].astype(np.int64) - changes["nested"].astype(np.int64)
    kinds = find_kinds(keys["source"], keys["op"])
    is_launch = np.isin(kinds, (OpKind.LAUNCH, OpKind.GRAPH_LAUNCH))
    is_gpu = np.isin(keys["source"], GPU_SOURCES)
    pids = np.unique(keys["pid"][is_gpu])
    if not len(pids):
        return 0, None
    spent_ns = float(_find_own_ns(changes)[is_gpu].sum())
    return int(own[is_launch].sum()), min(spent_ns / (window_ns * len(pids)), 1.0)


def _find_own_ns(changes: Records) -> FloatArray:
    """Time in calls that no other call is around, shape (n,); those inside take as long on average as the others."""
    own = np.maximum(changes["seen"].astype(np.int64) - changes["nested"].astype(np.int64), 0)
    spent: FloatArray = changes["total_ns"] * own / np.maximum(changes["seen"], 1)
    return spent


def _sum_cuda_ns(totals: Totals) -> dict[int, float]:
    """Time that each process spent in calls of CUDA since the totals before."""
    is_cuda = np.isin(totals.keys["source"], _CUDA_SOURCES)
    pids, row = np.unique(totals.keys["pid"][is_cuda], return_inverse=True)
    spent = np.bincount(row, _find_own_ns(totals.changes)[is_cuda], len(pids))
    return dict(zip(pids.tolist(), spent.tolist(), strict=True))


def _find_waits(in_flight: Records) -> dict[int, CudaWait]:
    """The call of CUDA that the first thread of each process is in."""
    frames = in_flight["frame"]
    is_first = (in_flight["tid"] == in_flight["pid"]) & (in_flight["depth"] == 0)
    rows = np.flatnonzero(is_first & np.isin(frames["source"], _CUDA_SOURCES))
    return {
        int(in_flight["pid"][row]): CudaWait(
            op_name(int(frames["source"][row]), int(frames["op"][row])),
            int(frames["entry_ns"][row]),
        )
        for row in rows.tolist()
    }


@dataclass(slots=True)
class LiveObserver:
    """Hands what is traced to the health source and to the collective pushes.

    Attributes:
        source: Gets the counts.
        pusher: Gets collectives, synchronisations, processes.
        history: Gets the time in calls of CUDA.
        workload: The job that the node is judged by; another one only once no process of it lives. Its processes may
            come and go, and jobs may share a node.
    """

    source: CounterSource
    pusher: CollectivePusher
    history: CounterHistory
    workload: str = ""
    _jobs: dict[int, str] = field(default_factory=dict)

    def on_process(self, identity: ProcessIdentity) -> None:
        """A process that makes GPU calls."""
        if identity.job:
            self._jobs[identity.pid] = identity.job
            self._choose_workload()
        place = identity.place
        self.pusher.note_process(
            identity.pid, place.rank, identity.job, identity.meeting, identity.resource
        )

    def on_events(self, ring: str, records: Records, events: Events) -> None:  # noqa: ARG002 - the protocol's signature
        """A batch of one ring."""
        if ring == "collectives":
            self.pusher.add_collectives(records.copy())
        elif ring in {"calls", "kept_calls"}:
            self.pusher.add_calls(records)
        elif ring == "processes":
            for begun in records[records["event"] == ProcessEvent.EXEC]:
                self.pusher.note_exec(int(begun["pid"]), int(begun["header"]["mono_ns"]))
            for exited in records[records["event"] == ProcessEvent.EXIT]:
                pid, status = int(exited["pid"]), int(exited["exit_code"])
                at_ns = int(exited["header"]["mono_ns"])
                self._forget(pid)
                self.pusher.note_exit(pid, Ending(at_ns, status & _SIGNAL, status >> _STATUS_BITS))

    def on_unrecorded_ends(self, pids: Collection[int]) -> None:
        """Processes that ended and made no probed call, or whose record was lost."""
        for pid in pids:
            self._forget(pid)
            self.pusher.note_exit(pid)

    def on_totals(self, totals: Totals) -> None:
        """The counts of a second."""
        self.pusher.note_in_flight(totals.in_flight)
        self.source.on_totals(totals, self.workload)
        self.history.add_calls(totals.mono_ns, _sum_cuda_ns(totals))
        self.history.note_open_calls(_find_waits(totals.in_flight))

    def _forget(self, pid: int) -> None:
        if self._jobs.pop(pid, None) is not None:
            self._choose_workload()

    def _choose_workload(self) -> None:
        if self.workload not in self._jobs.values():
            self.workload = next(iter(self._jobs.values()), self.workload)


FindCollectiveCounts = Callable[[], CollectiveCounts | None]
"""What became of the node's collectives so far; None where none are pushed."""
Follow = Callable[[HealthAgent, FindCollectiveCounts], OnSample]


@dataclass(frozen=True, slots=True)
class LiveCallbacks:
    """What a live node calls while it runs.

    Attributes:
        follow: Makes the callback for each sample of the health loop; is given what counts the collectives.
        find_labels: The latest annotations of the node's workload; None without annotations.
        can_probe: Whether a process that Fleet asks about may be probed for some seconds.
        notify: Gets a sentence for each failure.
    """

    follow: Follow = lambda _agent, _counts: lambda _sample, _notes: None
    find_labels: FindLabels | None = None
    can_probe: bool = True
    notify: Callable[[str], None] = lambda _text: None


@contextmanager
def _open_examiner(
    health: AgentSettings,
    history: CounterHistory,
    clock: Clock,
    stop: threading.Event,
    callbacks: LiveCallbacks,
) -> Iterator[Examiner]:
    """What answers Fleet's questions, on a thread of its own with a connection of its own."""
    transport = build_transport(health)
    watch = functools.partial(watch_switches, clock) if callbacks.can_probe else None
    examiner = Examiner(health.identity, history, transport, clock, Looks(watch))
    examiner.notify = callbacks.notify
    thread = threading.Thread(target=examiner.run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield examiner
    finally:
        stop.set()
        examiner.close()
        thread.join(health.transport.timeout_ns / NS_PER_S)
        if not thread.is_alive():
            transport.close()


@contextmanager
def open_live(
    health: AgentSettings, clock: Clock, callbacks: LiveCallbacks | None = None
) -> Iterator[LiveObserver]:
    """Push what a `TraceSession` sees, while it sees it.

    The observer goes to the session, which must end before the context does: what it saw last is still sent then.

    Raises:
        IngeroError: A certificate or the local socket cannot be used.
    """
    callbacks = callbacks or LiveCallbacks()
    stop = threading.Event()
    source = CounterSource()
    with ExitStack() as stack:
        transport = build_transport(health)
        stack.callback(transport.close)
        history = CounterHistory(clock.wall_ns() - clock.mono_ns())
        examiner: Examiner = stack.enter_context(
            _open_examiner(health, history, clock, stop, callbacks)
        )
        queue = RunQueue(
            AskedTransport(transport, examiner.ask),
            clock,
            health.loop.push_interval_ns,
            stack.enter_context(open_spill(health.spill, clock)),
        )
        pusher = CollectivePusher(
            health.identity,
            queue,
            CollectiveTracker(),
            clock,
            PushPace(health.loop.push_interval_ns, health.loop.early_push_gap_ns),
            DeviceCollectives(ring_parent(), clock.mono_ns()),
        )
        pusher.on_finished, pusher.offset_ns = history.add_ops, history.offset_ns
        rounds = PushRounds(pusher, history, clock, callbacks.notify)

        def count_outcomes() -> CollectiveCounts:
            counts = examiner.add_outcomes(pusher.count_outcomes())
            return replace(counts, push_faults=rounds.n_faults)

        agent = stack.enter_context(open_agent(health, source, clock, stop, callbacks.find_labels))
        threads = [
            threading.Thread(
                target=agent.run,
                args=(callbacks.follow(agent, count_outcomes),),
                daemon=True,
            ),
            threading.Thread(target=rounds.run, args=(stop,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            yield LiveObserver(source, pusher, history)
        finally:
            stop.set()
            _join(threads, max(health.transport.timeout_ns / NS_PER_S, _END_S))
            if n_left := count_outcomes().waiting:
                callbacks.notify(f"{n_left} collectives were not delivered to Fleet")


def _join(threads: Iterable[threading.Thread], timeout_s: float) -> None:
    ends_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(ends_s - time.monotonic(), 0))


@dataclass(slots=True)
class LiveAgent:
    """One node's live agent; `run` until it is to stop.

    Attributes:
        settings: What it does.
        callbacks: What it calls.
        on_ready: Called with the session once the probes wait and everything runs.
    """

    settings: LiveSettings
    callbacks: LiveCallbacks = field(default_factory=LiveCallbacks)
    on_ready: Callable[[TraceSession], None] = lambda _session: None
    clock: Clock = field(default_factory=SystemClock)

    def run(self, stop: threading.Event) -> None:
        """Probe, count and push.

        Raises:
            UnsupportedError: The probes cannot be loaded here.
            IngeroError: A certificate or the local socket cannot be used.
        """
        with (
            open_live(self.settings.health, self.clock, self.callbacks) as observer,
            TraceSession(
                self.settings.trace,
                [observer],
                clock=self.clock,
                notify=self.callbacks.notify,
            ) as session,
        ):
            self.on_ready(session)
            session.run(stop.is_set)
