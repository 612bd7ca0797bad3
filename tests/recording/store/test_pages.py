"""Integers come out of SQLite's pages as a loop over rows would give them, or not at all."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.recording.store.pages import iter_fetched, iter_integers, open_scratch

WAYS = (iter_integers, iter_fetched)
EDGES = [
    edge + step
    for bits in (7, 15, 23, 31, 47, 63)
    for edge in ((1 << bits), -(1 << bits))
    for step in (-1, 0, 1)
    if -(1 << 63) <= edge + step < 1 << 63
]
INTEGERS = st.one_of(st.sampled_from([0, 1, *EDGES]), st.integers(-(1 << 63), (1 << 63) - 1))


def opened(rows, n_columns=2):
    """A database in memory with these rows in table r, and the scratch schema."""
    connection = sqlite3.connect(":memory:")
    names = [f"c{i}" for i in range(n_columns)]
    connection.execute(f"CREATE TABLE r ({', '.join(names)})")
    connection.executemany(f"INSERT INTO r VALUES ({', '.join('?' * n_columns)})", rows)
    connection.commit()
    open_scratch(connection)
    return closing(connection)


def read(way, connection, select, parameters=(), n_columns=2):
    """The blocks of a SELECT as one list of tuples."""
    blocks = list(way(connection, select, parameters, n_columns))
    assert all(block.dtype == np.int64 and block.shape[0] == n_columns for block in blocks)
    return [row for block in blocks for row in zip(*block.tolist(), strict=True)]


@pytest.mark.parametrize("way", WAYS)
@given(rows=st.lists(st.tuples(INTEGERS, INTEGERS, INTEGERS), max_size=40))
def test_every_integer_comes_back(way, rows):
    with opened(rows, 3) as connection:
        assert read(way, connection, "SELECT * FROM r", n_columns=3) == rows


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_many_pages_keep_the_order_of_the_select(way):
    rows = [(i, EDGES[i % len(EDGES)] if i % 7 else i % 3) for i in range(100_000)]
    with opened(rows) as connection:
        select = "SELECT * FROM r WHERE c0 % ? <> 0 ORDER BY c0 DESC"
        expected = [row for row in reversed(rows) if row[0] % 11]
        assert read(way, connection, select, (11,)) == expected
        assert read(way, connection, "SELECT * FROM r") == rows  # over what the first one left


@pytest.mark.parametrize("way", WAYS)
def test_no_row_gives_no_block(way):
    with opened([]) as connection:
        assert not list(way(connection, "SELECT * FROM r", (), 2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    "strange",
    [None, 2.5, "", "none", "x" * 200, "x" * 200_000, b"", b"ab"],
    ids=lambda value: f"{type(value).__name__} {len(str(value))}",
)
def test_what_is_no_integer_is_refused(way, strange, at):
    rows = [[i, 1 << i, -i] for i in range(30)]
    rows[17][at] = strange
    with opened(rows, 3) as connection, pytest.raises(TypeError, match="there is a"):
        read(way, connection, "SELECT * FROM r", n_columns=3)
