"""Which lines of Python a process was at: its first thread, looked at from outside many times in some seconds.

Nothing of the process is stopped or executed. A look at a thread that runs may mix two moments; such a look finds
something that is no code object, and is dropped. Python 3.9 to 3.14 with the GIL, as for recorded stacks.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from ingero.agent.capture.discover.processes import read_state
from ingero.agent.capture.stacks.code import Code, CodeObjects
from ingero.agent.capture.stacks.interpreter import check_interpreter, find_interpreter
from ingero.agent.capture.stacks.memory import RemoteMemory, iter_regions
from ingero.agent.capture.stacks.outside import PythonFrame, read_first_thread
from ingero.errors import UnsupportedError
from ingero.model.counters import RUNNING, CodeLines

PERIOD_S: Final = 0.02
"""Between two looks, on average: a step of a job is not met at the same place each time."""
_GOLDEN: Final = 0.618
_LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3")
_GENERATED: Final = "<"
_NO_PYTHON: Final = "it runs no Python"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a thread was.

    Attributes:
        file: Of the user's program.
        function: In it.
        line: Being executed.
        into: The library's function that it is in; empty for none.
    """

    file: str
    function: str
    line: int
    into: str = ""

    def describe(self) -> str:
        """``train.py:7 main → pad``."""
        into = f" → {self.into}" if self.into else ""
        return f"{self.file.rpartition('/')[2]}:{self.line} {self.function}{into}"


SampleLines = Callable[[int, threading.Event], CodeLines]
"""Process, what ends it → the lines that were seen until then."""


def sample_lines(pid: int, stop: threading.Event) -> CodeLines:
    """Look at a process until asked to stop; a `SampleLines`. Does not raise: it has the reason instead."""
    try:
        with contextlib.closing(RemoteMemory(pid)) as memory:
            found = find_interpreter(memory, list(iter_regions(pid)))
            if found is None:
                return _sample(pid, None, stop, _NO_PYTHON)
            check_interpreter(memory, found)
            codes = CodeObjects(memory, found)
            return _sample(pid, lambda: _find_place(codes, read_first_thread(memory, found)), stop)
    except UnsupportedError as error:
        return _sample(pid, None, stop, f"{error}")
    except OSError as error:
        return _sample(pid, None, stop, f"its memory cannot be read: {error.strerror}")


def _sample(
    pid: int, find: Callable[[], _Place | None] | None, stop: threading.Event, reason: str = ""
) -> CodeLines:
    states, number = Counter[str](), 0
    running, waiting = Counter[_Place](), Counter[_Place]()
    while not stop.wait(PERIOD_S * (0.5 + number * _GOLDEN % 1.0)):
        number += 1
        state = read_state(pid)
        if not state:
            break  # it has ended
        states[state] += 1
        place = find() if find is not None else None
        if place is not None:
            (running if state == RUNNING else waiting)[place] += 1
    n_looks = running.total() + waiting.total()
    return CodeLines(
        n_looks, _sum_by_function(running), _sum_by_function(waiting), reason, dict(states)
    )


def _sum_by_function(places: Counter[_Place]) -> dict[str, int]:
    """Looks by function, which is named with the line at which it was met most often."""
    lines: dict[_Place, Counter[int]] = {}
    for place, n_looks in places.items():
        lines.setdefault(replace(place, line=0), Counter())[place.line] += n_looks
    return {
        replace(place, line=seen.most_common(1)[0][0]).describe(): seen.total()
        for place, seen in lines.items()
    }


def _find_place(codes: CodeObjects, frames: list[PythonFrame]) -> _Place | None:
    """The innermost line of the user's own program; None for frames that do not belong together."""
    inner: Code | None = None
    for address, offset, _ in frames:
        code = codes.find(address)
        if code is None:
            return None
        if offset < 0:  # it has not begun
            continue
        inner = inner or code
        if code.file.startswith(_GENERATED) or any(part in code.file for part in _LIBRARIES):
            continue
        line = codes.find_line(code, offset) or code.first_line
        return _Place(code.file, code.function, line, "" if inner is code else inner.function)
    return None if inner is None else _Place(inner.file, inner.function, inner.first_line)
