"""Libraries are probed when a process loads them.

What is found is opened once, and that one file is examined and probed.

A few threads take turns: one waits for new mappings while the others examine files, so a file that is slow to read
holds up no other. A failure is tried again as long as the process lives, never taken for an answer, and reported where
a user sees it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ingero.agent.capture.discover.cgroups import choose_path, seen_cgroups
from ingero.agent.capture.discover.processes import (
    FileId,
    OpenFile,
    has_ended,
    open_file,
    open_mapped,
    read_status,
)
from ingero.agent.capture.file_queue import FileQueue, MappedFile, iter_mapped
from ingero.agent.capture.hidden_runtimes import MAX_UNPROBED, HiddenRuntimes
from ingero.agent.capture.kernel.perf import LateEvents, Mapping, PerfEvents
from ingero.agent.capture.probed_files import MANY, ProbedFiles
from ingero.agent.capture.probes.engine import Engine
from ingero.agent.capture.probes.targets import (
    ProbeTarget,
    is_candidate,
    is_driver,
    is_torch,
    iter_targets,
)
from ingero.agent.capture.probes.torch import find_torch_target
from ingero.agent.capture.stack_keeper import StackKeeper
from ingero.errors import BadDataError, UnsupportedError
from ingero.model.recording import Unprobed
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_MS, NS_PER_S

_N_THREADS: Final = 4
_RETRIES_NS: Final = (10 * NS_PER_MS, 50 * NS_PER_MS, 250 * NS_PER_MS, NS_PER_S, 5 * NS_PER_S)
_REPORTED_AFTER: Final = 2  # failures: the first is usual while the loader is at work
_PROGRAM_TRIES: Final = 3  # a program that holds nothing of ours is the rule


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
        if self.by_pid and self.engine.control.is_watched_pid(pid):
            return True
        folder = Path(f"/proc/{pid}")
        try:
            if self.cgroup_ids:
                cgroups = seen_cgroups()
                return cgroups.find_id(choose_path(cgroups.read(pid))) in self.cgroup_ids
            uids = read_status(folder)["Uid"].split()
        except OSError:
            return False
        return self.uid is not None and uids[0] == str(self.uid)


class Discovery:
    """Finds and probes libraries, at once and as they are loaded.

    Args:
        engine: The probes.
        stacks: Gets every mapping, and the processes with a library that is probed.
        watch: Whose libraries are reported.
        meet: Called with the pid of a watched process that has a library of ours; any thread.
        events: Where new mappings are read; they stay the caller's, who closes them after this.
        clock: For the time of the next try.
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
        self._engine, self._stacks, self._watch = engine, stacks, watch
        self._meet = meet
        self._queue = FileQueue(events, clock)
        self._files = ProbedFiles(engine, clock, self._queue.search_all)
        self._hidden = HiddenRuntimes()
        self._lock = threading.Lock()  # what follows
        self._busy: dict[FileId, list[MappedFile]] = {}
        # Without the hidden: a program that hides a runtime is examined itself too, perhaps later, without a failure.
        self._unprobed: dict[tuple[int, str], Unprobed] = {}
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"ingero-find-{number}")
            for number in range(_N_THREADS)
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """What this machine refused at the start."""
        return self._queue.notes

    @property
    def unprobed(self) -> tuple[Unprobed, ...]:
        """Libraries of watched processes whose calls are not seen; without those that could be probed in the end."""
        with self._lock:
            return (*self._unprobed.values(), *self._hidden.found)

    def pop_notes(self) -> Iterator[str]:
        """Sentences about files that were changed while they were probed, since the last time."""
        return self._files.pop_notes()

    def note_late(self, late: LateEvents) -> Iterator[str]:
        """Processors came online: read mappings there too; where perf refuses, search processes, and say so."""
        if late.mappings:
            self._queue.watch(late.mappings)
        if late.unreached:
            self._queue.keep_searching()
            numbers = ", ".join(map(str, sorted(set(late.unreached))))
            yield (
                f"processors that came online after the trace began: {numbers}; their page faults are not seen, and "
                "processes are searched every 2 s for what they load there, so first calls are missed"
            )

    def probe_files(self, paths: Iterable[Path]) -> None:
        """Probe files before anybody loads them."""
        for path in paths:
            file = MappedFile(Mapping(MANY, 0, 0, (0, 0), 0, str(path)))
            try:
                with open_file(path) as opened:
                    self._examine(opened, file)
            except OSError as error:
                self._report(file, error.strerror or str(error))

    def probe_program(self, path: Path, pid: int) -> None:
        """Probe the file that a process will be, before it runs; until it ends, unless others use it then.

        Where that fails nothing is said: the file is examined again when it is mapped.

        Args:
            path: The file.
            pid: The process, which runs something else now.
        """
        mapping = Mapping(pid, 0, 0, (0, 0), 0, str(path))
        with (
            contextlib.suppress(OSError, BadDataError, UnsupportedError),
            open_file(path) as opened,
        ):
            if self._attach(opened, mapping):
                self._files.add_user(opened.file, pid)

    def scan(self, pids: Iterable[int]) -> None:
        """Examine what these processes have mapped now."""
        for file in iter_mapped(pids):
            self.examine(file)

    def start(self) -> None:
        """Examine what processes map from now on, and let go of what they do not use any more."""
        self._files.start()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.end()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._files.close()
        self._queue.close()

    def _work(self) -> None:
        """Body of each thread."""
        while (file := self._queue.take()) is not None:
            try:
                self.examine(file)
            except Exception as error:  # noqa: BLE001 - one bad file must not end the search for all others
                self._fail(file, repr(error))

    def examine(self, file: MappedFile) -> None:
        """Probe a mapped file if it holds something of ours."""
        mapping = file.mapping
        if not file.n_failed:
            self._stacks.on_mapping(mapping)
            if not (file.is_wanted or is_candidate(mapping)):
                if not self._hidden.is_named(mapping):
                    return
                file = replace(file, is_wanted=True)
        try:
            with open_mapped(mapping) as opened:
                self._examine(opened, file)
        except OSError as error:
            self._fail(file, error.strerror or str(error))

    def _examine(self, opened: OpenFile, file: MappedFile) -> None:
        """Examine an open file, unless that was done or another thread is at it."""
        with self._lock:
            known = self._files.recall(opened)
            if known is None:
                waiting = self._busy.get(opened.file)
                if waiting is not None:
                    waiting.append(file)
                    return
                self._busy[opened.file] = []
        if known is not None:
            self._settle(file, opened.file if known else None)
            return
        reason, is_attached = "", False
        try:
            is_attached = self._attach(opened, file.mapping)
        except (OSError, BadDataError, UnsupportedError) as error:
            reason = getattr(error, "message", "") or str(error)
        except BaseException as error:
            # The caller fails `file`; nobody would ask again for those that waited for its answer.
            for one in self._end_wait(opened.file):
                self._fail(one, repr(error))
            raise
        for one in (file, *self._end_wait(opened.file)):
            if reason:
                self._fail(one, reason)
            else:
                self._settle(one, opened.file if is_attached else None)

    def _end_wait(self, file: FileId) -> list[MappedFile]:
        """No thread is at a file any more: those that waited for it."""
        with self._lock:
            return self._busy.pop(file)

    def _attach(self, opened: OpenFile, mapping: Mapping) -> bool:
        """Whether the file is probed."""
        with self._files.examine(opened, mapping.path):
            for target in find_targets(opened, mapping):
                self._engine.attach(target, opened.reach)
        return self._engine.is_attached(opened.file)

    def _settle(self, file: MappedFile, probed: FileId | None) -> None:
        """There is an answer: the file is probed, or there is nothing in it."""
        with self._lock:
            self._unprobed.pop(file.key, None)
        pid = file.mapping.pid
        if probed is not None:
            self._files.add_user(probed, pid)
        if probed is not None and pid != MANY and self._watch.covers(pid):
            self._stacks.examine(pid)
            self._meet(pid)
            if is_driver(file.mapping):
                for mapping in self._hidden.search(pid):
                    self._queue.retry(MappedFile(mapping, is_wanted=True), 0)

    def _fail(self, file: MappedFile, reason: str) -> None:
        """There is none: try again while the process lives, and say so."""
        pid = file.mapping.pid
        is_watched = file.is_watched if file.n_failed or pid == MANY else self._watch.covers(pid)
        file = replace(file, n_failed=file.n_failed + 1, is_watched=is_watched)
        can_retry = pid != MANY and not has_ended(pid)
        if not file.is_library:
            can_retry = can_retry and file.n_failed < _PROGRAM_TRIES
        elif file.n_failed >= _REPORTED_AFTER or not can_retry:
            self._report(file, reason)
        if can_retry:
            self._queue.retry(file, _RETRIES_NS[min(file.n_failed, len(_RETRIES_NS)) - 1])

    def _report(self, file: MappedFile, reason: str) -> None:
        pid, path = file.key
        if not file.is_watched:
            return
        with self._lock:
            if len(self._unprobed) >= MAX_UNPROBED:
                pid = MANY
            self._unprobed.setdefault((pid, path), Unprobed(pid, path, reason))


def find_targets(opened: OpenFile, mapping: Mapping) -> Iterable[ProbeTarget]:
    """What to probe in a mapped file, in parts; nothing when it holds nothing of ours.

    Raises:
        BadDataError: It is no ELF file of 64 bits; while the parts are taken.
        UnsupportedError: It is of a release of PyTorch that is not known.
        OSError: It cannot be read; while the parts are taken.
    """
    if not is_torch(mapping):
        return iter_targets(opened, mapping.path)
    root = Path("/") if mapping.pid == MANY else Path(f"/proc/{mapping.pid}/root")
    target = find_torch_target(opened, mapping.path, root)
    return () if target is None else (target,)


def find_new(before: Sequence[Unprobed], now: Sequence[Unprobed]) -> list[Unprobed]:
    """Those that were not there before."""
    known = set(before)
    return [one for one in now if one not in known]
