"""The processes of a trace: who they are, which of them are watched by their pid, and which have ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from ingero.agent.capture.assignments import AssignmentFinder
from ingero.agent.capture.discover.cgroups import seen_cgroups
from ingero.agent.capture.discover.identity import (
    MAX_EMPTY_READS,
    ProcessIdentity,
    read_identity,
)
from ingero.agent.capture.discover.pid_namespace import FIX, has_host_pids
from ingero.agent.capture.discover.processes import find_descendants, has_ended
from ingero.agent.capture.kernel.abi import ProcessEvent
from ingero.agent.capture.probes.engine import Engine
from ingero.errors import UnsupportedError
from ingero.model.arrays import Records


class TracedProcesses:
    """Follows processes from the first that is met to the last that ends.

    In a pid namespace other than the host's none is met and none is missed: what ``/proc`` tells of a number is not
    about the process that the kernel's side means by it.

    Args:
        engine: The probes, which know the processes that are watched by their pid.
        pids: Processes to watch with their children; none when others than pids say whom to watch.
        kubelet: Socket of the kubelet, which is asked for the devices of processes in pods; None asks nobody.

    Attributes:
        has_lost_all: Whether every process that was named has ended, with its children.
    """

    def __init__(self, engine: Engine, pids: Collection[int], kubelet: Path | None = None) -> None:
        self.has_lost_all = False
        self._engine = engine
        self._are_named = bool(pids)
        self._may_be_over = self._are_named
        self._identities: dict[int, ProcessIdentity] = {}
        self._met: deque[ProcessIdentity] = deque()
        self._asked: dict[int, object] = {}
        # Of the three above; reading /proc may wait and is outside of it.
        self._lock = threading.Lock()
        self._ended: list[int] = []
        self._missing = frozenset[int]()
        self._finder = AssignmentFinder(kubelet, self._complete) if kubelet is not None else None
        for pid in pids:
            engine.control.watch_pid(pid)

    def follow_children(self) -> None:
        """Watch the children that the named processes have by now; later ones are followed by the kernel's side."""
        if not self._are_named:
            return
        self.drop_ended()
        watched = self._engine.control.read_watched_pids()
        while new := find_descendants(watched) - watched:
            for pid in new:
                self._engine.control.watch_pid(pid)
            watched |= new

    def drop_ended(self) -> None:
        """Do not wait for a named process that ended unseen, as before the probes were there."""
        if not self._are_named:
            return
        for pid in self._engine.control.read_watched_pids():
            if has_ended(pid):
                self._engine.control.forget_pid(pid)
        self._may_be_over = True

    def meet(self, pid: int) -> None:
        """Ask who a process is while it is there to be asked. It may wait: not in the thread that reads rings."""
        self._ask(pid, MAX_EMPTY_READS)

    def _ask(self, pid: int, n_reads: int) -> None:
        """Ask it once, for all threads; again where it called execve or ended meanwhile."""
        is_stale = has_host_pids()
        while is_stale:
            question = object()
            with self._lock:
                if pid in self._identities or self._asked.setdefault(pid, question) is not question:
                    return
            identity = None
            try:
                identity = read_identity(pid, n_reads=n_reads)
            finally:
                with self._lock:
                    is_stale = self._asked.get(pid) is not question
                    if not is_stale:
                        del self._asked[pid]
                    if not is_stale and identity is not None:
                        self._announce(identity)
                        self._ask_kubelet(identity)

    def _announce(self, identity: ProcessIdentity) -> None:
        """Under the lock."""
        self._identities[identity.pid] = identity
        self._met.append(identity)

    def _ask_kubelet(self, identity: ProcessIdentity) -> None:
        if identity.pod.uid and self._finder is not None:
            self._finder.ask(identity)

    def _meet_again(self, pid: int) -> None:
        """A process has called execve: it may run another program now, with other variables."""
        with self._lock:
            self._asked.pop(pid, None)
            is_known = pid in self._identities
        identity = read_identity(pid, n_reads=1) if is_known else None
        if identity is None:
            return
        with self._lock:
            known = self._identities[pid]  # only this thread removes one
            if not _is_same(identity, known):
                self._announce(identity)
                self._ask_kubelet(identity)
            elif (now := _keep_place(identity, known)) != known:
                self._announce(now)

    def _complete(self, identity: ProcessIdentity) -> None:
        """The kubelet's answer about a process, if it is still the same one. Any thread."""
        with self._lock:
            known = self._identities.get(identity.pid)
            if known is not None and _is_same(known, identity):
                self._announce(_keep_place(known, identity))

    def pop_notes(self) -> Iterator[str]:
        """Sentences about what could not be found out about processes, since the last time."""
        return self._finder.pop_notes() if self._finder is not None else iter(())

    def close(self) -> None:
        """Stop asking; safe to call twice."""
        if self._finder is not None:
            self._finder.close()

    def meet_counted(self, keys: Records) -> None:
        """The same for every process that has a count, without waiting: the kernel tells of their execve."""
        for pid in {int(pid) for pid in keys["pid"]} - {0}:
            self._ask(pid, 1)

    def pop_met(self) -> Iterator[ProcessIdentity]:
        """Processes met since the last time, and those of which more is known since then."""
        while self._met:
            yield self._met.popleft()

    def find_cgroup(self, pid: int) -> int:
        """The id of a process's cgroup of version 2; 0 where it is not known."""
        identity = self._identities.get(pid)
        return seen_cgroups().find_id(identity.cgroup) if identity is not None else 0

    def on_records(self, records: Records) -> None:
        """Take ``struct ig_process`` records."""
        for pid in records["pid"][records["event"] == ProcessEvent.EXEC]:
            self._meet_again(int(pid))
        self._note_ended(records["pid"][records["event"] == ProcessEvent.EXIT].tolist())

    def is_deserted(self) -> bool:
        """Whether all processes that were named have ended, and their children."""
        if not self._may_be_over:
            return False
        self._may_be_over = False
        self.has_lost_all = not self._engine.control.read_watched_pids()
        return self.has_lost_all

    def find_unrecorded(self, kept: Collection[int]) -> list[int]:
        """Processes that ended without a record: `pop_ended` has them from now on, as if there had been one.

        The kernel's side writes none of a process that made no probed call, and may lose one. A record may still be on
        its way, and says how the process ended: so it is missed only the second time, and the rings are read between.

        Args:
            kept: Processes of which anything is kept anywhere else.
        """
        if not has_host_pids():
            return []
        with self._lock:
            started = dict.fromkeys(kept, 0)
            started |= {pid: known.start_ticks for pid, known in self._identities.items()}
        for pid in (0, *self._ended):  # 0 is the kernel
            started.pop(pid, None)
        missing = {pid for pid, ticks in started.items() if has_ended(pid, ticks)}
        unrecorded = sorted(missing & self._missing)
        self._missing = frozenset(missing).difference(unrecorded)
        self._note_ended(unrecorded)
        return unrecorded

    def _note_ended(self, pids: Collection[int]) -> None:
        with self._lock:
            for pid in pids:
                self._asked.pop(pid, None)
        self._ended.extend(pids)
        self._may_be_over |= self._are_named and bool(pids)

    def pop_ended(self) -> list[int]:
        """Processes that ended since the last time; they are strangers from now on."""
        ended, self._ended = self._ended, []
        with self._lock:
            for pid in ended:
                self._identities.pop(pid, None)
        return ended


def check_pids() -> None:
    """Whether processes can be watched by their pid.

    Raises:
        UnsupportedError: This is not the host's pid namespace.
    """
    if not has_host_pids():
        raise UnsupportedError(
            "processes cannot be chosen by their pid, or started, in a pid namespace other than the host's",
            hint=FIX,
        )


def describe_namespace() -> tuple[str, ...]:
    """What to say of the pid namespace that this is; nothing where it is the host's."""
    if has_host_pids():
        return ()
    return (
        f"without names, ranks and stacks of processes: this is not the host's pid namespace; {FIX}",
    )


def _is_same(one: ProcessIdentity, other: ProcessIdentity) -> bool:
    """Whether both are one process in one container, whatever program it runs."""
    return (one.start_ticks, one.container) == (other.start_ticks, other.container)


def _keep_place(identity: ProcessIdentity, known: ProcessIdentity) -> ProcessIdentity:
    """With its pod and devices, which do not change with the program that a process runs; what it chose of them may."""
    pod = known.pod if known.pod.name else identity.pod
    assignment = replace(known.assignment, gpus=identity.assignment.gpus)
    return replace(identity, pod=pod, assignment=assignment)
