"""Where a journal keeps its pair tests: a table of its file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from ingero.remediation.pair_tests import PairOutcome, PairTestRecord, PairTestState
from ingero.remediation.records import Moment

PAIR_TESTS: Final = """
CREATE TABLE pair_tests (
  id TEXT PRIMARY KEY, episode TEXT NOT NULL, cluster_id TEXT NOT NULL, suspect TEXT NOT NULL, peer TEXT NOT NULL,
  partition TEXT NOT NULL, state TEXT NOT NULL,
  began_mono_ns INTEGER NOT NULL, began_wall_ns INTEGER NOT NULL, began_boot TEXT NOT NULL,
  changed_mono_ns INTEGER NOT NULL, changed_wall_ns INTEGER NOT NULL, changed_boot TEXT NOT NULL,
  job TEXT NOT NULL, outcome TEXT, note TEXT NOT NULL, times TEXT NOT NULL
) STRICT;
"""
_COLUMNS: Final = (
    "id, episode, cluster_id, suspect, peer, partition, state, began_mono_ns, began_wall_ns, began_boot,"
    " changed_mono_ns, changed_wall_ns, changed_boot, job, outcome, note, times"
)


CANCELLED_WERE_TRIES: Final = (
    "UPDATE pair_tests SET outcome = 'cancelled'"
    " WHERE outcome = 'cannot tell' AND note LIKE 'cancelled: %'"
)
"""Turns the outcomes of a journal before version 5, which had none of its own for a test that was cancelled."""


class PairTestTable:
    """The pair tests of an open journal.

    Args:
        db: Its file.
        failing: Turns what SQLite raises into StoreError; gets a word for what was done.
        transaction: A transaction that writes.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        failing: Callable[[str], AbstractContextManager[None]],
        transaction: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._db = db
        self._failing = failing
        self._transaction = transaction

    def put(self, record: PairTestRecord) -> None:
        """Write a test as it is now; it is on the disk when this returns.

        Raises:
            StoreError: It cannot be written.
        """
        began, changed = record.began, record.changed
        row = (
            record.test_id, record.episode, record.cluster_id, record.suspect, record.peer, record.partition,
            record.state.value, began.mono_ns, began.wall_ns, began.boot,
            changed.mono_ns, changed.wall_ns, changed.boot, record.job,
            None if record.outcome is None else record.outcome.value, record.note,
            json.dumps({node: list(times) for node, times in record.times.items()}),
        )  # fmt: skip
        with self._failing("write"), self._transaction():
            places = ", ".join("?" * len(row))
            updates = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS.split(", ")[1:])
            insert = f"INSERT INTO pair_tests ({_COLUMNS}) VALUES ({places})"  # noqa: S608 - our own
            self._db.execute(f"{insert} ON CONFLICT (id) DO UPDATE SET {updates}", row)

    def read(self) -> tuple[PairTestRecord, ...]:
        """All of them, oldest first; none in a journal that is older than pair tests.

        Raises:
            StoreError: They cannot be read.
        """
        with self._failing("read"):
            if self._db.execute(
                "SELECT count(*) FROM sqlite_master WHERE name = 'pair_tests'"
            ).fetchone() == (0,):
                return ()
            rows = self._db.execute(f"SELECT {_COLUMNS} FROM pair_tests ORDER BY rowid").fetchall()  # noqa: S608 - our own columns
        return tuple(map(_read_test, rows))


def _read_test(row: tuple[Any, ...]) -> PairTestRecord:
    test_id, episode, cluster_id, suspect, peer, partition, state, *rest = row
    job, outcome, note, times = rest[6:]
    return PairTestRecord(
        test_id=test_id,
        episode=episode,
        cluster_id=cluster_id,
        suspect=suspect,
        peer=peer,
        partition=partition,
        state=PairTestState(state),
        began=Moment(*rest[:3]),
        changed=Moment(*rest[3:6]),
        job=job,
        outcome=None if outcome is None else PairOutcome(outcome),
        note=note,
        times=json.loads(times),
    )
