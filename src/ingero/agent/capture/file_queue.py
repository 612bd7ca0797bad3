"""Mapped files that wait to be examined.

perf reports them, a scan of all processes finds them, and a failure brings them back.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from ingero.agent.capture.discover.processes import iter_mappings, iter_pids
from ingero.agent.capture.kernel.perf import Mapping, MappingStream, PerfEvents
from ingero.agent.capture.probes.targets import is_library
from ingero.errors import UnsupportedError
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

RESCAN_NS: Final = 2 * NS_PER_S


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A mapped file to examine.

    Attributes:
        mapping: Where it is mapped.
        n_failed: How often examining it has failed.
        is_watched: Whether its process was watched when it failed first.
        is_wanted: Whether it is known to hold something of ours, whatever its name.
    """

    mapping: Mapping
    n_failed: int = 0
    is_watched: bool = True
    is_wanted: bool = False

    @property
    def is_library(self) -> bool:
        """Whether something of ours is expected in it, which is not so of a program."""
        return self.is_wanted or is_library(self.mapping)

    @property
    def key(self) -> tuple[int, str]:
        """Its process and its name there."""
        return self.mapping.pid, self.mapping.path


@dataclass(slots=True)
class _Search:
    """When all processes are searched next; None for never. And whether that is so every `RESCAN_NS`."""

    next_ns: int | None = None
    is_periodic: bool = False


class FileQueue:
    """Gives one file after another, libraries before programs: calls are missed until a library is probed.

    Several threads take from it; one of them waits for new mappings, the others for their turn.

    Args:
        events: Where new mappings are read; they stay the caller's, who closes them after this.
        clock: For the time of the next try.

    Attributes:
        notes: What this machine refused.
    """

    def __init__(self, events: PerfEvents, clock: Clock) -> None:
        self.notes: tuple[str, ...] = ()
        self._clock = clock
        self._lock = threading.Lock()  # what is due later
        self._retries: list[tuple[int, int, MappedFile]] = []
        self._search = _Search()
        self._order = itertools.count()
        self._turn = threading.Lock()  # what follows
        self._waiting: tuple[deque[MappedFile], deque[MappedFile]] = (deque(), deque())
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_over = False
        self._poll = select.epoll()
        self._poll.register(self._wake_fd, select.EPOLLIN)
        try:
            self._stream: MappingStream | None = events.mappings
            for fd in self._stream.fds:
                self._poll.register(fd, select.EPOLLIN)
        except UnsupportedError as error:
            self._stream = None
            self._search.is_periodic = True
            self._search.next_ns = clock.mono_ns() + RESCAN_NS
            hint = f"; {error.hint}" if error.hint else ""
            self.notes = (
                f"{error.message}; processes are searched every 2 s, so first calls are missed{hint}",
            )

    def take(self) -> MappedFile | None:
        """The next file, when there is one; None at the end."""
        with self._turn:
            while not self._is_over:
                self._put_due()
                for queue in self._waiting:
                    if queue:
                        return queue.popleft()
                ready = [fd for fd, _ in self._poll.poll(self._find_patience_s())]
                # At the end what wakes this thread stays readable for the next.
                if not self._is_over:
                    self._read(ready)
        return None

    def put(self, files: Iterable[MappedFile]) -> None:
        """Add files. By the thread whose turn it is, or before any takes."""
        libraries, others = self._waiting
        for one in files:
            (libraries if one.is_library else others).append(one)

    def retry(self, file: MappedFile, delay_ns: int) -> None:
        """Give a file again later. Any thread."""
        due_ns = self._clock.mono_ns() + delay_ns
        with self._lock:
            heapq.heappush(self._retries, (due_ns, next(self._order), file))
        os.eventfd_write(self._wake_fd, 1)  # the thread that waits did not know of it

    def search_all(self) -> None:
        """Give what all processes have mapped, in two seconds. Any thread."""
        self._scan_at(self._clock.mono_ns() + RESCAN_NS)
        os.eventfd_write(self._wake_fd, 1)

    def watch(self, fds: Iterable[int]) -> None:
        """Wait for these descriptors of the mappings too, and give what processes have mapped meanwhile. Any thread."""
        for fd in fds:
            self._poll.register(fd, select.EPOLLIN)
        self._scan_at(self._clock.mono_ns())
        os.eventfd_write(self._wake_fd, 1)

    def keep_searching(self) -> None:
        """Give what all processes have mapped every two seconds from now on. Any thread."""
        with self._lock:
            self._search.is_periodic = True
        self.search_all()

    def _scan_at(self, due_ns: int) -> None:
        with self._lock:
            self._search.next_ns = min(due_ns, self._search.next_ns or due_ns)

    def end(self) -> None:
        """Have `take` return None in every thread."""
        self._is_over = True
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Let go of it, once no thread takes any more."""
        self._poll.close()
        os.close(self._wake_fd)

    def _read(self, ready: Collection[int]) -> None:
        """Read what is new in these descriptors."""
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._stream is None:
            return
        self.put(map(MappedFile, self._stream.read()))
        if self._stream.pop_n_lost():  # perf's buffer was full: search all
            self._scan_at(self._clock.mono_ns())

    def _put_due(self) -> None:
        now_ns = self._clock.mono_ns()
        due = []
        with self._lock:
            while self._retries and self._retries[0][0] <= now_ns:
                due.append(heapq.heappop(self._retries)[-1])
            is_scan_due = self._search.next_ns is not None and now_ns >= self._search.next_ns
            if is_scan_due:
                self._search.next_ns = now_ns + RESCAN_NS if self._search.is_periodic else None
        self.put(due)
        if is_scan_due:
            try:
                self.put(iter_mapped(iter_pids()))
            except OSError:  # no descriptor is left, say
                self._scan_at(now_ns + RESCAN_NS)

    def _find_patience_s(self) -> float | None:
        """How long there is nothing to do unless a file is mapped; None for ever."""
        with self._lock:
            times = [self._retries[0][0]] if self._retries else []
            if self._search.next_ns is not None:
                times.append(self._search.next_ns)
        if not times:
            return None
        # epoll rounds up to whole milliseconds, so that nothing is found due a moment too early.
        return max(min(times) - self._clock.mono_ns(), 0) / NS_PER_S


def iter_mapped(pids: Iterable[int]) -> Iterator[MappedFile]:
    """Every file that these processes have mapped as executable."""
    return (MappedFile(mapping) for pid in pids for mapping in iter_mappings(pid))
