"""Libraries are probed when a process loads them: what is found is opened once, and that one file is examined and probed.

A few threads take turns: one waits for new mappings while the others look into files, so a file that is slow to read holds up
nobody. A failure is tried again as long as the process lives, never taken for an answer, and said where somebody looks.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ingero.agent.capture.discover.identity import find_cgroup_id, parse_cgroup
from ingero.agent.capture.discover.processes import (
    FileId,
    FileState,
    OpenFile,
    has_ended,
    iter_mappings,
    iter_pids,
    open_file,
    open_mapped,
)
from ingero.agent.capture.kernel.perf import Mapping, MappingStream, PerfEvents
from ingero.agent.capture.probes.engine import Engine
from ingero.agent.capture.probes.targets import is_candidate, is_library, iter_targets
from ingero.agent.capture.stack_keeper import StackKeeper
from ingero.errors import BadDataError, UnsupportedError
from ingero.model.recording import Unprobed
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_MS, NS_PER_S

RESCAN_NS: Final = 2 * NS_PER_S
MANY: Final = 0
"""The pid that stands for further processes when there are too many to tell apart."""
_N_THREADS: Final = 4
_RETRIES_NS: Final = (10 * NS_PER_MS, 50 * NS_PER_MS, 250 * NS_PER_MS, NS_PER_S, 5 * NS_PER_S)
_TOLD_AFTER: Final = 2  # failures: the first is usual while the loader is at work
_PROGRAM_TRIES: Final = 3  # a program that holds nothing of ours is the rule
_MOST_EXAMINED: Final = 65_536
_MOST_UNPROBED: Final = 1024


@dataclass(frozen=True, slots=True)
class Watch:
    """Whom the user asked for, as user space sees it; the kernel's filter is the engine's.

    Attributes:
        engine: Knows the processes that are watched by their pid.
        by_pid: Whether any are.
        uid: A user whose processes are watched.
        cgroup_ids: Cgroups of version 2 whose processes are watched.
    """

    engine: Engine
    by_pid: bool = False
    uid: int | None = None
    cgroup_ids: tuple[int, ...] = ()

    def covers(self, pid: int) -> bool:
        """Whether a process is watched; False when it is gone and was not named by its pid."""
        if not self.by_pid and self.uid is None and not self.cgroup_ids:
            return True
        if self.by_pid and self.engine.is_watched_pid(pid):
            return True
        folder = Path(f"/proc/{pid}")
        try:
            if self.cgroup_ids:
                path, *_ = parse_cgroup((folder / "cgroup").read_text())
                return find_cgroup_id(path) in self.cgroup_ids
            status = (folder / "status").read_text(errors="replace")
        except OSError:
            return False
        uids = next((line.split() for line in status.splitlines() if line.startswith("Uid:")), [])
        return self.uid is not None and uids[1:2] == [str(self.uid)]


@dataclass(frozen=True, slots=True)
class _Look:
    """A mapped file that is to be looked into, how often that failed, and whether its process was watched then."""

    mapping: Mapping
    n_failed: int = 0
    is_watched: bool = True

    @property
    def key(self) -> tuple[int, str]:
        return self.mapping.pid, self.mapping.path


class Discovery:
    """Finds and probes libraries, at once and as they are loaded.

    Args:
        engine: The probes.
        stacks: Told of every mapping, and of processes with a library that is probed.
        watch: Whose libraries are reported.
        meet: Called with the pid of a watched process that has a library of ours; any thread.
        events: Where new mappings are read; they stay the caller's, who closes them after this.
        clock: For the time of the next try.

    Attributes:
        notes: What this machine refused at the start.
    """

    def __init__(
        self,
        engine: Engine,
        stacks: StackKeeper,
        watch: Watch,
        meet: Callable[[int], None],
        events: PerfEvents,
        clock: Clock,
    ) -> None:
        self.notes: tuple[str, ...] = ()
        self._engine, self._stacks, self._watch = engine, stacks, watch
        self._meet, self._clock = meet, clock
        self._lock = threading.Lock()  # what follows
        self._busy: dict[FileId, list[_Look]] = {}
        self._nothing: set[FileState] = set()
        self._unprobed: dict[tuple[int, str], Unprobed] = {}
        self._later: list[tuple[int, int, _Look]] = []
        self._order = itertools.count()
        self._turn = threading.Lock()  # what follows
        self._libraries: deque[_Look] = deque()
        self._others: deque[_Look] = deque()
        self._next_scan_ns: int | None = None
        self._n_lost = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_over = False
        self._stream: MappingStream | None = None
        try:
            self._stream = events.mappings
        except UnsupportedError as error:
            self._next_scan_ns = clock.mono_ns() + RESCAN_NS
            self.notes = (f"{error.message}; new processes are looked for every 2 s",)
        self._threads = [
            threading.Thread(target=self._work, name=f"ingero-find-{number}")
            for number in range(_N_THREADS)
        ]

    @property
    def unprobed(self) -> tuple[Unprobed, ...]:
        """Libraries of watched processes whose calls are not seen; without those that could be probed in the end."""
        with self._lock:
            return tuple(self._unprobed.values())

    def probe_files(self, paths: Iterable[Path]) -> None:
        """Probe files before anybody loads them."""
        for path in paths:
            look = _Look(Mapping(MANY, 0, 0, (0, 0), 0, str(path)))
            try:
                with open_file(path) as opened:
                    self._examine(opened, look)
            except OSError as error:
                self._report(look, error.strerror or str(error))

    def scan(self, pids: Iterable[int]) -> None:
        """Look at these processes now."""
        for look in _iter_looks(pids):
            self._look(look)

    def start(self) -> None:
        """Look at what processes load from now on."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop looking; safe to call twice."""
        self._is_over = True
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)
            for thread in self._threads:
                if thread.is_alive():
                    thread.join()
            os.close(self._wake)
            self._wake = -1
        self._stream = None

    def _work(self) -> None:
        """Body of each thread."""
        poll = select.poll()
        for fd in (*(self._stream.fds if self._stream else ()), self._wake):
            poll.register(fd, select.POLLIN)
        while True:
            with self._turn:
                look = self._wait(poll)
            if look is None:
                return
            try:
                self._look(look)
            except Exception as error:  # noqa: BLE001 - one bad file must not end the search for all others
                self._fail(look, repr(error))

    def _wait(self, poll: select.poll) -> _Look | None:
        """The next file to look at; None at the end. By the thread whose turn it is."""
        while not self._is_over:
            self._take_due()
            # Libraries before programs: calls are missed until they are probed.
            for queue in (self._libraries, self._others):
                if queue:
                    return queue.popleft()
            ready = [fd for fd, _ in poll.poll(self._find_patience_ms())]
            if self._wake in ready and not self._is_over:
                os.eventfd_read(self._wake)
            if self._stream is not None and not self._is_over:
                self._put(map(_Look, self._stream.read()))
                if self._stream.n_lost != self._n_lost:
                    self._n_lost = self._stream.n_lost
                    self._next_scan_ns = (
                        self._clock.mono_ns()
                    )  # perf's buffer was full: look at all
        return None

    def _put(self, looks: Iterable[_Look]) -> None:
        for look in looks:
            (self._libraries if is_library(look.mapping) else self._others).append(look)

    def _take_due(self) -> None:
        now_ns = self._clock.mono_ns()
        due = []
        with self._lock:
            while self._later and self._later[0][0] <= now_ns:
                due.append(heapq.heappop(self._later)[-1])
        self._put(due)
        if self._next_scan_ns is not None and now_ns >= self._next_scan_ns:
            self._next_scan_ns = now_ns + RESCAN_NS
            with contextlib.suppress(OSError):  # no descriptor is left, say: then in two seconds
                self._put(_iter_looks(iter_pids()))
                self._next_scan_ns = self._next_scan_ns if self._stream is None else None

    def _find_patience_ms(self) -> int | None:
        """How long there is nothing to do unless a file is mapped; None for ever."""
        with self._lock:
            times = [self._later[0][0]] if self._later else []
        if self._next_scan_ns is not None:
            times.append(self._next_scan_ns)
        if not times:
            return None
        return max(-(-(min(times) - self._clock.mono_ns()) // NS_PER_MS), 0)

    def _look(self, look: _Look) -> None:
        """Probe a mapped file if it holds something of ours."""
        mapping = look.mapping
        if not look.n_failed:
            self._stacks.on_mapping(mapping)
            if not is_candidate(mapping):
                return
        try:
            with open_mapped(mapping) as opened:
                self._examine(opened, look)
        except OSError as error:
            self._fail(look, error.strerror or str(error))

    def _examine(self, opened: OpenFile, look: _Look) -> None:
        """Look into an open file, unless that was done or another thread is at it."""
        with self._lock:
            is_nothing = opened.state in self._nothing
            is_attached = self._engine.is_attached(opened.file)
            if not is_nothing and not is_attached:
                waiting = self._busy.get(opened.file)
                if waiting is not None:
                    waiting.append(look)
                    return
                self._busy[opened.file] = []
        reason = ""
        if not is_nothing and not is_attached:
            try:
                is_attached = self._attach(opened, look.mapping.path)
            except (OSError, BadDataError, UnsupportedError) as error:
                reason = getattr(error, "message", "") or str(error)
            finally:
                with self._lock:
                    waiting = self._busy.pop(opened.file)
        else:
            waiting = []
        for one in (look, *waiting):
            if reason:
                self._fail(one, reason)
            else:
                self._settle(one, is_attached=is_attached)

    def _attach(self, opened: OpenFile, path: str) -> bool:
        """Whether the file is probed; what holds nothing of ours is remembered until it is changed."""
        for target in iter_targets(opened, path):
            self._engine.attach(target, opened.reach)
        if self._engine.is_attached(opened.file):
            return True
        with self._lock:
            if len(self._nothing) >= _MOST_EXAMINED:
                self._nothing.clear()
            self._nothing.add(opened.state)
        return False

    def _settle(self, look: _Look, *, is_attached: bool) -> None:
        """There is an answer."""
        with self._lock:
            self._unprobed.pop(look.key, None)
        pid = look.mapping.pid
        if is_attached and pid != MANY and self._watch.covers(pid):
            self._stacks.examine(pid)
            self._meet(pid)

    def _fail(self, look: _Look, reason: str) -> None:
        """There is none: try again while the process lives, and say so."""
        pid = look.mapping.pid
        is_watched = look.is_watched if look.n_failed or pid == MANY else self._watch.covers(pid)
        look = replace(look, n_failed=look.n_failed + 1, is_watched=is_watched)
        can_retry = pid != MANY and not has_ended(pid)
        if not is_library(look.mapping):
            can_retry = can_retry and look.n_failed < _PROGRAM_TRIES
        elif look.n_failed >= _TOLD_AFTER or not can_retry:
            self._report(look, reason)
        if can_retry:
            delay_ns = _RETRIES_NS[min(look.n_failed, len(_RETRIES_NS)) - 1]
            due_ns = self._clock.mono_ns() + delay_ns
            with self._lock:
                heapq.heappush(self._later, (due_ns, next(self._order), look))
            os.eventfd_write(self._wake, 1)  # whoever waits did not know of it

    def _report(self, look: _Look, reason: str) -> None:
        pid, path = look.key
        if not look.is_watched:
            return
        with self._lock:
            if len(self._unprobed) >= _MOST_UNPROBED:
                pid = MANY
            self._unprobed.setdefault((pid, path), Unprobed(pid, path, reason))


def _iter_looks(pids: Iterable[int]) -> Iterable[_Look]:
    return (_Look(mapping) for pid in pids for mapping in iter_mappings(pid))


def find_new(before: Sequence[Unprobed], now: Sequence[Unprobed]) -> list[Unprobed]:
    """Those that were not there before."""
    known = set(before)
    return [one for one in now if one not in known]
