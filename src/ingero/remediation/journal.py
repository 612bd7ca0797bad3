"""The journal: SQLite, written and on the disk before the scheduler is asked, and again after.

Readers (``explain``, ``journal``) and people's answers (``approve``, ``undo``) use the same file while a
remediator runs.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingero.closing import Closing
from ingero.errors import IngeroError, RetryableError, StoreError
from ingero.remediation.pair_table import CANCELLED_WERE_TRIES, PAIR_TESTS, PairTestTable
from ingero.remediation.records import (
    ASKED_BACK,
    WAITING,
    ActionRecord,
    ActionState,
    FindingRecord,
    Moment,
)

_VERSION: Final = 5
_READABLE: Final = frozenset({1, 2, 3, 4, 5})
"""Version 1 has no outbox, 2 no pair tests, 3 no column that says that a person has asked for an action back, 4 no
outcome for a pair test that was cancelled."""
_OUTBOX: Final = """
CREATE TABLE outbox (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, wall_ns INTEGER NOT NULL, content TEXT NOT NULL
) STRICT;
"""
_SCHEMA: Final = """
CREATE TABLE actions (
  id TEXT PRIMARY KEY, episode TEXT NOT NULL, cluster_id TEXT NOT NULL, node_id TEXT NOT NULL, target TEXT NOT NULL,
  kind TEXT NOT NULL, state TEXT NOT NULL,
  began_mono_ns INTEGER NOT NULL, began_wall_ns INTEGER NOT NULL, began_boot TEXT NOT NULL,
  changed_mono_ns INTEGER NOT NULL, changed_wall_ns INTEGER NOT NULL, changed_boot TEXT NOT NULL,
  took_effect INTEGER NOT NULL, jobs TEXT, evidence TEXT NOT NULL, clauses TEXT NOT NULL, note TEXT NOT NULL,
  asked_back INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX actions_by_state ON actions (state);
CREATE TABLE changes (
  seq INTEGER PRIMARY KEY, wall_ns INTEGER NOT NULL, action_id TEXT NOT NULL REFERENCES actions (id),
  state TEXT NOT NULL, note TEXT NOT NULL
) STRICT;
CREATE TABLE episodes (
  id TEXT PRIMARY KEY, cluster_id TEXT NOT NULL, node_id TEXT NOT NULL, opened_wall_ns INTEGER NOT NULL,
  judged_wall_ns INTEGER NOT NULL, is_open INTEGER NOT NULL, evidence TEXT NOT NULL, clauses TEXT NOT NULL,
  decision TEXT NOT NULL
) STRICT;
"""
_OLD_ACTION: Final = (
    "id, episode, cluster_id, node_id, target, kind, state, began_mono_ns, began_wall_ns, began_boot,"
    " changed_mono_ns, changed_wall_ns, changed_boot, took_effect, jobs, evidence, clauses, note"
)
_ACTION: Final = f"{_OLD_ACTION}, asked_back"
_WAS_ASKED_BACK: Final = (
    "EXISTS (SELECT 1 FROM changes WHERE action_id = actions.id AND state = 'undoing'"  # noqa: S608 - our own text
    f" AND note = '{ASKED_BACK}')"
)
"""The same of a journal before version 4, which says it in a remark only."""
_ADD: Final = f"INSERT INTO actions ({_ACTION}) VALUES ({', '.join('?' * 19)})"  # noqa: S608 - our own columns
_CHANGE: Final = (
    f"UPDATE actions SET ({_ACTION}) = ({', '.join('?' * 18)}, max(asked_back, ?))"  # noqa: S608
    " WHERE id = ? AND state = ?"
)
"""What a person asks for meanwhile stays asked for."""
_BUSY_MS: Final = 10_000


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One entry that waits to be sent.

    Attributes:
        seq: Its number; never used twice.
        wall_ns: When it was written.
        content: An action or a finding as JSON, as it was then.
    """

    seq: int
    wall_ns: int
    content: dict[str, Any]


class Journal(Closing):
    """One open journal.

    Args:
        path: The file, made when missing; None keeps everything in memory.
        read_only: Change nothing; the file must be there.
        is_audited: Keep each entry until it was sent, too.

    Attributes:
        pair_tests: Its pair tests.

    Raises:
        StoreError: It cannot be opened, or is no journal of this version.
    """

    def __init__(
        self, path: Path | None, *, read_only: bool = False, is_audited: bool = False
    ) -> None:
        self._path = path
        self._is_audited = is_audited
        name = ":memory:" if path is None else f"{path.absolute().as_uri()}{'?mode=ro' * read_only}"
        if read_only and path is not None and not path.exists():
            raise StoreError(f"there is no journal {path}", hint="has the remediator run yet?")
        with self._failing("open"):
            self._db = sqlite3.connect(name, uri=path is not None, isolation_level=None)
            self._db.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
            if not read_only:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.execute("PRAGMA foreign_keys = ON")
            self._prepare(read_only=read_only)
        self.pair_tests = PairTestTable(self._db, self._failing, self._transaction)

    def _prepare(self, *, read_only: bool) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == 0 and not read_only:
            if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise StoreError(f"{self._path} is a database of something else")
            self._db.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} {_OUTBOX} {PAIR_TESTS} PRAGMA user_version = {_VERSION}; COMMIT;"
            )
        elif version in _READABLE and version < _VERSION and not read_only:
            with self._transaction():  # another process may have done it meanwhile
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                if version < 2:
                    self._db.execute(_OUTBOX)
                if version < 3:
                    self._db.execute(PAIR_TESTS)
                if version < 4:
                    column = "asked_back INTEGER NOT NULL DEFAULT 0"
                    self._db.execute(f"ALTER TABLE actions ADD COLUMN {column}")
                    self._db.execute(f"UPDATE actions SET asked_back = {_WAS_ASKED_BACK}")  # noqa: S608 - our own text
                if version < 5:
                    self._db.execute(CANCELLED_WERE_TRIES)
                self._db.execute(f"PRAGMA user_version = {_VERSION}")
        elif version not in _READABLE:
            raise StoreError(f"{self._path} is no journal of this version (it says {version})")

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"cannot {what} the journal {self._path}: {error}") from error

    @classmethod
    def copy_in_memory(cls, path: Path) -> Journal:
        """What the file says now, to be changed without changing it; empty when there is none."""
        copy = cls(None)
        if path.exists():
            with cls(path, read_only=True) as source, copy._failing("read"):
                source._db.backup(copy._db)
                copy._prepare(read_only=False)
        return copy

    @property
    def path(self) -> Path:
        """Its file.

        Raises:
            StoreError: It is in memory.
        """
        if self._path is None:
            raise StoreError("this journal is in memory")
        return self._path

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def add(self, record: ActionRecord) -> None:
        """Write a new action; it is on the disk when this returns.

        Raises:
            StoreError: It cannot be written. Nothing may be done then.
        """
        with self._failing("write"), self._transaction():
            self._db.execute(_ADD, _action_row(record))
            self._log(record)

    def change(self, before: ActionRecord, after: ActionRecord) -> None:
        """Write what has become of an action, if nobody has changed its state since it was read.

        It is on the disk when this returns.

        Raises:
            RetryableError: Somebody has: a person answered. Nothing is written.
            StoreError: It cannot be written.
        """
        with self._failing("write"), self._transaction():
            key = (before.action_id, before.state.value)
            if self._db.execute(_CHANGE, (*_action_row(after), *key)).rowcount == 1:
                self._log(after)
                return
        raise RetryableError(f"{before.action_id} has changed meanwhile", hint="look at it again")

    def _log(self, record: ActionRecord) -> None:
        self._db.execute(
            "INSERT INTO changes (wall_ns, action_id, state, note) VALUES (?, ?, ?, ?)",
            (record.changed.wall_ns, record.action_id, record.state.value, record.note),
        )
        self._keep(record.changed.wall_ns, record.as_json())

    def _keep(self, wall_ns: int, content: dict[str, Any]) -> None:
        """Have an entry wait, in the transaction that writes what it tells of."""
        if self._is_audited:
            row = (wall_ns, json.dumps(content))
            self._db.execute("INSERT INTO outbox (wall_ns, content) VALUES (?, ?)", row)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def actions(self) -> tuple[ActionRecord, ...]:
        """All actions, oldest first."""
        with self._failing("read"):
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            columns = _ACTION if version >= 4 else f"{_OLD_ACTION}, {_WAS_ASKED_BACK}"
            rows = self._db.execute(f"SELECT {columns} FROM actions ORDER BY rowid").fetchall()  # noqa: S608 - our own columns
        return tuple(map(_read_action, rows))

    def get_action(self, action_id: str) -> ActionRecord:
        """One action.

        Raises:
            IngeroError: There is none of this id.
        """
        found = [one for one in self.actions() if one.action_id == action_id]
        if not found:
            waiting = [one.action_id for one in self.actions() if one.state in WAITING]
            hint = f"waiting for an answer: {', '.join(waiting)}" if waiting else "none waits"
            raise IngeroError(f"the journal has no action {action_id!r}", hint=hint)
        return found[0]

    def changes(self, action_id: str) -> list[dict[str, Any]]:
        """What became of one action, oldest first."""
        with self._failing("read"):
            rows = self._db.execute(
                "SELECT wall_ns, state, note FROM changes WHERE action_id = ? ORDER BY seq",
                (action_id,),
            ).fetchall()
        return [{"unix_ns": wall_ns, "state": state, "note": note} for wall_ns, state, note in rows]

    def put_finding(self, record: FindingRecord) -> None:
        """Keep what the policy made of a finding last.

        Raises:
            StoreError: It cannot be written.
        """
        row = (
            record.episode, record.cluster_id, record.node_id, record.opened_wall_ns, record.judged_wall_ns,
            record.is_open, json.dumps(record.evidence), json.dumps(record.clauses), record.decision,
        )  # fmt: skip
        with self._failing("write"), self._transaction():
            self._db.execute("REPLACE INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._keep(record.judged_wall_ns, record.as_json())

    def note_judged(self, episodes: Iterable[str], wall_ns: int) -> None:
        """Keep when the policy looked at findings last, of which nothing else has changed.

        Raises:
            StoreError: It cannot be written.
        """
        rows = [(wall_ns, episode) for episode in episodes]
        with self._failing("write"), self._transaction():
            self._db.executemany("UPDATE episodes SET judged_wall_ns = ? WHERE id = ?", rows)

    def waiting_entries(self, limit: int) -> tuple[JournalEntry, ...]:
        """Entries that were not sent, oldest first.

        Raises:
            StoreError: They cannot be read.
        """
        with self._failing("read"):
            rows = self._db.execute(
                "SELECT seq, wall_ns, content FROM outbox ORDER BY seq LIMIT ?", (limit,)
            ).fetchall()
        return tuple(JournalEntry(seq, at_ns, json.loads(text)) for seq, at_ns, text in rows)

    def count_waiting(self) -> int:
        """How many there are; none in a journal that was never audited."""
        with self._failing("read"):
            if self._db.execute("PRAGMA user_version").fetchone() == (1,):
                return 0
            (count,) = self._db.execute("SELECT count(*) FROM outbox").fetchone()
        return int(count)

    def forget_entries(self, seq: int) -> None:
        """Let go of the entries up to this number: they were sent.

        Raises:
            StoreError: The journal cannot be written; they will be sent again.
        """
        with self._failing("write"), self._transaction():
            self._db.execute("DELETE FROM outbox WHERE seq <= ?", (seq,))

    def findings(self) -> tuple[FindingRecord, ...]:
        """All findings, oldest first."""
        with self._failing("read"):
            rows = self._db.execute("SELECT * FROM episodes ORDER BY opened_wall_ns, id").fetchall()
        return tuple(_read_finding(row) for row in rows)


def _action_row(record: ActionRecord) -> tuple[object, ...]:
    began, changed = record.began, record.changed
    return (
        record.action_id, record.episode, record.cluster_id, record.node_id, record.target, record.kind,
        record.state.value, began.mono_ns, began.wall_ns, began.boot, changed.mono_ns, changed.wall_ns, changed.boot,
        record.took_effect, None if record.jobs is None else json.dumps(dict(record.jobs)),
        json.dumps(dict(record.evidence)), json.dumps([dict(one) for one in record.clauses]), record.note,
        record.is_asked_back,
    )  # fmt: skip


def _read_action(row: tuple[Any, ...]) -> ActionRecord:
    (action_id, episode, cluster_id, node_id, target, kind, state, *moments) = row[:13]
    took_effect, jobs, evidence, clauses, note, is_asked_back = row[13:]
    return ActionRecord(
        action_id=action_id,
        episode=episode,
        cluster_id=cluster_id,
        node_id=node_id,
        target=target,
        kind=kind,
        state=ActionState(state),
        began=Moment(*moments[:3]),
        changed=Moment(*moments[3:]),
        took_effect=bool(took_effect),
        jobs=None if jobs is None else json.loads(jobs),
        evidence=json.loads(evidence),
        clauses=tuple(json.loads(clauses)),
        note=note,
        is_asked_back=bool(is_asked_back),
    )


def _read_finding(row: tuple[Any, ...]) -> FindingRecord:
    episode, cluster_id, node_id, opened_wall_ns, judged_wall_ns, *rest = row
    is_open, evidence, clauses, decision = rest
    return FindingRecord(
        episode,
        cluster_id,
        node_id,
        opened_wall_ns,
        judged_wall_ns,
        bool(is_open),
        json.loads(evidence),
        tuple(json.loads(clauses)),
        decision,
    )
