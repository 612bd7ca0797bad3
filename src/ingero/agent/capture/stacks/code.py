"""Code objects of a process: function, file and line table, read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ingero.agent.capture.stacks.interpreter import Interpreter
from ingero.agent.capture.stacks.linetable import find_line
from ingero.agent.capture.stacks.memory import RemoteMemory

_MAX_CODES: Final = 65_536
_MAX_CHARS: Final = 1024
_MAX_TABLE_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 160
_KIND_ENCODINGS: Final = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}
_COMPACT, _ASCII = 1 << 5, 1 << 6


@dataclass(frozen=True, slots=True)
class Code:
    """One code object.

    Attributes:
        function: Qualified name; the plain one before CPython 3.11.
        file: Where it was compiled from.
        first_line: Of its definition.
        lines: Its line table.
    """

    function: str
    file: str
    first_line: int
    lines: bytes


class CodeObjects:
    """The code objects of one process that were met.

    Args:
        memory: The process.
        interpreter: How it is laid out.
    """

    def __init__(self, memory: RemoteMemory, interpreter: Interpreter) -> None:
        self._memory = memory
        self._interpreter = interpreter
        self._codes: dict[int, tuple[tuple[int, ...], Code]] = {}

    def find(self, address: int) -> Code | None:
        """The code object at an address; None when there is none, or the process is gone.

        What is known is held to the object's addresses of names and lines, so that another one that has taken its place
        is not mistaken for it.
        """
        layout = self._interpreter.layout
        head = self._memory.read(address, _HEAD_BYTES)
        known = self._codes.get(address)
        if len(head) < _HEAD_BYTES:
            return known[1] if known else None
        offsets = (layout.object_type, layout.code_name, layout.code_filename, layout.code_lines)
        stamp = tuple(int.from_bytes(head[at : at + 8], "little") for at in offsets)
        if known and stamp == known[0]:
            return known[1]
        if stamp[0] != self._interpreter.code_type:
            return None
        function, file = self._read_text(stamp[1]), self._read_text(stamp[2])
        if function is None or file is None:
            return None
        first = head[layout.code_first_line : layout.code_first_line + 4]
        code = Code(function, file, int.from_bytes(first, "little"), self._read_bytes(stamp[3]))
        if len(self._codes) >= _MAX_CODES:
            self._codes.clear()
        self._codes[address] = stamp, code
        return code

    def find_line(self, code: Code, offset: int) -> int | None:
        """The line that is being executed at an instruction."""
        return find_line(self._interpreter.layout.lines, code.lines, code.first_line, offset)

    def _read_text(self, address: int) -> str | None:
        layout = self._interpreter.layout
        head = self._memory.read(address, layout.text_wide)
        if len(head) < layout.text_wide:
            return None
        if int.from_bytes(head[layout.object_type :][:8], "little") != self._interpreter.text_type:
            return None
        length = int.from_bytes(head[layout.text_length :][:8], "little")
        state = int.from_bytes(head[layout.text_state :][:4], "little")
        encoding = _KIND_ENCODINGS.get(state >> 2 & 7)
        if encoding is None or not state & _COMPACT:
            return None
        start = layout.text_ascii if state & _ASCII else layout.text_wide
        n_bytes = min(length, _MAX_CHARS) * (state >> 2 & 7)
        return self._memory.read(address + start, n_bytes).decode(encoding, "replace")

    def _read_bytes(self, address: int) -> bytes:
        layout = self._interpreter.layout
        length = self._memory.word(address + layout.bytes_length)
        return self._memory.read(address + layout.bytes_data, min(length, _MAX_TABLE_BYTES))
