"""Integers out of SQLite as arrays, without a Python object for each.

SQLite gathers the chosen rows in a table in memory and hands over that table's pages; NumPy takes them apart. Only
pages that this process's own SQLite has just written are read so, never those of a file that somebody gave.

Source of the layout: SQLite "Database File Format", sections 1.6 (b-tree pages) and 2.1 (record format).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ingero.model.arrays import IntArray

SCRATCH: Final = "scratch"
"""Schema in memory that `open_scratch` attaches."""

_PAGE_BYTES: Final = 65_536
_BLOCK_PAGES: Final = 16
"""About a megabyte, so that a block's columns stay in the cache."""
_FETCHED_ROWS: Final = 1 << 14
_LEAF: Final = 13
_LEAF_HEADER_BYTES: Final = 8
_INTERIOR_HEADER_BYTES: Final = 12
_MORE: Final = 0x80
"""Set in every byte of a varint but its last."""

_BITS: Final = 8 * np.array([0, 1, 2, 3, 4, 6, 8, 8, 0, 0])
"""Size of a value in the record, by serial type: 0 is NULL, 7 a float, 8 the integer 0 and 9 the integer 1."""
_NULL, _FLOAT, _ONE = 0, 7, 9


def open_scratch(connection: sqlite3.Connection) -> None:
    """Give a connection the schema `SCRATCH`. ExternalAccess a transaction."""
    connection.execute(f"ATTACH ':memory:' AS {SCRATCH}")
    connection.execute(f"PRAGMA {SCRATCH}.page_size = {_PAGE_BYTES}")


def iter_integers(
    connection: sqlite3.Connection, select: str, parameters: Sequence[Any], n_columns: int
) -> Iterator[IntArray]:
    """The rows of a SELECT in its order, in blocks of shape (`n_columns`, rows); no block when there is no row.

    Args:
        connection: Has the schema of `open_scratch`, and may write there.
        select: Yields 1 to 100 columns.
        parameters: What it binds.
        n_columns: How many columns it yields.

    Raises:
        TypeError: A value is NULL, text or a float.
        sqlite3.DatabaseError: The statement failed.
    """
    if hasattr(connection, "serialize"):
        return _iter_gathered(connection, select, parameters, n_columns)
    return iter_fetched(connection, select, parameters, n_columns)


def iter_fetched(
    connection: sqlite3.Connection, select: str, parameters: Sequence[Any], n_columns: int
) -> Iterator[IntArray]:
    """`iter_integers` row by row, at three times the cost: for a SQLite before 3.36, which need not hand over pages."""
    cursor = connection.execute(select, parameters)
    while rows := cursor.fetchmany(_FETCHED_ROWS):
        flat = list(chain.from_iterable(rows))
        if strange := set(map(type, flat)) - {int}:
            raise TypeError(f"there is a {strange.pop().__name__}")
        yield np.array(flat, np.int64).reshape(-1, n_columns).T


def _iter_gathered(
    connection: sqlite3.Connection, select: str, parameters: Sequence[Any], n_columns: int
) -> Iterator[IntArray]:
    connection.execute(f"CREATE TABLE {SCRATCH}.chosen AS {select}", parameters)
    (root,) = connection.execute(
        f"SELECT rootpage FROM {SCRATCH}.sqlite_master WHERE name = 'chosen'"  # noqa: S608 - ours
    ).fetchone()
    pages = np.frombuffer(connection.serialize(name=SCRATCH), np.uint8)
    connection.execute(f"DROP TABLE {SCRATCH}.chosen")
    leaves = list(_iter_leaves(pages, root - 1))
    for first in range(0, len(leaves), _BLOCK_PAGES):
        cells = np.concatenate([
            _cell_offsets(pages, page, _LEAF_HEADER_BYTES)
            for page in leaves[first : first + _BLOCK_PAGES]
        ])
        if len(cells):
            yield _decode_records(pages, cells, n_columns)


def _iter_leaves(pages: npt.NDArray[np.uint8], page: int) -> Iterator[int]:
    """Pages, counted from 0, that hold the rows below a page other than the first, in the rows' order."""
    here = page * _PAGE_BYTES
    if pages[here] == _LEAF:
        yield page
        return
    children = [
        *_cell_offsets(pages, page, _INTERIOR_HEADER_BYTES).tolist(),
        here + _LEAF_HEADER_BYTES,
    ]
    for child in children:
        yield from _iter_leaves(pages, int.from_bytes(pages[child : child + 4].tobytes()) - 1)


def _cell_offsets(pages: npt.NDArray[np.uint8], page: int, header_bytes: int) -> IntArray:
    """Where the cells of a b-tree page begin in `pages`, in the order of their keys."""
    here = page * _PAGE_BYTES
    n_cells = int.from_bytes(pages[here + 3 : here + 5].tobytes())
    pointers = pages[here + header_bytes :][: 2 * n_cells].view(">u2")
    return here + pointers.astype(np.int64)


def _decode_records(pages: npt.NDArray[np.uint8], cells: IntArray, n_columns: int) -> IntArray:
    """The integers of leaf cells, shape (`n_columns`, cells): payload size, row id, header size, types, values."""
    at = _skip_varint(pages, _skip_varint(pages, cells)) + 1
    types = _sliding(pages, np.dtype((np.void, n_columns)))[at]
    types = np.ascontiguousarray(types.view(np.uint8).reshape(-1, n_columns).T)
    # A type of several bytes is a long text or blob, and its first byte is above all types that integers have.
    if (types > _ONE).any() or (types == _FLOAT).any() or (types == _NULL).any():
        raise TypeError("there is a text, a float or a NULL")
    at += n_columns
    words = _sliding(pages, np.dtype(">i8"))
    values = np.zeros(types.shape, np.int64)
    for column, kinds in enumerate(types):
        bits = _BITS[kinds]
        if bits.any():
            at += bits >> 3
            rest = 64 - bits
            # the eight bytes that end with the value, whatever stands before it
            values[column] = words[at - 8].astype(np.int64) << rest >> rest
        values[column] += kinds == _ONE
    return values


def _skip_varint(pages: npt.NDArray[np.uint8], at: IntArray) -> IntArray:
    """Offsets behind the varints that begin at `at`."""
    while (is_more := pages[at] >= _MORE).any():
        at = at + is_more
    return at + 1


def _sliding(pages: npt.NDArray[np.uint8], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """What stands at every offset, aligned or not, read as `dtype`."""
    return np.ndarray((len(pages) - dtype.itemsize + 1,), dtype, pages, 0, (1,))
