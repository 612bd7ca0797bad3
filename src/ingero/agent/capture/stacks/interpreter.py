"""Finding the CPython interpreter of a process, and making sure that we read it right before anything is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ingero.agent.capture.kernel.abi import NO_OFFSET
from ingero.agent.capture.stacks.control_block import is_control_block
from ingero.agent.capture.stacks.layouts import (
    DEBUG_BYTES,
    DEBUG_COOKIE,
    Layout,
    Version,
    find_version,
    get_table,
    parse_debug_offsets,
)
from ingero.agent.capture.stacks.memory import Region, RemoteMemory, open_region
from ingero.agent.capture.stacks.symbols import Symbols
from ingero.errors import BadDataError, UnsupportedError

_NAMED: Final = re.compile(r"(?:lib)?python(?:3(?:\.\d+)?t?)?(?:\.so.*)?")
_RUNTIME: Final = "_PyRuntime"
_SYMBOLS: Final = (
    *(_RUNTIME, "PyCode_Type", "PyUnicode_Type"),
    "Py_Version",  # since 3.11
    "Py_NewRef",  # since 3.10
    "PyModule_AddType",  # since 3.9
)
_MAX_INTERPRETERS: Final = 64
_MAX_THREADS: Final = 4096
_MAX_FRAMES: Final = 64
_TRIES: Final = 5
_OWNED_BY_INTERPRETER: Final = 3
_UNREAD: Final = 0, 0


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A CPython whose frames can be read.

    Attributes:
        version: Major and minor.
        layout: Where it keeps things.
        runtime: Address of ``_PyRuntime``.
        code_type: Address of ``PyCode_Type``.
        text_type: Address of ``PyUnicode_Type``.
        file: The file that holds it, as `Region.file`.
    """

    version: Version
    layout: Layout
    runtime: int
    code_type: int
    text_type: int
    file: tuple[str, int]


def is_python_file(path: str) -> bool:
    """Whether a file is called like CPython's library or program."""
    return _NAMED.fullmatch(path.rpartition("/")[2]) is not None


def find_interpreter(memory: RemoteMemory, regions: list[Region]) -> Interpreter | None:
    """The interpreter in a process; None when there is none. Not checked yet: see `check_interpreter`.

    Raises:
        UnsupportedError: There is one that cannot be read; the message says why.
    """
    seen = set[tuple[str, int]]()
    named = [region for region in regions if region.is_code and is_python_file(region.path)]
    # The library before the program: with a shared library the program holds nothing.
    for region in sorted(
        named, key=lambda region: not region.path.rpartition("/")[2].startswith("lib")
    ):
        if region.file in seen:
            continue
        seen.add(region.file)
        found = _read_interpreter(memory, region)
        if found is not None:
            return found
    return None


def _read_interpreter(memory: RemoteMemory, region: Region) -> Interpreter | None:
    try:
        with open_region(memory.pid, region) as opened, Symbols(opened.fd) as symbols:
            addresses = symbols.find_exported(*_SYMBOLS)
            bias = symbols.find_bias(region.start, region.offset)
    except (OSError, BadDataError):
        return None
    if _RUNTIME not in addresses or bias is None:
        return None
    located = {name: address + bias for name, address in addresses.items()}
    found = _find_layout(memory, located)
    if found is None:
        return None
    return Interpreter(
        *found,
        located[_RUNTIME],
        located.get("PyCode_Type", 0),
        located.get("PyUnicode_Type", 0),
        region.file,
    )


def _find_layout(memory: RemoteMemory, located: dict[str, int]) -> tuple[Version, Layout] | None:
    """None where its memory cannot be read: not all of it is mapped yet, it has ended, or is another program by now."""
    head = memory.read(located[_RUNTIME], DEBUG_BYTES)
    if head.startswith(DEBUG_COOKIE) and len(head) == DEBUG_BYTES:
        return parse_debug_offsets(head)
    version = _find_version(memory, located)
    return None if version == _UNREAD else (version, get_table(version))


def _find_version(memory: RemoteMemory, located: dict[str, int]) -> Version:
    """What an interpreter of 3.11 or 3.12 says; of an older one what it exports."""
    if "Py_Version" in located:
        return find_version(memory.word(located["Py_Version"]))
    if "Py_NewRef" in located:
        return 3, 10
    if "PyModule_AddType" in located:
        return 3, 9
    raise UnsupportedError("CPython before 3.9 is not read")


def check_interpreter(memory: RemoteMemory, found: Interpreter) -> None:
    """Walk every thread and its frames, and hold each link to what it must be.

    Interpreter and thread states must point at each other, a thread's id must be its own control block, every frame
    must hold a code object, and that the names of its function and file.

    Raises:
        UnsupportedError: Something is not as the layout says, or no thread runs Python code yet.
    """
    reason = ""
    for _ in range(_TRIES):  # the process runs meanwhile, so one disagreement proves nothing
        reason = _disagreement(memory, found)
        if not reason:
            return
    version = ".".join(map(str, found.version))
    raise UnsupportedError(f"process {memory.pid} is not laid out as CPython {version}: {reason}")


def _disagreement(memory: RemoteMemory, found: Interpreter) -> str:
    layout, n_frames = found.layout, 0
    interpreter = memory.word(found.runtime + layout.interpreters_head)
    if not interpreter:
        return "it has no interpreter yet"
    for _ in range(_MAX_INTERPRETERS):
        thread, before = memory.word(interpreter + layout.threads_head), 0
        for _ in range(_MAX_THREADS):
            if not thread:
                break
            reason = _check_thread(memory, layout, thread, (interpreter, before))
            if reason:
                return reason
            n_frames += _count_frames(memory, found, thread)
            before, thread = thread, memory.word(thread + layout.thread_next)
        interpreter = memory.word(interpreter + layout.interpreter_next)
        if not interpreter:
            break
    return "" if n_frames else "no thread has a readable frame"


def _check_thread(memory: RemoteMemory, layout: Layout, thread: int, links: tuple[int, int]) -> str:
    interpreter, before = links
    if memory.word(thread + layout.thread_interpreter) != interpreter:
        return "a thread state does not point at its interpreter"
    if memory.word(thread + layout.thread_prev) != before:
        return "two thread states do not point at each other"
    if not is_control_block(memory, memory.word(thread + layout.thread_id)):
        return "a thread id is not a thread's control block"
    return ""


def _count_frames(memory: RemoteMemory, found: Interpreter, thread: int) -> int:
    """Frames of a thread up to the first that is not one."""
    layout = found.layout
    frame = memory.word(thread + layout.thread_frame)
    if frame and layout.cframe_frame != NO_OFFSET:
        frame = memory.word(frame + layout.cframe_frame)
    n_frames = 0
    for _ in range(_MAX_FRAMES):
        if not frame:
            break
        if not _is_shim(memory, layout, frame):
            code = memory.word(frame + layout.frame_code) & ~7
            if memory.word(code + layout.object_type) != found.code_type:
                break
            texts = (memory.word(code + at) for at in (layout.code_name, layout.code_filename))
            if any(memory.word(text + layout.object_type) != found.text_type for text in texts):
                break
            n_frames += 1
        frame = memory.word(frame + layout.frame_previous)
    return n_frames


def _is_shim(memory: RemoteMemory, layout: Layout, frame: int) -> bool:
    if layout.frame_owner == NO_OFFSET:
        return False
    owner = memory.read(frame + layout.frame_owner, 1)
    return bool(owner) and owner[0] >= _OWNED_BY_INTERPRETER
