"""Which recording a file is: the same for its copies and its later states, another one for every other file."""

from __future__ import annotations

import secrets
import sqlite3
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from ingero.recording.store.files import table_columns
from ingero.recording.store.typed import INT64, check_typed

_FIRST_EVENT: Final = ("id", "timestamp", "pid", "tid", "source", "op", "duration")
_DERIVED: Final = "x"
"""Begins an identity that is made from a file's first rows, because its writer gave it none."""


@dataclass(frozen=True, slots=True)
class Part:
    """One recording that a file holds.

    Attributes:
        id: Its identity, without a colon.
        node: A node that was given by hand to rows without one; empty otherwise.
    """

    id: str
    node: str = ""

    @property
    def is_derived(self) -> bool:
        """Whether the identity comes from the first rows."""
        return self.id.startswith(_DERIVED)


@dataclass(frozen=True, slots=True)
class SourceState:
    """How far a recording had come.

    Attributes:
        events: Rows of events.
        calls: Calls that its exact counts tell.
    """

    events: int
    calls: int


def new_identity() -> str:
    """An identity that no other recording has."""
    return secrets.token_hex(6)


def read_parts(
    connection: sqlite3.Connection, given_node: str = ""
) -> dict[Part, SourceState | None]:
    """The recordings of a file, and how far each had come; None for a file that is one recording itself.

    Args:
        connection: The file.
        given_node: Node for rows that carry none, where this file's rows do not.

    Raises:
        sqlite3.DatabaseError: The file is damaged where it says so.
    """
    rows: list[tuple[str, str, int, int]] = []
    if table_columns(connection, "recordings"):
        rows = connection.execute("SELECT id, node, events, calls FROM recordings").fetchall()
        check_typed(rows, (str, str, INT64, INT64), "what recordings it holds")
    merged = {
        Part(id_, node): SourceState(events, calls)
        for id_, node, events, calls in rows
        if events >= 0
    }
    if merged:
        return dict(merged)
    own = sorted(str(row[0]) for row in rows)
    return {Part(own[0] if own else derive_identity(connection), given_node): None}


def derive_identity(connection: sqlite3.Connection) -> str:
    """An identity from the first event and the first session, which later states of the file still have."""
    digest = sha256()
    columns = table_columns(connection, "events")
    names = [name for name in _FIRST_EVENT if name in columns]
    sql = f"SELECT {', '.join(names)} FROM events ORDER BY rowid LIMIT 1"  # noqa: S608 - own names
    digest.update(repr(connection.execute(sql).fetchone()).encode())
    if "node" in columns:  # a merged file begins as one of those that it was made of
        nodes = connection.execute("SELECT DISTINCT node FROM events ORDER BY 1").fetchall()
        digest.update(repr(nodes).encode())
    for table, column in (("sessions", "started_at"), ("event_aggregates", "bucket")):
        if column in table_columns(connection, table):
            sql = f"SELECT min({column}) FROM {table}"  # noqa: S608 - own names
            digest.update(repr(connection.execute(sql).fetchone()).encode())
    return _DERIVED + digest.hexdigest()[:12]


def measure(connection: sqlite3.Connection) -> SourceState:
    """How far a file had come."""
    (events,) = connection.execute("SELECT count(*) FROM events").fetchone()
    calls = 0
    if "count" in table_columns(connection, "event_aggregates"):
        sql = "SELECT ifnull(sum(CASE typeof(count) WHEN 'integer' THEN count END), 0) FROM event_aggregates"
        (calls,) = connection.execute(sql).fetchone()
    return SourceState(int(events), int(calls))
