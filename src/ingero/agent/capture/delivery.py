"""From the kernel's rings to the observers.

Records become the model's rows, with their stacks, in the tracing thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

import numpy as np

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.capture.events import BUILDERS, build_off_cpu_events
from ingero.agent.capture.kernel.abi import Flag
from ingero.agent.capture.open_calls import RING as OPEN_RING
from ingero.agent.capture.open_calls import OpenCalls
from ingero.agent.capture.probes.engine import Engine
from ingero.agent.capture.processes import TracedProcesses
from ingero.agent.capture.stack_keeper import RING, StackKeeper
from ingero.agent.capture.totals import Totals
from ingero.model.arrays import Records
from ingero.model.events import EventFlag, Events

_UNFINISHED: Final = "unfinished"
_PROCESSES: Final = "processes"


class Observer(Protocol):
    """What gets the results of a trace. Called in the tracing thread; record views die with the call."""

    def on_process(self, identity: ProcessIdentity) -> None:
        """A process with GPU calls or disk requests was met for the first time, or more is known of it."""
        ...

    def on_events(self, ring: str, records: Records, events: Events) -> None:
        """A batch of one ring, as the kernel wrote it and as the model's rows.

        A batch of ``in_flight`` is in the form in which the kernel would have written it.
        """
        ...

    def on_totals(self, totals: Totals) -> None:
        """New totals."""
        ...


@runtime_checkable
class EndObserver(Protocol):
    """An observer that keeps something of each process."""

    def on_unrecorded_ends(self, pids: Collection[int]) -> None:
        """Processes ended, and no record of the ring ``processes`` says so: nobody knows how, nor exactly when."""
        ...


class EventDelivery:
    """Takes the records of every ring and hands rows to the observers.

    Args:
        engine: The probes.
        processes: Whose records they are.
        observers: What gets the rows; those that can take stacks get them first.
        offset_ns: Wall clock minus monotonic clock.

    Attributes:
        n_sampled: Records of sampled kinds since they were popped.
        stacks: Resolves the stacks of records.
    """

    def __init__(
        self,
        engine: Engine,
        processes: TracedProcesses,
        observers: Sequence[Observer],
        offset_ns: int,
    ) -> None:
        self.n_sampled = 0
        self.stacks = StackKeeper(engine, observers)
        self._processes = processes
        self._observers = tuple(observers)
        self._offset_ns = offset_ns
        self._open = OpenCalls(engine, self.stacks)
        self._engine = engine

    @functools.cached_property
    def consumers(self) -> Mapping[str, Callable[[Records], None]]:
        """What takes the records of each ring, for `Engine.drain`; asked for once the host probes have started."""
        return {name: functools.partial(self._take, name) for name in self._engine.rings}

    def _take(self, ring: str, records: Records) -> None:
        if ring == RING:
            self.stacks.take(records)
            return
        if ring == _UNFINISHED:
            self._open.take_ended(records)
            return
        if "flags" in (records.dtype.names or ()):
            self.n_sampled += int(np.count_nonzero(records["flags"] & Flag.EXACT == 0))
        if ring == _PROCESSES:
            self._processes.on_records(records)
        events = BUILDERS[ring](records, self._offset_ns)
        self.stacks.stamp(records, events)
        self._deliver(ring, records, events)

    def announce(self) -> None:
        """Tell the observers of processes met, before their records."""
        for identity in self._processes.pop_met():
            for observer in self._observers:
                observer.on_process(identity)

    def announce_ends(self, keys: Records) -> None:
        """Have processes that ended without a record be forgotten, and tell the observers that keep any.

        Args:
            keys: Process, source and operation of all that is counted.
        """
        kept = self.stacks.pids | set(np.unique(keys["pid"]).tolist())
        pids = self._processes.find_unrecorded(kept)
        for observer in self._observers if pids else ():
            if isinstance(observer, EndObserver):
                observer.on_unrecorded_ends(pids)

    def read_open_stacks(self, mono_ns: int, *, is_last: bool = False) -> None:
        """Read the stacks of calls that have not returned for long; at the end of all."""
        self._open.read_due_stacks(mono_ns, is_last=is_last)

    def deliver_ended(self, keys: Records, counts: Records) -> None:
        """Calls whose thread ended inside of them; ``keys`` and ``counts`` as `KernelState.read_counts` gives them."""
        self._deliver_unfinished(self._open.pop_ended(), keys, counts)

    def deliver_open(self, mono_ns: int, keys: Records, counts: Records) -> None:
        """At the end: calls that are in flight, and threads that are stopped inside of one."""
        still_open = self._open.read_open(mono_ns, self._processes.find_cgroup)
        self._deliver_unfinished(still_open, keys, counts)
        stopped = self._open.build_stopped(still_open, mono_ns)
        if len(stopped):
            events = build_off_cpu_events(stopped, self._offset_ns)
            events["flags"] |= np.uint8(EventFlag.IN_FLIGHT)
            self._deliver(OPEN_RING, stopped, events)

    def deliver_totals(self, totals: Totals) -> None:
        """New totals."""
        for observer in self._observers:
            observer.on_totals(totals)

    def pop_n_sampled(self) -> int:
        """Records of sampled kinds since the last time."""
        n_sampled, self.n_sampled = self.n_sampled, 0
        return n_sampled

    def _deliver_unfinished(self, unfinished: Records, keys: Records, counts: Records) -> None:
        for records, events in self._open.build(unfinished, keys, counts, self._offset_ns):
            self._deliver(OPEN_RING, records, events)

    def _deliver(self, ring: str, records: Records, events: Events) -> None:
        for observer in self._observers:
            observer.on_events(ring, records, events)
