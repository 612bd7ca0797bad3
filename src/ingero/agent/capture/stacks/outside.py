"""The stack of a call that has not returned, read from outside while its thread waits, runs or is stopped.

Nothing of the traced program is stopped and no register is asked for. The probe kept where the caller's frame begins;
from there outwards the stack does not change until the call returns, so it can be read at any time. The caller
makes sure afterwards that the call had still not returned.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from ingero.agent.capture.kernel.abi import (
    MAX_PYTHON,
    NO_OFFSET,
    RETURN_BIT,
    PythonFrameFlag,
    StackFlag,
)
from ingero.agent.capture.stacks.control_block import is_own_block
from ingero.agent.capture.stacks.interpreter import Interpreter
from ingero.agent.capture.stacks.layouts import Layout
from ingero.agent.capture.stacks.memory import RemoteMemory
from ingero.agent.capture.stacks.unwind import StackCopy

PythonFrame = tuple[int, int, int]
"""Code object, byte offset of the instruction being executed, `PythonFrameFlag`: ``struct ig_python_frame``."""

_PIECE: Final = 4096  # as of `StackCopy`
_MAX_BYTES: Final = 256 << 10
_FRAME_BYTES: Final = 120
_MAX_SHIMS: Final = 64
_MAX_THREADS: Final = 4096
_OWNED_BY_INTERPRETER: Final = 3


@dataclass(frozen=True, slots=True)
class OpenCall:
    """Where a call that has not returned was made.

    Attributes:
        tid: The thread.
        entry_ns: When, on the monotonic clock; with the thread it names the call.
        return_pc: Where it will return to.
        sp: The caller's stack pointer after that.
        bp: The caller's frame pointer.
        pointer: Thread pointer of the thread; 0 when it is not known.
        returns: Return addresses of the thread's probed calls, which the kernel replaced, as of `StackCopy`.
    """

    tid: int
    entry_ns: int
    return_pc: int
    sp: int
    bp: int
    pointer: int
    returns: dict[int, int]


def copy_stack(memory: RemoteMemory, call: OpenCall) -> StackCopy:
    """The caller's stack, at most 256 KiB of it."""
    data = memory.read(call.sp & -_PIECE, _MAX_BYTES)
    return StackCopy(call.return_pc | RETURN_BIT, call.sp, call.bp, data, call.returns)


def read_python_frames(
    memory: RemoteMemory, found: Interpreter, pointer: int
) -> tuple[list[PythonFrame], StackFlag]:
    """Python frames of a thread, innermost first; the kernel does the same (``bpf/include/ingero/stacks.h``).

    Args:
        memory: The process.
        found: Its interpreter.
        pointer: Thread pointer of the thread.
    """
    thread = _find_thread(memory, found, pointer)
    return _read_frames(memory, found.layout, thread) if thread else ([], StackFlag.NO_PYTHON)


def read_first_thread(memory: RemoteMemory, found: Interpreter) -> list[PythonFrame]:
    """Python frames of the thread that started the interpreter, innermost first; it may run meanwhile.

    What is read of a thread that runs can be of two moments: hold every code object to its type before it is shown.
    Empty where the thread runs no Python, or its frames could not be read to the end.
    """
    thread = _find_first_thread(memory, found)
    frames, flags = _read_frames(memory, found.layout, thread) if thread else ([], StackFlag(0))
    return [] if flags & StackFlag.PYTHON_BROKEN else frames


def _read_frames(
    memory: RemoteMemory, layout: Layout, thread: int
) -> tuple[list[PythonFrame], StackFlag]:
    frame = memory.word(thread + layout.thread_frame)
    if frame and layout.cframe_frame != NO_OFFSET:
        frame = memory.word(frame + layout.cframe_frame)
    frames: list[PythonFrame] = []
    for _ in range(MAX_PYTHON + _MAX_SHIMS):
        if not frame:
            break
        data = memory.read(frame, _FRAME_BYTES)
        if len(data) < _FRAME_BYTES:
            return frames, StackFlag.PYTHON_BROKEN
        frame = _word(data, layout.frame_previous)
        if layout.frame_owner != NO_OFFSET and data[layout.frame_owner] >= _OWNED_BY_INTERPRETER:
            if frames:
                code, offset, flags = frames[-1]
                frames[-1] = code, offset, flags | PythonFrameFlag.ENTRY
            continue
        if len(frames) >= MAX_PYTHON:
            return frames, StackFlag.PYTHON_CUT
        frames.append(_decode(layout, data))
    return frames, StackFlag(0)


def _decode(layout: Layout, data: bytes) -> PythonFrame:
    code = _word(data, layout.frame_code) & ~7  # 3.14 keeps a tag in the low bits
    if layout.code_first == NO_OFFSET:
        (index,) = struct.unpack_from("<i", data, layout.frame_instruction)
        return code, index * layout.instruction_unit, PythonFrameFlag.ENTRY
    offset = _word(data, layout.frame_instruction) - code - layout.code_first
    is_entry = layout.frame_entry != NO_OFFSET and data[layout.frame_entry]
    # Behind the code object's end it is no instruction; what does not fit the record's field is said not to have begun.
    is_offset = -(1 << 31) <= offset < 1 << 31
    return code, offset if is_offset else -1, PythonFrameFlag.ENTRY if is_entry else 0


def _find_thread(memory: RemoteMemory, found: Interpreter, pointer: int) -> int:
    """The thread state of the thread with this thread pointer; 0 when there is none."""
    layout = found.layout
    interpreter = memory.word(found.runtime + layout.interpreters_head)
    n_threads = 0
    while pointer and interpreter:
        thread = memory.word(interpreter + layout.threads_head)
        while thread:
            n_threads += 1
            if n_threads > _MAX_THREADS:
                return 0
            if is_own_block(memory.word(thread + layout.thread_id), pointer):
                return thread
            thread = memory.word(thread + layout.thread_next)
        interpreter = memory.word(interpreter + layout.interpreter_next)
    return 0


def _find_first_thread(memory: RemoteMemory, found: Interpreter) -> int:
    """The oldest thread state of the oldest interpreter, as CPython puts new ones first; 0 when there is none."""
    layout = found.layout
    interpreter = _find_last(
        memory, found.runtime + layout.interpreters_head, layout.interpreter_next
    )
    return (
        _find_last(memory, interpreter + layout.threads_head, layout.thread_next)
        if interpreter
        else 0
    )


def _find_last(memory: RemoteMemory, head: int, next_offset: int) -> int:
    """The end of a list; 0 when it is empty or has no end."""
    last, one = 0, memory.word(head)
    for _ in range(_MAX_THREADS):
        if not one:
            return last
        last, one = one, memory.word(one + next_offset)
    return 0


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")
