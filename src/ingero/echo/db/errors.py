"""DuckDB's errors become ours here, and nowhere else.

`BrokenInstanceError` is the one that matters: after a fatal error (a full disk in a checkpoint, an internal error)
the whole instance refuses everything until it is opened again, readers included.

Source: DuckDB 2.0.0 and 1.5.6, observed: ``FatalException``, then ``database has been invalidated``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import duckdb

from ingero.errors import StoreError


class BrokenInstanceError(StoreError):
    """The instance is dead until it is reopened; the data on disk is not."""


class DeadlineError(StoreError):
    """A read was stopped at its deadline."""


class BadRowsError(StoreError):
    """The rows themselves cannot be stored; no retry helps."""


class MemoryLimitError(StoreError):
    """A statement needs more memory than the instance has left."""


class LockedError(StoreError):
    """Another process holds the database."""


class ForeignDatabaseError(StoreError):
    """A database that opens and is not one that this release serves."""


@contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    """Turn whatever DuckDB raises into a `StoreError`; ``doing`` completes "cannot …"."""
    try:
        yield
    except (duckdb.FatalException, duckdb.InternalException) as error:
        raise BrokenInstanceError(f"cannot {doing}: {_first_line(error)}") from error
    except duckdb.InterruptException as error:
        raise DeadlineError(f"cannot {doing}: stopped at its deadline") from error
    except duckdb.OutOfMemoryException as error:
        raise MemoryLimitError(
            f"cannot {doing}: it needs more memory than the store may use",
            hint="Narrow the time window, or raise --memory-limit.",
        ) from error
    except duckdb.Error as error:
        if "database has been invalidated" in str(error):
            raise BrokenInstanceError(f"cannot {doing}: {_first_line(error)}") from error
        raise StoreError(f"cannot {doing}: {_first_line(error)}") from error


@contextmanager
def translate_row_errors(doing: str) -> Iterator[None]:
    """`translate_errors`, with what is the fault of the rows as `BadRowsError`."""
    with translate_errors(doing):
        try:
            yield
        except (duckdb.DataError, duckdb.IntegrityError, duckdb.InvalidInputException) as error:
            if "database has been invalidated" in str(error):
                raise
            raise BadRowsError(f"cannot {doing}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
