"""A recorded stack into frames that a person reads, as recordings store them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ingero.agent.capture.kernel.abi import RETURN_BIT, PythonFrameFlag, StackFlag, get_dtype
from ingero.agent.capture.stacks.code import CodeObjects
from ingero.agent.capture.stacks.interpreter import Interpreter, check_interpreter, find_interpreter
from ingero.agent.capture.stacks.memory import RemoteMemory, iter_regions
from ingero.agent.capture.stacks.native import NativeFrame, ProcessCode, SymbolFiles
from ingero.agent.capture.stacks.outside import OpenCall, copy_stack, read_python_frames
from ingero.agent.capture.stacks.unwind import StackCopy, Unwound, unwind

Frame = dict[str, str | int]
_EVALUATION: Final = "_PyEval_EvalFrameDefault"
_FNV_OFFSET: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3
_MASK: Final = (1 << 64) - 1
_CUT: Final = "[more Python frames]"
_BROKEN: Final = "[unreadable Python frames]"
_NATIVE_CUT: Final = "[more native frames]"
_NO_RULE: Final = "[unknown callers]"
_BY_FRAME_POINTER: Final = "[callers by frame pointer]"


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack as it is stored.

    Attributes:
        hash: Of what it says, signed: equal for every process that takes the same path.
        frames: Innermost first, with the keys of `stack_traces.frames`. The last is in brackets where native frames
            were not followed to the thread's outermost function.
    """

    hash: int
    frames: tuple[Frame, ...]

    def to_json(self) -> str:
        """The ``frames`` column."""
        return json.dumps(self.frames, separators=(",", ":"), ensure_ascii=False)


def build_ended() -> Stack:
    """The stack of a process that ended before it could be read."""
    frames: tuple[Frame, ...] = ({"s": "[the process ended before its stack was read]"},)
    return Stack(hash_frames(frames), frames)


class ProcessStacks:
    """Everything that is known of one process's code.

    Args:
        pid: The process.
        files: Symbol tables.

    Raises:
        OSError: The process is gone, or we may not read it.
    """

    def __init__(self, pid: int, files: SymbolFiles) -> None:
        self._memory = RemoteMemory(pid)
        self._somewhere = next((region.start for region in iter_regions(pid)), 0)
        self._native = ProcessCode(pid, files, self._memory)
        self._rules = set[int]()
        self._codes: CodeObjects | None = None
        self.interpreter: Interpreter | None = None

    def is_current(self) -> bool:
        """Whether the process still has the image that it had."""
        return bool(self._memory.read(self._somewhere, 1))

    def find_interpreter(self, checked: set[tuple[str, int]]) -> Interpreter | None:
        """Its CPython, checked against the running process; None when it has none.

        Args:
            checked: Files whose interpreter agreed with its layout before, so that a process that has only just begun
                need not run Python code yet. This one's is added.

        Raises:
            UnsupportedError: There is one that cannot be read.
        """
        found = find_interpreter(self._memory, list(iter_regions(self._memory.pid)))
        if found is None or found == self.interpreter:
            return found
        if found.file not in checked:
            check_interpreter(self._memory, found)
            checked.add(found.file)
        self.interpreter = found
        self._codes = CodeObjects(self._memory, found)
        return found

    def unwind(self, record: Any, copy: StackCopy) -> Unwound:  # noqa: ANN401 - one row of a structured array
        """Follow the copy that belongs to a ``struct ig_stack``."""
        found = unwind(copy, self._native, int(record["n_native"]))
        self._rules.update(found.rules)
        return found

    @property
    def n_rules(self) -> int:
        """Addresses of frames that were followed."""
        return len(self._rules)

    def pop_rules(self, start: int, end: int) -> list[int]:
        """Forget what was mapped in a range.

        Returns the addresses of frames there that were followed, as `unwind` gave them.
        """
        self._native.forget()
        keys = [key for key in self._rules if start <= key & ~RETURN_BIT <= end]
        self._rules.difference_update(keys)
        return keys

    def resolve(self, record: Any, unwound: Unwound | None = None) -> Stack:  # noqa: ANN401 - one row of a structured array
        """A ``struct ig_stack`` as frames; those that cannot be resolved keep their address.

        Args:
            record: The stack.
            unwound: What its copy said.
        """
        addresses = record["native"][: int(record["n_native"])].tolist()
        if unwound is not None:
            addresses += unwound.addresses[1:]  # the first is the last of the record's
        native = self._native.describe(addresses)
        native_end = _describe_end(int(record["flags"]), unwound)
        groups = list(self._iter_groups(record["python"][: int(record["n_python"])].tolist()))
        flags = int(record["flags"])
        if groups and flags & (StackFlag.PYTHON_CUT | StackFlag.PYTHON_BROKEN):
            groups[-1].append({"s": _CUT if flags & StackFlag.PYTHON_CUT else _BROKEN})
        frames = (*self._merge(native, groups), *native_end)
        return Stack(hash_frames(frames), frames)

    def resolve_open(self, call: OpenCall) -> Stack:
        """Where a call was made that has not returned, read from the process's memory now."""
        record = np.zeros(1, get_dtype("stack"))
        record["native"][0, 0], record["n_native"] = call.return_pc, 1
        flags = StackFlag.UNWOUND | StackFlag.COPIED
        if self.interpreter is not None:
            frames, more = read_python_frames(self._memory, self.interpreter, call.pointer)
            flags |= more
            record["n_python"] = len(frames)
            for i, frame in enumerate(frames):
                record["python"][0, i] = frame
        record["flags"] = flags
        return self.resolve(record[0], unwind(copy_stack(self._memory, call), self._native))

    def _iter_groups(self, pairs: list[tuple[int, int, int]]) -> Iterator[list[Frame]]:
        """Python frames, those of one C evaluation loop together."""
        group: list[Frame] = []
        for code, offset, flags in pairs:
            if offset >= 0:  # else the frame has not begun
                group.append(self._describe(code, offset))
            if flags & PythonFrameFlag.ENTRY and group:
                yield group
                group = []
        if group:
            yield group

    def _describe(self, address: int, offset: int) -> Frame:
        code = self._codes.find(address) if self._codes else None
        if code is None or self._codes is None:
            return {"i": f"0x{address:x}", "pf": "?", "pfn": "?"}
        frame: Frame = {"pf": code.file, "pfn": code.function}
        line = self._codes.find_line(code, offset)
        if line is not None:
            frame["pl"] = line
        return frame

    def _merge(self, native: list[NativeFrame], groups: list[list[Frame]]) -> Iterator[Frame]:
        """Native frames with the Python frames in place of the interpreter's.

        Where the frame pointers lead through every evaluation loop each loop stands for its Python frames. Where they
        end before, what lies outside of the first frame of the interpreter is not to be trusted and left out.
        """
        if not groups:
            yield from map(_native_frame, native)
            return
        file = self.interpreter.file if self.interpreter else None
        n_loops = sum(_is_evaluation(frame, file) for frame in native)
        if n_loops != len(groups):
            for frame in native:
                if frame.file == file:
                    break
                yield _native_frame(frame)
            for group in groups:
                yield from group
            return
        waiting = iter(groups)
        for frame in native:
            if _is_evaluation(frame, file):
                yield from next(waiting)
            elif frame.file != file:
                yield _native_frame(frame)

    def close(self) -> None:
        """Let go of the process."""
        self._memory.close()


def _describe_end(flags: int, unwound: Unwound | None) -> tuple[Frame, ...]:
    """What to say where the native frames do not lead to the thread's outermost function, or may have left some out."""
    if not flags & StackFlag.UNWOUND:
        symbol = _BY_FRAME_POINTER
    elif flags & StackFlag.NATIVE_CUT or (unwound and unwound.is_cut):
        symbol = _NATIVE_CUT
    elif (unwound is None and flags & (StackFlag.COPIED | StackFlag.NO_RULE)) or (
        unwound and unwound.is_unknown
    ):
        symbol = _NO_RULE
    else:
        return ()
    return ({"s": symbol},)


def _is_evaluation(frame: NativeFrame, file: tuple[str, int] | None) -> bool:
    return frame.file == file and frame.symbol.startswith(_EVALUATION)


def _native_frame(frame: NativeFrame) -> Frame:
    name = frame.path.rpartition("/")[2]
    known: Frame = (
        {"s": f"{frame.symbol}+0x{frame.distance:x}"}
        if frame.symbol
        else {"i": f"0x{frame.address:x}"}
    )
    return {**known, "f": name} if name else known


def hash_frames(frames: tuple[Frame, ...]) -> int:
    """FNV-1a over what the frames say, as older recordings hash it, as a signed number."""
    data = bytearray()
    for frame in frames:
        for key in ("s", "f", "pf", "pfn"):
            data += str(frame.get(key, "")).encode("utf-8", "surrogateescape") + b"\0"
        data += int(frame.get("pl", 0)).to_bytes(4, "little")
    value = _FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * _FNV_PRIME & _MASK
    return value - (1 << 64) if value >> 63 else value
