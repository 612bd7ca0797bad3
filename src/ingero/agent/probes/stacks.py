"""The stacks that calls carry: interpreters made known to the kernel, ids turned into what is stored."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ingero.agent.kernel.maps import BpfMap
from ingero.agent.kernel.perf import Mapping
from ingero.agent.stacks.interpreter import Interpreter, is_python_file
from ingero.agent.stacks.native import SymbolFiles
from ingero.agent.stacks.resolver import ProcessStacks, Stack, build_ended
from ingero.errors import UnsupportedError

Records = npt.NDArray[Any]
MOST_STACKS: Final = 65_536
MOST_REFUSED: Final = 256


class StackBook:
    """Every stack that was recorded, and the processes they are of.

    `examine` may be called from any thread; the rest from the one that reads the rings.

    Args:
        pythons: The kernel's map of interpreters.
        seen: The kernel's map of stacks that it has written.

    Attributes:
        refused: Why an interpreter is not read, by process.
    """

    def __init__(self, pythons: BpfMap, seen: BpfMap) -> None:
        self.refused: dict[int, str] = {}
        self._pythons = pythons
        self._seen = seen
        self._files = SymbolFiles()
        self._checked = set[tuple[str, int]]()
        self._processes: dict[int, ProcessStacks] = {}
        self._hashes: dict[int, int] = {}
        self._new: dict[int, Stack] = {}
        self._told = set[int]()
        self._lock = threading.Lock()

    def examine(self, pid: int) -> None:
        """Look for a CPython in a process and tell the kernel how to walk it; again when it loads another."""
        with self._lock:
            process = self._open(pid)
            if process is None:
                return
            before = process.interpreter
            found = self._find_interpreter(process, pid)
            if found is not None and found != before:
                self._pythons.update(
                    pid.to_bytes(4, "little"), found.layout.build_record(found.runtime)
                )

    def _find_interpreter(self, process: ProcessStacks, pid: int) -> Interpreter | None:
        try:
            found = process.find_interpreter(self._checked)
        except UnsupportedError as error:
            if len(self.refused) < MOST_REFUSED:
                self.refused[pid] = error.message
            return None
        self.refused.pop(pid, None)
        return found

    def on_mapping(self, mapping: Mapping) -> None:
        """A process mapped a file: an interpreter that was checked in another process is walked from its begin."""
        if self._checked and is_python_file(mapping.path):
            self.examine(mapping.pid)

    def _open(self, pid: int) -> ProcessStacks | None:
        process = self._processes.pop(pid, None)
        if process is not None and process.is_current():
            self._processes[pid] = process
            return process
        if process is not None:
            process.close()
        try:
            process = ProcessStacks(pid, self._files)
        except OSError:
            return None
        self._processes[pid] = process
        return process

    def take(self, records: Records) -> None:
        """Resolve new stacks (``struct ig_stack``); each was recorded once."""
        with self._lock:
            for record in records:
                stack = self._resolve(record)
                self._hashes[int(record["id"])] = stack.hash
                if stack.hash not in self._told:
                    self._told.add(stack.hash)
                    self._new[stack.hash] = stack
            if len(self._hashes) > MOST_STACKS:
                self._drop_oldest()

    def _resolve(self, record: Any) -> Stack:  # noqa: ANN401 - one row of a structured array
        pid = int(record["pid"])
        process = self._open(pid)
        if process is None:
            return build_ended()
        if record["n_python"] and process.interpreter is None:  # a fork of one we know
            self._find_interpreter(process, pid)
        return process.resolve(record)

    def _drop_oldest(self) -> None:
        """Make room; the kernel writes these again when it meets them."""
        for key in list(self._hashes)[: MOST_STACKS // 4]:
            self._seen.delete(key.to_bytes(8, "little"))
            del self._hashes[key]
        self._told.clear()

    def pop_new(self) -> dict[int, Stack]:
        """Stacks that were not handed out before, by hash."""
        new, self._new = self._new, {}
        return new

    def find_hashes(self, ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """What is stored for the ids that calls carry; 0 where there is none, or it is not known."""
        distinct, inverse = np.unique(ids, return_inverse=True)
        hashes = [self._hashes.get(key, 0) for key in distinct.tolist()]
        return np.array(hashes, np.int64)[inverse]

    def forget(self, pids: Collection[int]) -> None:
        """Let go of processes that ended or replaced their image; their stacks stay known until there is need of room."""
        with self._lock:
            for pid in pids:
                process = self._processes.pop(pid, None)
                if process is not None:
                    process.close()

    def close(self) -> None:
        """Let go of everything."""
        self.forget(list(self._processes))
        self._files.close()
