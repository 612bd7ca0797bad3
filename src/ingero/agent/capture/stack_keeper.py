"""Stacks on their way from the kernel to the observers: known before the first event that carries one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

from ingero.agent.capture.kernel.perf import Mapping as FileMapping
from ingero.agent.capture.probes.engine import Engine
from ingero.agent.capture.probes.stacks import RecordedStacks
from ingero.agent.capture.stacks.outside import OpenCall
from ingero.agent.capture.stacks.resolver import Stack
from ingero.model.arrays import Records
from ingero.model.events import Events

RING: Final = "stacks"


@runtime_checkable
class StackObserver(Protocol):
    """An observer that wants stacks."""

    def on_stacks(self, stacks: Mapping[int, Stack]) -> None:
        """Stacks that were not delivered before, by hash; the events that carry them follow."""
        ...


class StackKeeper:
    """Resolves what the kernel recorded; does nothing when stacks were not asked for.

    Args:
        engine: The probes.
        observers: What gets the stacks, as far as it wants them.
    """

    def __init__(self, engine: Engine, observers: Sequence[object]) -> None:
        self._engine = engine
        self._observers = [one for one in observers if isinstance(one, StackObserver)]
        self._stacks = (
            RecordedStacks(engine.maps, engine.stack_copies) if engine.with_stacks else None
        )

    @property
    def refused(self) -> dict[int, str]:
        """Why a process's interpreter is not read, by process."""
        return self._stacks.refused if self._stacks else {}

    @property
    def is_on(self) -> bool:
        """Whether any call is to carry its stack."""
        return self._stacks is not None

    @property
    def pids(self) -> frozenset[int]:
        """Processes of which something is kept."""
        return self._stacks.pids if self._stacks is not None else frozenset()

    def on_mapping(self, mapping: FileMapping) -> None:
        """A process mapped a file. Any thread."""
        if self._stacks is not None:
            self._stacks.on_mapping(mapping)

    def examine(self, pid: int) -> None:
        """A process has a library that we probe. Any thread."""
        if self._stacks is not None:
            self._stacks.examine(pid)

    def take(self, records: Records) -> None:
        """Resolve ``struct ig_stack`` records and hand new stacks to the observers."""
        if self._stacks is None:
            return
        self._stacks.take(records)
        self._deliver()

    def _deliver(self) -> None:
        new = self._stacks.index.pop_new() if self._stacks is not None else {}
        if new:
            for observer in self._observers:
                observer.on_stacks(new)

    def read_open(self, pid: int, call: OpenCall) -> int:
        """The hash of the stack of a call that has not returned; 0 where there is none. The observers get it."""
        if self._stacks is None:
            return 0
        found = self._stacks.read_open(pid, call)
        self._deliver()
        return found

    def stamp(self, records: Records, events: Events) -> None:
        """Fill in the stacks of events that were built from these records.

        A stack is written before the call that carries it, so reading its ring now finds every one of them.
        """
        if self._stacks is None or "stack_id" not in (records.dtype.names or ()):
            return
        self._engine.rings[RING].drain(self.take)
        events["stack_hash"] = self._stacks.index.find_hashes(records["stack_id"])

    def forget(self, pids: Collection[int]) -> None:
        """Forget processes that ended."""
        if self._stacks is not None:
            self._stacks.forget(pids)

    def close(self) -> None:
        """Free everything."""
        if self._stacks is not None:
            self._stacks.close()
