"""The live agent: probes, exact counts and collectives of one node, pushed to a Fleet while they happen.

Three threads: the tracing loop (the caller's), the health loop, and the collective pushes. None of them can hold up a
traced process: probes write to rings, and what cannot be sent is kept up to a bound and then counted as lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.capture.kernel.abi import ProcessEvent
from ingero.agent.capture.session import TraceSession, TraceSettings
from ingero.agent.capture.totals import Totals
from ingero.agent.collectives.device import DeviceCollectives
from ingero.agent.collectives.host import CollectiveTracker
from ingero.agent.collectives.push import CollectivePusher, PushPace
from ingero.agent.health.account import CollectiveAccount
from ingero.agent.health.book import FindLabels
from ingero.agent.health.service import (
    AgentSettings,
    HealthAgent,
    OnLook,
    build_transport,
    open_agent,
)
from ingero.agent.health.signals.reading import Reading, Signals
from ingero.agent.metrics.machine import Processors
from ingero.config.nccl import ring_parent
from ingero.model.arrays import Records
from ingero.model.events import Events
from ingero.model.operations import GPU_SOURCES, OpKind, find_kinds
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_S

STALE_NS: Final = 3 * NS_PER_S
"""Counts older than this are no reading."""
LOOK_S: Final = 0.2
"""Between two looks of the pushing thread at what was traced."""


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

    What the counts cannot tell is absent: the memory signal needs NVML, and a second without totals is no reading.
    """

    def __init__(self, processors: Processors | None = None) -> None:
        self._processors = processors or Processors()
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
    seen = np.maximum(changes["seen"], 1)
    spent_ns = float((changes["total_ns"] * np.maximum(own, 0) / seen)[is_gpu].sum())
    return int(own[is_launch].sum()), min(spent_ns / (window_ns * len(pids)), 1.0)


@dataclass(slots=True)
class LiveObserver:
    """Hands what is traced to the health source and to the collective pushes.

    Attributes:
        source: Gets the counts.
        pusher: Gets collectives, synchronisations, processes.
        offset_ns: Wall clock less monotonic clock, as of the start: entries are told on a clock that never steps.
    """

    source: CounterSource
    pusher: CollectivePusher
    workload: str = ""

    def on_process(self, identity: ProcessIdentity) -> None:
        """A process that makes GPU calls."""
        self.workload = identity.job or self.workload
        self.pusher.note_process(identity.pid, identity.place.rank, identity.job)

    def on_events(self, ring: str, records: Records, events: Events) -> None:  # noqa: ARG002 - the protocol's signature
        """A batch of one ring."""
        if ring == "collectives":
            self.pusher.add_collectives(records.copy())
        elif ring in {"calls", "kept_calls"}:
            self.pusher.add_calls(records)
        elif ring == "processes":
            for pid in records["pid"][records["event"] == ProcessEvent.EXIT]:
                self.pusher.note_exit(int(pid))

    def on_totals(self, totals: Totals) -> None:
        """The counts of a second."""
        self.pusher.note_in_flight(totals.in_flight)
        self.source.on_totals(totals, self.workload)


FindAccount = Callable[[], CollectiveAccount | None]
"""What became of the node's collectives so far; None where none are pushed."""
Follow = Callable[[HealthAgent, FindAccount], OnLook]


@dataclass(frozen=True, slots=True)
class LiveTold:
    """Who is told what by a live node.

    Attributes:
        follow: Makes what is told of each look of the health loop; is given what asks for the collectives' account.
        find_labels: What the node's workload said last of itself; None when nobody asks it.
    """

    follow: Follow = lambda _agent, _account: lambda _look, _notes: None
    find_labels: FindLabels | None = None


@contextmanager
def open_live(
    health: AgentSettings, clock: Clock, told: LiveTold | None = None
) -> Iterator[LiveObserver]:
    """Push what a `TraceSession` sees, while it sees it.

    The observer goes to the session, which must end before the context does: what it saw last is still sent then.

    Raises:
        IngeroError: A certificate or the local socket cannot be used.
    """
    told = told or LiveTold()
    stop = threading.Event()
    source = CounterSource()
    with ExitStack() as stack:
        transport = build_transport(health)
        stack.callback(transport.close)
        pusher = CollectivePusher(
            health.identity,
            transport,
            CollectiveTracker(),
            clock,
            PushPace(health.loop.push_interval_ns, health.loop.early_push_gap_ns),
            DeviceCollectives(ring_parent()),
        )
        agent = stack.enter_context(open_agent(health, source, clock, stop, told.find_labels))
        threads = [
            threading.Thread(
                target=agent.run, args=(told.follow(agent, pusher.account),), daemon=True
            ),
            threading.Thread(target=_push, args=(pusher, stop), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            yield LiveObserver(source, pusher)
        finally:
            stop.set()
            for thread in threads:
                thread.join(health.transport.timeout_ns / NS_PER_S)


@dataclass(slots=True)
class LiveAgent:
    """One node's live agent; `run` until told to stop.

    Attributes:
        settings: What it does.
        told: Who is told what.
        on_ready: Called with the session once the probes wait and everything runs.
        tell: Told in a sentence what goes wrong while it traces.
    """

    settings: LiveSettings
    told: LiveTold = field(default_factory=LiveTold)
    on_ready: Callable[[TraceSession], None] = lambda _session: None
    tell: Callable[[str], None] = lambda _text: None
    clock: Clock = field(default_factory=SystemClock)

    def run(self, stop: threading.Event) -> None:
        """Probe, count and push.

        Raises:
            UnsupportedError: The probes cannot be loaded here.
            IngeroError: A certificate or the local socket cannot be used.
        """
        with (
            open_live(self.settings.health, self.clock, self.told) as observer,
            TraceSession(
                self.settings.trace, [observer], clock=self.clock, tell=self.tell
            ) as session,
        ):
            self.on_ready(session)
            session.run(stop.is_set)


def _push(pusher: CollectivePusher, stop: threading.Event) -> None:
    while not stop.wait(LOOK_S):
        pusher.look()
    pusher.finish()
