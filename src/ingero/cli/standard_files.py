"""Standard input, output and error, fit for a program that writes its result on one and what it does on another."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from typing_extensions import override

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STDOUT: Final = 1
STDERR: Final = 2


class _ErrorFile(io.FileIO):
    """Standard error, which drops what it cannot write."""

    @override
    def write(self, data: ReadableBuffer, /) -> int:
        with suppress(OSError):
            return super().write(data) or memoryview(data).nbytes  # none: it does not block
        return memoryview(data).nbytes


def prepare_standard_files() -> None:
    """Make all three usable.

    One that is closed becomes the null device: else the next file that is opened, such as a recording, takes its
    number and what is printed. A character or a byte of a path that the encoding of the output lacks is written by its
    number, as on standard error. What standard error cannot take is dropped, for its reader may go away, or its disk be
    full, before the result is printed on standard output.
    """
    number = 0
    while number <= STDERR:
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = sys.stdout or open(STDOUT, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(STDERR, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stderr, io.TextIOWrapper) and _find_number(sys.stderr) == STDERR:
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_ErrorFile(STDERR, "w", closefd=False)),
            sys.stderr.encoding,
            sys.stderr.errors,
            line_buffering=True,
        )


def choose_colour() -> bool | None:
    """Whether output has colours, as click takes it: not where the user wants none, else as each file is a terminal.

    Source: no-color.org. Read here, for what reads the rest of the environment takes too long to load for ``--help``.
    """
    return False if os.environ.get("NO_COLOR") else None  # noqa: TID251


def _find_number(stream: io.TextIOWrapper) -> int | None:
    try:
        return stream.fileno()
    except OSError:  # of a test runner, which keeps the text
        return None
