"""Where each CPython keeps threads, frames, code and text.

3.13 and 3.14 say so themselves (``_PyRuntime`` begins with ``_Py_DebugOffsets``); the tables of 3.9 to 3.12 are what
``scripts/cpython_offsets.py`` prints from each version's headers, the same on x86-64 and arm64. With the GIL.
`ingero.agent.capture.stacks.interpreter` holds every layout to the process before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ingero.agent.capture.kernel.abi import NO_OFFSET, get_dtype
from ingero.agent.capture.stacks.linetable import TableKind
from ingero.errors import UnsupportedError

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in bytes; ``NO_OFFSET`` for what a version does not have."""

    interpreters_head: int
    interpreter_next: int
    threads_head: int
    thread_id: int
    thread_frame: int
    frame_previous: int
    frame_code: int
    frame_instruction: int
    code_filename: int
    code_name: int
    code_first_line: int
    code_lines: int
    lines: TableKind
    thread_prev: int = 0
    thread_next: int = 8
    thread_interpreter: int = 16
    cframe_frame: int = NO_OFFSET
    frame_owner: int = NO_OFFSET
    frame_entry: int = NO_OFFSET
    code_first: int = NO_OFFSET
    instruction_unit: int = 1
    text_length: int = 16
    text_state: int = 32
    text_ascii: int = 40
    text_wide: int = 56
    bytes_length: int = 16
    bytes_data: int = 32
    object_type: int = 8

    def build_record(self, runtime: int) -> bytes:
        """``struct ig_python`` for the kernel."""
        record = np.zeros(1, get_dtype("python"))
        record["runtime"] = runtime
        for name in record.dtype.names or ():
            if name != "runtime":
                record[name] = getattr(self, name)
        return record.tobytes()


_3_9: Final = Layout(
    interpreters_head=32,
    interpreter_next=0,
    threads_head=8,
    thread_id=176,
    thread_frame=24,
    frame_previous=24,
    frame_code=32,
    frame_instruction=104,
    code_filename=104,
    code_name=112,
    code_first_line=40,
    code_lines=120,
    lines=TableKind.LNOTAB,
    text_ascii=48,
    text_wide=72,
)
TABLES: Final[dict[Version, Layout]] = {
    (3, 9): _3_9,
    # f_lasti counts instructions of two bytes from here on.
    (3, 10): replace(_3_9, frame_instruction=96, instruction_unit=2, lines=TableKind.LINES),
    (3, 11): Layout(
        interpreters_head=40,
        interpreter_next=0,
        threads_head=16,
        thread_id=152,
        thread_frame=56,
        cframe_frame=8,
        frame_previous=48,
        frame_code=32,
        frame_instruction=56,
        frame_owner=69,
        frame_entry=68,
        code_first=184,
        code_filename=112,
        code_name=128,
        code_first_line=72,
        code_lines=136,
        lines=TableKind.LOCATIONS,
        text_ascii=48,
        text_wide=72,
    ),
    (3, 12): Layout(
        interpreters_head=40,
        interpreter_next=0,
        threads_head=72,
        thread_id=136,
        thread_frame=56,
        cframe_frame=0,
        frame_previous=8,
        frame_code=0,
        frame_instruction=56,
        frame_owner=70,
        code_first=192,
        code_filename=112,
        code_name=128,
        code_first_line=68,
        code_lines=136,
        lines=TableKind.LOCATIONS,
    ),
}
"""``code_name`` is ``co_qualname`` from 3.11 on; before there was only ``co_name``."""

DEBUG_COOKIE: Final = b"xdebugpy"
DEBUG_BYTES: Final = 1024
_HEAD_WORDS: Final = 3  # cookie, version, free_threaded
_SHARED: Final[dict[str, tuple[str, int]]] = {
    "interpreters_head": ("runtime", 2),
    "interpreter_next": ("interpreter", 2),
    "threads_head": ("interpreter", 3),
    "thread_prev": ("thread", 1),
    "thread_next": ("thread", 2),
    "thread_interpreter": ("thread", 3),
    "thread_frame": ("thread", 4),
    "thread_id": ("thread", 5),
    "frame_previous": ("frame", 1),
    "frame_code": ("frame", 2),
    "frame_instruction": ("frame", 3),
    "frame_owner": ("frame", 5),
    "code_filename": ("code", 1),
    "code_name": ("code", 3),
    "code_lines": ("code", 4),
    "code_first_line": ("code", 5),
    "code_first": ("code", 9),
    "object_type": ("object", 1),
    "bytes_length": ("bytes", 1),
    "bytes_data": ("bytes", 2),
    "text_state": ("text", 1),
    "text_length": ("text", 2),
    "text_ascii": ("text", 3),
}
"""Group and place in it of every field that we take from ``_Py_DebugOffsets``; the same in 3.13 and 3.14."""
_GROUPS: Final[dict[Version, dict[str, int]]] = {
    (3, 13): {
        "runtime": 0, "interpreter": 3, "thread": 16, "frame": 25, "code": 31, "object": 41, "bytes": 61,
        "text": 64,
    },
    (3, 14): {
        "runtime": 0, "interpreter": 3, "thread": 19, "frame": 28, "code": 36, "object": 47, "bytes": 71,
        "text": 74,
    },
}  # fmt: skip
"""First word of each group after the head. Source: ``pycore_runtime.h`` 3.13.0, ``pycore_debug_offsets.h`` 3.14.10."""
_WIDE_EXTRA: Final = 16  # PyCompactUnicodeObject adds utf8_length and utf8 since 3.12


def parse_debug_offsets(data: bytes) -> tuple[Version, Layout]:
    """The layout that an interpreter of 3.13 or later tells.

    Args:
        data: The first bytes of ``_PyRuntime``, with the cookie.

    Raises:
        UnsupportedError: A version whose table is not known, a build without the GIL, or numbers that cannot be.
    """
    words = np.frombuffer(data[: len(data) // 8 * 8], "<u8")
    version = find_version(int(words[1]))
    if words[2]:
        raise UnsupportedError(f"CPython {_name(version)} without the GIL is not read")
    groups = _GROUPS.get(version)
    if groups is None:
        raise UnsupportedError(f"the offsets of CPython {_name(version)} are not known")
    fields: dict[str, Any] = {
        name: int(words[_HEAD_WORDS + groups[group] + place])
        for name, (group, place) in _SHARED.items()
    }
    if any(not 0 <= value < 1 << 20 for value in fields.values()):
        raise UnsupportedError(f"CPython {_name(version)} tells offsets that cannot be")
    return version, Layout(
        **fields, text_wide=fields["text_ascii"] + _WIDE_EXTRA, lines=TableKind.LOCATIONS
    )


def find_version(hexversion: int) -> Version:
    """Major and minor of ``PY_VERSION_HEX``."""
    return hexversion >> 24 & 0xFF, hexversion >> 16 & 0xFF


def get_table(version: Version) -> Layout:
    """The layout of a version that does not tell it.

    Raises:
        UnsupportedError: There is no table for it.
    """
    if version not in TABLES:
        raise UnsupportedError(f"the offsets of CPython {_name(version)} are not known")
    return TABLES[version]


def _name(version: Version) -> str:
    return ".".join(map(str, version))
