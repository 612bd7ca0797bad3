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

MAX_STACKS: Final = 65_536
MAX_REFUSED: Final = 256
MAX_RULES: Final = 16_384  # of one process; half of what the kernel's map holds
MAX_WAITING: Final = 64  # copies whose stack is still being written, or was lost
_KEY: Final = struct.Struct("<QQ")  # struct ig_unwind_key


class _StackIndex:
    """Stacks by the ids that calls carry.

    Args:
        seen: The kernel's map of the stacks that it has written.
    """

    def __init__(self, seen: BpfMap) -> None:
        self._seen = seen
        self._hashes: dict[int, int] = {}
        self._new: dict[int, Stack] = {}
        self._delivered = set[int]()

    def add(self, stack_id: int, stack: Stack) -> None:
        """A stack that the kernel wrote."""
        self._hashes[stack_id] = stack.hash
        self.deliver(stack)

    def deliver(self, stack: Stack) -> None:
        """Have `pop_new` return a stack, unless it did before."""
        if stack.hash not in self._delivered:
            self._delivered.add(stack.hash)
            self._new[stack.hash] = stack

    def drop_oldest(self) -> None:
        """Make room where there are too many; the kernel writes dropped ones again when it meets them."""
        if len(self._hashes) <= MAX_STACKS:
            return
        for key in list(self._hashes)[: MAX_STACKS // 4]:
            self._seen.delete(key.to_bytes(8, "little"))
            del self._hashes[key]
        self._delivered.clear()

    def pop_new(self) -> dict[int, Stack]:
        """Stacks that were not handed out before, by hash."""
        new, self._new = self._new, {}
        return new

    def find_hashes(self, ids: npt.NDArray[np.uint64]) -> IntArray:
        """What is stored for the ids that calls carry; 0 where there is none, or it is not known."""
        distinct, inverse = np.unique(ids, return_inverse=True)
        hashes = [self._hashes.get(key, 0) for key in distinct.tolist()]
        return np.array(hashes, np.int64)[inverse]


class _Unwinding:
    """Copies of stacks without frame pointers, and the kernel's rules for the code that they went through.

    Args:
        rules: The kernel's map of unwind rules.
        copies: The ring of copied stacks.
    """

    def __init__(self, rules: BpfMap, copies: Ring) -> None:
        self._rules = rules
        self._ring = copies
        self._copies: dict[int, tuple[int, StackCopy]] = {}
        self._images: dict[int, int] = {}

    def read_copies(self) -> None:
        """Take the copies that were written."""
        self._ring.drain(self._keep)

    def _keep(self, records: Records) -> None:
        for record in records:
            self._copies[int(record["id"])] = int(record["image"]), StackCopy.from_record(record)

    def drop_orphans(self) -> None:
        """Drop copies whose stack does not come."""
        for orphan in list(self._copies)[:-MAX_WAITING]:
            del self._copies[orphan]

    def unwind(self, process: ProcessStacks, record: Any) -> Unwound | None:  # noqa: ANN401 - one row of a structured array
        """Follow a stack's copy; the kernel gets the rules, so it need not copy the like again."""
        found = self._copies.pop(int(record["id"]), None)
        if found is None:
            return None
        image, copy = found
        unwound = process.unwind(record, copy)
        self._images[int(record["pid"])] = image
        for pc, rule in unwound.rules.items():
            self._rules.update(_KEY.pack(image, pc), rule.to_bytes())
        if process.n_rules > MAX_RULES:  # as where code is compiled and thrown away again and again
            self._drop_rules(process, image, 0, RETURN_BIT)
        return unwound

    def forget_range(self, process: ProcessStacks, mapping: FileMapping) -> None:
        """Drop the rules of code that lay where something else is mapped now."""
        image = self._images.get(mapping.pid)
        if image is not None:
            self._drop_rules(process, image, mapping.start, mapping.end)

    def forget(self, pid: int) -> None:
        """A process ended or replaced its image."""
        self._images.pop(pid, None)

    def _drop_rules(self, process: ProcessStacks, image: int, start: int, end: int) -> None:
        for pc in process.pop_rules(start, end):
            self._rules.delete(_KEY.pack(image, pc))


class RecordedStacks:
    """Every stack that was recorded, and the processes they are of.

    `examine` may be called from any thread; the rest from the one that reads the rings.

    Args:
        maps: The kernel's maps, of which ``pythons``, ``seen_stacks``, ``unwind_rules`` and ``unwinding`` are used.
        copies: The ring of copied stacks.

    Attributes:
        refused: Why an interpreter is not read, by process.
        index: The stacks by their ids.
    """

    def __init__(self, maps: Mapping[str, BpfMap], copies: Ring) -> None:
        self.refused: dict[int, str] = {}
        self.index = _StackIndex(maps["seen_stacks"])
        self._pythons = maps["pythons"]
        self._unwinding = _Unwinding(maps["unwind_rules"], copies)
        self._files = SymbolFiles()
        self._checked = set[tuple[str, int]]()
        self._processes: dict[int, ProcessStacks] = {}
        self._lock = threading.Lock()

    @property
    def pids(self) -> frozenset[int]:
        """Processes that are kept open."""
        with self._lock:
            return frozenset(self._processes)

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
            if len(self.refused) < MAX_REFUSED:
                self.refused[pid] = error.message
            return None
        self.refused.pop(pid, None)
        return found

    def on_mapping(self, mapping: FileMapping) -> None:
        """A process mapped a file: an interpreter that was checked in another process is walked from its begin."""
        with self._lock:
            process = self._processes.get(mapping.pid)
            if process is not None:
                self._unwinding.forget_range(process, mapping)
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
            # A copy is written before its stack, so all that belong to these are there now.
            self._unwinding.read_copies()
            for record in records:
                self.index.add(int(record["id"]), self._resolve(record))
            self._unwinding.drop_orphans()
            self.index.drop_oldest()

    def _resolve(self, record: Any) -> Stack:  # noqa: ANN401 - one row of a structured array
        pid = int(record["pid"])
        process = self._open(pid)
        if process is None:
            return build_ended()
        if record["n_python"] and process.interpreter is None:  # a fork of one we know
            self._find_interpreter(process, pid)
        return process.resolve(record, self._unwinding.unwind(process, record))

    def read_open(self, pid: int, call: OpenCall) -> int:
        """The hash of the stack of a call that has not returned, read from outside.

        It is 0 when the process cannot be read.
        """
        with self._lock:
            process = self._open(pid)
            if process is None:
                return 0
            if process.interpreter is None:
                self._find_interpreter(process, pid)
            stack = process.resolve_open(call)
            self.index.deliver(stack)
            return stack.hash

    def forget(self, pids: Collection[int]) -> None:
        """Forget processes that ended or replaced their image.

        Their stacks stay known until there is need of room.
        """
        with self._lock:
            for pid in pids:
                self._unwinding.forget(pid)
                process = self._processes.pop(pid, None)
                if process is not None:
                    process.close()

    def close(self) -> None:
        """Free everything."""
        self.forget(list(self._processes))
        self._files.close()
