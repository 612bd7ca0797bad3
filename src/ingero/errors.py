"""Every error this project raises on purpose, named by what the catcher does with it.

    IngeroError
    ├── ConfigError         a setting is wrong; every problem is listed        → exit 2
    ├── UnsupportedError    this machine cannot do it; says what would help    → exit 3
    ├── BadDataError        input that no retry can repair; counted and dropped
    ├── DeliveryError       a consumer did not take the data
    │   ├── RetryableError  send the same data again later
    │   └── PermanentError  never send it again
    └── StoreError          the database failed; degrade and report            → exit 4

The tree describes the *data* and the *user's next step*, never the library that failed. A foreign exception becomes
one of these in the one context manager at its boundary. Only ``cli.main`` prints and exits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override


class IngeroError(Exception):
    """Root of the tree.

    Args:
        message: What went wrong, naming the value that was wrong.
        hint: The next step for the person who reads it; empty when there is none.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing wrong with a configuration.

    Attributes:
        path: Dotted key path, such as ``processors.ingero.threshold.k``; empty for the document itself.
        message: What is wrong with the value there.
        line: 1-based line in the file, or None when the setting did not come from a file.
        hint: The nearest known key, the allowed range or the fix.
    """

    path: str
    message: str
    line: int | None = None
    hint: str = ""

    @override
    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        path = f"{self.path}: " if self.path else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{path}{self.message}{hint}"


class ConfigError(IngeroError):
    """A configuration that cannot be used; carries all of its problems at once."""

    exit_code = 2

    def __init__(
        self, problems: Sequence[ConfigProblem] | str, *, source: str = "", hint: str = ""
    ) -> None:
        self.problems = (
            (ConfigProblem("", problems),) if isinstance(problems, str) else tuple(problems)
        )
        self.source = source
        head = f"{source}: " if source else ""
        super().__init__("\n".join(f"{head}{problem}" for problem in self.problems), hint=hint)


class UnsupportedError(IngeroError):
    """Something this machine, kernel or installation cannot do; ``hint`` says what would repair it."""

    exit_code = 3


class BadDataError(IngeroError):
    """Input that is wrong in itself. On streams it is counted and dropped, never raised per record."""


class DeliveryError(IngeroError):
    """A consumer did not take the data. Catch one of the two subclasses."""


class RetryableError(DeliveryError):
    """The data is fine and was not taken; send it again.

    Args:
        message: What happened.
        retry_after_ns: The least delay that the receiver asked for, or None.
        hint: The next step.
    """

    def __init__(self, message: str, *, retry_after_ns: int | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_ns = retry_after_ns


class PermanentError(DeliveryError):
    """The same data would be refused again; drop and count it."""


class StoreError(IngeroError):
    """A database could not be opened, read or written."""

    exit_code = 4
