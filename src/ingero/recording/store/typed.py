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
    connection: sqlite3.Connection, table: str, columns: Mapping[str, Kind], order: str = ""
) -> tuple[list[tuple[Any, ...]], int]:
    """Columns of a table, in the order given.

    Returns:
        The rows whose every value is of its kind, and how many others there are.
    """
    sql = f"SELECT {', '.join(columns)} FROM {table}" + (f" ORDER BY {order}" if order else "")  # noqa: S608
    return keep_typed(connection.execute(sql), columns.values())


def keep_typed(
    rows: Iterable[tuple[Any, ...]], kinds: Iterable[Kind]
) -> tuple[list[tuple[Any, ...]], int]:
    """The rows whose every value is of its kind, and how many others there are."""
    wanted = tuple(kinds)
    kept, n_damaged = [], 0
    for row in rows:
        if all(is_of(value, kind) for value, kind in zip(row, wanted, strict=True)):
            kept.append(row)
        else:
            n_damaged += 1
    return kept, n_damaged
