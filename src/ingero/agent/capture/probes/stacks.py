"""The stacks that calls carry: interpreters made known to the kernel, ids turned into what is stored."""

from __future__ import annotations

import struct
import threading
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ingero.agent.capture.kernel.abi import RETURN_BIT
from ingero.agent.capture.kernel.maps import BpfMap
from ingero.agent.capture.kernel.perf import Mapping as FileMapping
from ingero.agent.capture.kernel.ring import Ring
from ingero.agent.capture.stacks.interpreter import Interpreter, is_python_file
from ingero.agent.capture.stacks.native import SymbolFiles
from ingero.agent.capture.stacks.outside import OpenCall
from ingero.agent.capture.stacks.resolver import ProcessStacks, Stack, build_ended
from ingero.agent.capture.stacks.unwind import StackCopy, Unwound
from ingero.errors import UnsupportedError
from ingero.model.arrays import IntArray, Records

MOST_STACKS: Final = 65_536
MOST_REFUSED: Final = 256
MOST_RULES: Final = 16_384  # of one process; half of what the kernel's map holds
MOST_WAITING: Final = 64  # copies whose stack is still being written, or was lost
_KEY: Final = struct.Struct("<QQ")  # struct ig_unwind_key


class StackBook:
    """Every stack that was recorded, and the processes they are of.

    `examine` may be called from any thread; the rest from the one that reads the rings.

    Args:
        maps: The kernel's maps, of which ``pythons``, ``seen_stacks``, ``unwind_rules`` and ``unwinding`` are used.
        copies: The ring of copied stacks.

    Attributes:
        refused: Why an interpreter is not read, by process.
    """

    def __init__(self, maps: Mapping[str, BpfMap], copies: Ring) -> None:
        self.refused: dict[int, str] = {}
        self._pythons, self._seen = maps["pythons"], maps["seen_stacks"]
        self._unwind_rules = maps["unwind_rules"]
        self._ring = copies
        self._copies: dict[int, tuple[int, StackCopy]] = {}
        self._images: dict[int, int] = {}
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

    def on_mapping(self, mapping: FileMapping) -> None:
        """A process mapped a file: an interpreter that was checked in another process is walked from its begin."""
        self._forget_rules(mapping)
        if self._checked and is_python_file(mapping.path):
            self.examine(mapping.pid)

    def _forget_rules(self, mapping: FileMapping) -> None:
        """What was known of code that lay there before is not true any more."""
        with self._lock:
            process, image = self._processes.get(mapping.pid), self._images.get(mapping.pid)
            if process is not None and image is not None:
                self._drop_rules(process, image, mapping.start, mapping.end)

    def _drop_rules(self, process: ProcessStacks, image: int, start: int, end: int) -> None:
        for pc in process.pop_rules(start, end):
            self._unwind_rules.delete(_KEY.pack(image, pc))

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
            # A copy is written before its stack, so all that belong to these are there now.
            self._ring.drain(self._keep_copies)
            for record in records:
                stack = self._resolve(record)
                self._hashes[int(record["id"])] = stack.hash
                self._tell(stack)
            for orphan in list(self._copies)[:-MOST_WAITING]:
                del self._copies[orphan]
            if len(self._hashes) > MOST_STACKS:
                self._drop_oldest()

    def _keep_copies(self, records: Records) -> None:
        for record in records:
            self._copies[int(record["id"])] = int(record["image"]), StackCopy.from_record(record)

    def _unwind(self, process: ProcessStacks, record: Any) -> Unwound | None:  # noqa: ANN401 - one row of a structured array
        """Follow a stack's copy; the kernel gets the rules, so it need not copy the like again."""
        found = self._copies.pop(int(record["id"]), None)
        if found is None:
            return None
        image, copy = found
        unwound = process.unwind(record, copy)
        self._images[int(record["pid"])] = image
        for pc, rule in unwound.rules.items():
            self._unwind_rules.update(_KEY.pack(image, pc), rule.to_bytes())
        if (
            process.n_rules > MOST_RULES
        ):  # as where code is compiled and thrown away again and again
            self._drop_rules(process, image, 0, RETURN_BIT)
        return unwound

    def _resolve(self, record: Any) -> Stack:  # noqa: ANN401 - one row of a structured array
        pid = int(record["pid"])
        process = self._open(pid)
        if process is None:
            return build_ended()
        if record["n_python"] and process.interpreter is None:  # a fork of one we know
            self._find_interpreter(process, pid)
        return process.resolve(record, self._unwind(process, record))

    def read_open(self, pid: int, call: OpenCall) -> int:
        """The hash of the stack of a call that has not returned, read from outside; 0 when the process cannot be read."""
        with self._lock:
            process = self._open(pid)
            if process is None:
                return 0
            if process.interpreter is None:
                self._find_interpreter(process, pid)
            stack = process.resolve_open(call)
            self._tell(stack)
            return stack.hash

    def _tell(self, stack: Stack) -> None:
        if stack.hash not in self._told:
            self._told.add(stack.hash)
            self._new[stack.hash] = stack

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

    def find_hashes(self, ids: npt.NDArray[np.uint64]) -> IntArray:
        """What is stored for the ids that calls carry; 0 where there is none, or it is not known."""
        distinct, inverse = np.unique(ids, return_inverse=True)
        hashes = [self._hashes.get(key, 0) for key in distinct.tolist()]
        return np.array(hashes, np.int64)[inverse]

    def forget(self, pids: Collection[int]) -> None:
        """Let go of processes that ended or replaced their image; their stacks stay known until there is need of room."""
        with self._lock:
            for pid in pids:
                self._images.pop(pid, None)
                process = self._processes.pop(pid, None)
                if process is not None:
                    process.close()

    def close(self) -> None:
        """Let go of everything."""
        self.forget(list(self._processes))
        self._files.close()
