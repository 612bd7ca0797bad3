"""Where an error that nothing foresaw was raised."""

from __future__ import annotations

import traceback
from typing import NamedTuple

from typing_extensions import override


class FaultPlace(NamedTuple):
    """A line of the program, and what was raised there.

    Attributes:
        type: Name of the error's class.
        file: The source file.
        line: 1-based; None where it is not known.
    """

    type: str
    file: str
    line: int | None

    @override
    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def find_place(error: BaseException) -> FaultPlace:
    """Where an error was raised. It has been raised: one that never was has no place."""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return FaultPlace(type(error).__name__, raised.filename, raised.lineno)
