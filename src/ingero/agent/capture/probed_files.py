"""Files that are probed, and the two reasons for which their probes go while the agent runs.

While a file is probed the kernel holds the file and the mount by which it was reached
(``bpf_uprobe_multi_link_attach()`` of kernel/trace/bpf_trace.c, ``create_local_trace_uprobe()`` of
kernel/trace/trace_uprobe.c): the room of a removed file is not free, and the volume that it lies on stays busy. So the
probes go when no process has it mapped any more.

The kernel keeps the instruction below a probe as it was when the probe was made, and puts its breakpoint at the same
place of whatever the file holds by then (``install_breakpoint()`` of kernel/events/uprobes.c). A program that maps a
file which was overwritten in place would run into them. So the probes go as soon as the file is written to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from ingero.agent.capture.discover.processes import (
    FileId,
    FileState,
    OpenFile,
    find_users,
    has_ended,
    read_start_ticks,
)
from ingero.agent.capture.kernel.file_changes import FileChanges
from ingero.agent.capture.probes.engine import Engine
from ingero.closing import Closing
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_MS, NS_PER_S

MANY: Final = 0
"""The pid that stands for processes that are not known, or too many to keep apart."""
IDLE_NS: Final = 30 * NS_PER_S
"""A file keeps its probes so long without a process: the next job may load it at once, and its first calls count."""
_CHECK_NS: Final = 10 * NS_PER_S
_MAX_EXAMINED: Final = 65_536
_MAX_NOTES: Final = 64
_CODE_BYTES: Final = 16
"""Of each probed place: an instruction has 15 at most (Intel 64, volume 2, 2.3.11), and 4 on arm64."""


@dataclass(slots=True)
class _Probed:
    path: str
    state: FileState | None
    """None where not all of it could be examined."""
    places: tuple[int, ...]
    code: bytes
    users: dict[int, int] = field(default_factory=dict)
    """Start time in clock ticks by pid."""
    is_kept: bool = False
    """Whether it was asked for by name, and stays without any user."""
    idle_since_ns: int | None = None


class ProbedFiles(Closing):
    """Remembers what was found in files, and takes probes off those that nobody uses and those that were changed.

    Any thread; `start` has one of its own.

    Args:
        engine: The probes.
        clock: For how long a file was not used.
        search: Called when probes were taken off a file that was changed: processes may use it, and are not probed.
    """

    def __init__(self, engine: Engine, clock: Clock, search: Callable[[], None]) -> None:
        self._engine, self._clock, self._search = engine, clock, search
        self._lock = threading.Lock()  # what follows, but for the notes
        self._probed: dict[FileId, _Probed] = {}
        self._nothing: set[FileState] = set()
        self._examined: dict[FileId, bool] = {}  # whether it was changed since then
        self._watched: dict[int, FileId] = {}
        self._notes: deque[str] = deque(maxlen=_MAX_NOTES)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        try:
            self._changes: FileChanges | None = FileChanges()
        except OSError as error:
            self._changes = None
            self._note_unwatched(error)

    def recall(self, opened: OpenFile) -> bool | None:
        """Whether a file is probed, as far as that is known; False where nothing of ours is in it."""
        with self._lock:
            if opened.state in self._nothing:
                return False
            known = self._probed.get(opened.file)
            if known is None or known.state != opened.state:
                return None
            known.idle_since_ns = None
            return True

    def add_user(self, file: FileId, pid: int) -> None:
        """A process has a file mapped that is probed; `MANY` keeps it probed without any."""
        ticks = 0
        if pid != MANY:
            try:
                ticks = read_start_ticks(pid)
            except OSError:  # it has ended
                return
        with self._lock:
            known = self._probed.get(file)
            if known is None:
                return
            known.idle_since_ns = None
            if pid == MANY:
                known.is_kept = True
            else:
                known.users[pid] = ticks

    @contextlib.contextmanager
    def examine(self, opened: OpenFile, path: str) -> Iterator[None]:
        """While the context lasts, one thread looks into a file and probes what it finds.

        Args:
            opened: The file.
            path: What to call it.

        Raises:
            OSError: It was changed meanwhile; what was probed in it is not any more.
        """
        with self._lock:
            self._examined[opened.file] = False
            self._watch(opened)
            known = self._probed.get(opened.file)
            if known is not None and _read_code(opened.fd, known.places) != known.code:
                self._release(opened.file)
                self._watch(opened)
        try:
            yield
        except BaseException:
            self._keep(opened, path, state=None)
            raise
        if not self._keep(opened, path, opened.state):
            raise OSError(errno.ESTALE, "it was changed while it was examined")

    def _keep(self, opened: OpenFile, path: str, state: FileState | None) -> bool:
        """Remember what is probed now; False where the file was changed, and nothing is."""
        self.release_changed()
        target = self._engine.find_target(opened.file)
        with self._lock:
            is_changed = self._examined.pop(opened.file) or not opened.is_unchanged()
            if is_changed or target is None:
                self._release(opened.file)
                if not is_changed and state is not None:
                    self._remember_nothing(state)
                return not is_changed
            places = (*(offset for offset, _ in target.probes), *target.leaves)
            code = _read_code(opened.fd, places)
            known = self._probed.setdefault(opened.file, _Probed(path, state, places, code))
            known.state, known.places, known.code = state, places, code
            return True

    def _remember_nothing(self, state: FileState) -> None:
        if len(self._nothing) >= _MAX_EXAMINED:
            self._nothing.clear()
        self._nothing.add(state)

    def _watch(self, opened: OpenFile) -> None:
        """Under the lock: notice when a file is written to."""
        if self._changes is None:
            return
        try:
            self._watched[self._changes.watch(opened.fd)] = opened.file
        except OSError as error:
            self._note_unwatched(error)

    def _note_unwatched(self, error: OSError) -> None:
        note = (
            f"files cannot be watched ({error.strerror}): a probed library that is overwritten in place keeps wrong"
            " probes until it is loaded again; raise fs.inotify.max_user_instances and max_user_watches"
        )
        if note not in self._notes:
            self._notes.append(note)

    def _release(self, file: FileId) -> None:
        """Under the lock: take all probes off a file."""
        self._probed.pop(file, None)
        self._engine.detach(file)
        for number in [number for number, one in self._watched.items() if one == file]:
            del self._watched[number]
            if self._changes is not None:
                with contextlib.suppress(OSError):  # the kernel forgot it with the file
                    self._changes.forget(number)

    def pop_notes(self) -> Iterator[str]:
        """Sentences about files that were changed or could not be watched, since the last time."""
        while self._notes:
            yield self._notes.popleft()

    def release_changed(self) -> None:
        """Take the probes off files that were written to."""
        if self._changes is None:
            return
        released = []
        # The lock is held to read, too: another thread that has read of a change has acted on it then.
        with self._lock:
            numbers, has_lost = self._changes.read()
            files = {self._watched[number] for number in numbers if number in self._watched}
            for file in set(self._watched.values()) if has_lost else files:
                if file in self._examined:
                    self._examined[file] = True
                elif file in self._probed:
                    released.append(self._probed[file].path)
                    self._release(file)
        for path in released:
            self._notes.append(
                f"{path} was changed in place while it was probed: its probes were removed, and it is examined again"
            )
        if released:
            self._search()

    def release_unused(self) -> None:
        """Take the probes off files that no process has had mapped for a while."""
        with self._lock:
            users = {file: dict(one.users) for file, one in self._probed.items()}
        ended = {
            file: [pid for pid, ticks in pids.items() if has_ended(pid, ticks)]
            for file, pids in users.items()
        }
        now_ns = self._clock.mono_ns()
        idle = self._find_idle(ended, now_ns)
        if not idle:
            return
        try:
            found = find_users(idle)
        except OSError:  # no descriptor is left, say: asked again later
            self._restart_idle(idle, now_ns)
            return
        for file, pids in found.items():
            for pid in pids:
                self.add_user(file, pid)
        with self._lock:
            for file in idle:
                known = self._probed.get(file)
                if known is not None and known.idle_since_ns is not None:
                    self._release(file)

    def _find_idle(self, ended: Mapping[FileId, Collection[int]], now_ns: int) -> dict[FileId, str]:
        """Files that have been without a known user for long enough, with their names."""
        idle = {}
        with self._lock:
            for file, one in self._probed.items():
                for pid in ended.get(file, ()):
                    one.users.pop(pid, None)
                if one.users or one.is_kept or file in self._examined:
                    one.idle_since_ns = None
                elif one.idle_since_ns is None:
                    one.idle_since_ns = now_ns
                elif now_ns - one.idle_since_ns >= IDLE_NS:
                    idle[file] = one.path
        return idle

    def _restart_idle(self, files: Collection[FileId], now_ns: int) -> None:
        with self._lock:
            for file in files:
                if (known := self._probed.get(file)) is not None:
                    known.idle_since_ns = now_ns

    def start(self) -> None:
        """Do both from now on, in a thread."""
        self._thread = threading.Thread(target=self._follow, name="ingero-release")
        self._thread.start()

    def _follow(self) -> None:
        """Body of the thread."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if self._changes is not None:
            poll.register(self._changes.fd, select.POLLIN)
        next_ns = self._clock.mono_ns() + _CHECK_NS
        while True:
            wait_ns = max(next_ns - self._clock.mono_ns(), 0)
            if any(fd == self._wake_fd for fd, _ in poll.poll(wait_ns / NS_PER_MS)):
                return
            self.release_changed()
            if self._clock.mono_ns() >= next_ns:
                next_ns = self._clock.mono_ns() + _CHECK_NS
                self.release_unused()

    def close(self) -> None:
        """Stop; the probes stay. Safe to call twice."""
        if self._wake_fd < 0:
            return
        os.eventfd_write(self._wake_fd, 1)
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake_fd)
        self._wake_fd = -1
        if self._changes is not None:
            self._changes.close()


def _read_code(fd: int, places: Collection[int]) -> bytes:
    """What a file holds at these offsets."""
    return b"".join(os.pread(fd, _CODE_BYTES, place) for place in places)
