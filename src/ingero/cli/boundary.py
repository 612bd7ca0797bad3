"""What a foreign exception means to the person at the command line.

The one place that turns it into one of our errors.
"""

from __future__ import annotations

import errno
import select
import sys
from typing import Final

from ingero.errors import IngeroError, StoreError, UnsupportedError

_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def find_error(error: BaseException) -> IngeroError | None:
    """Our error for what a command raised; None for what is nobody's input, but a fault of this program.

    A group of exceptions, as task groups raise, is as good as the first of its errors that means something.
    """
    if isinstance(error, IngeroError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = (find_error(one) for one in error.exceptions)
        return next((one for one in found if one is not None), None)
    if _is_database_error(error):
        return StoreError(f"the recording cannot be read: {error}", hint="try a copy of it")
    if isinstance(error, OSError):
        return _os_error(error)
    if isinstance(error, ModuleNotFoundError):
        return _find_missing_package(error)
    return None


def _find_missing_package(error: ModuleNotFoundError) -> IngeroError | None:
    """A package of an extra that was not installed; None for a module of ours, which is a fault of this program."""
    if not error.name or error.name.partition(".")[0] == "ingero":
        return None
    return UnsupportedError(
        f"this needs a Python package that is not installed: {error.name}",
        hint="pip install 'ingero[agent]', 'ingero[fleet]' or 'ingero[echo]': the extra of the program",
    )


def _is_database_error(error: BaseException) -> bool:
    module = sys.modules.get("sqlite3")  # who did not load it cannot have raised one
    return module is not None and isinstance(error, module.DatabaseError)


def is_interrupt(error: BaseException) -> bool:
    """Whether Ctrl-C is what ended a command, also inside a group."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_interrupt(one) for one in error.exceptions)
    return isinstance(error, KeyboardInterrupt) or _is_schema_cut_short(error)


def _is_schema_cut_short(error: BaseException) -> bool:
    """Whether Ctrl-C came while pydantic built a validator: its core keeps nothing of what was raised but its name."""
    module = sys.modules.get("pydantic_core")
    is_of_schema = module is not None and isinstance(error, module.SchemaError)
    return is_of_schema and KeyboardInterrupt.__name__ in str(error)


def is_after_interrupt(error: BaseException) -> bool:
    """Whether Ctrl-C came first and then something failed while the command was ended, as cleaning up may."""
    seen: set[int] = set()  # an error raised from itself is its own cause
    before = error.__cause__ or error.__context__
    while before is not None and id(before) not in seen:
        if is_interrupt(before):
            return True
        seen.add(id(before))
        before = before.__cause__ or before.__context__
    return False


def is_closed_output(error: BaseException, fd: int) -> bool:
    """Whether a command failed because the reader of its output went away.

    A broken pipe or connection to anything else is an error as any other.

    Args:
        error: What the command raised; a group counts when one of it does.
        fd: Where the output goes.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(is_closed_output(one, fd) for one in error.exceptions)
    return isinstance(error, BrokenPipeError) and is_reader_gone(fd)


def is_reader_gone(fd: int) -> bool:
    """Whether the reading end of a pipe that we write to has been closed; False for what is no pipe."""
    output = select.poll()
    output.register(fd, select.POLLOUT)
    # poll(2): POLLERR is set for the writing end of a pipe whose reading end has been closed.
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in output.poll(0))


def _os_error(error: OSError) -> IngeroError:
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        hint = "make room" if error.errno in _FULL else "check the path and who may use it"
        return IngeroError(f"{error.filename}: {reason}", hint=hint)
    if error.errno in _FULL:
        return IngeroError("the output cannot be written: no space left on device")
    return IngeroError(f"{reason}")
