"""Rows of small tables whose values have the types that they should; what a damaged file holds instead is counted."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

INT64: Final = (-(1 << 63), (1 << 63) - 1)
Kind = type[str] | type[float] | tuple[int, int]
"""Text, a number, or a whole number from the first to the last of two."""


def int_range(dtype: np.dtype[Any]) -> Kind:
    """What a field of a structured dtype can hold."""
    if dtype.kind == "f":
        return float
    facts = np.iinfo(dtype)
    return int(facts.min), int(facts.max)


def is_of(value: object, kind: Kind) -> bool:
    """Whether a value is of a kind; NULL is of every kind."""
    if value is None:
        return True
    if isinstance(kind, tuple):
        return isinstance(value, int) and kind[0] <= value <= kind[1]
    return isinstance(value, str) if kind is str else isinstance(value, int | float)


def select_typed(
    connection: sqlite3.Connection,
    table: str,
    columns: Mapping[str, Kind],
    order: str = "",
    *,
    has_nulls: bool = False,
) -> tuple[list[tuple[Any, ...]], int]:
    """Columns of a table, in the order given.

    Returns:
        As `keep_typed`.
    """
    sql = f"SELECT {', '.join(columns)} FROM {table}" + (f" ORDER BY {order}" if order else "")  # noqa: S608
    return keep_typed(connection.execute(sql), columns.values(), has_nulls=has_nulls)


def keep_typed(
    rows: Iterable[tuple[Any, ...]], kinds: Iterable[Kind], *, has_nulls: bool = False
) -> tuple[list[tuple[Any, ...]], int]:
    """The rows whose every value is of its kind, and how many others there are.

    Args:
        rows: Any.
        kinds: One for each value of a row.
        has_nulls: Whether NULL is of every kind. A damaged file has it also where its schema says that it cannot.
    """
    wanted = tuple(kinds)
    kept, n_damaged = [], 0
    for row in rows:
        is_whole = has_nulls or None not in row
        if is_whole and all(is_of(value, kind) for value, kind in zip(row, wanted, strict=True)):
            kept.append(row)
        else:
            n_damaged += 1
    return kept, n_damaged


def check_typed(rows: list[tuple[Any, ...]], kinds: Iterable[Kind], name: str) -> None:
    """Refuse rows of which each one counts.

    Args:
        rows: Any.
        kinds: One for each value of a row; NULL is of none.
        name: What the rows are, for the message.

    Raises:
        sqlite3.DatabaseError: A value is of another kind. `store_errors` adds the file's name.
    """
    if keep_typed(rows, kinds)[1]:
        raise sqlite3.DatabaseError(f"{name} cannot be read")
