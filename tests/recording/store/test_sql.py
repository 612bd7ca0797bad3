"""A recording answers any SELECT and nothing else, whatever is tried."""

import hashlib
from pathlib import Path

import pytest

from ingero.errors import BadDataError
from ingero.recording.store.sql import SqlLimits, run_sql
from ingero.testing.clock import ManualClock

ATTACKS = (
    "DELETE FROM events",
    "WITH x AS (SELECT 1) DELETE\tFROM events",
    "WITH x AS (SELECT 1) INSERT INTO sources SELECT 99, 'a', 'b'",
    "/* SELECT */ UPDATE events SET pid = 0",
    "REPLACE INTO sources VALUES (1, 'a', 'b')",
    "DROP TABLE events",
    "DROP\nTABLE\nevents",
    "ALTER TABLE events RENAME TO gone",
    "CREATE TABLE t (x)",
    "CREATE TEMP TABLE t (x)",
    "CREATE TEMP VIEW v AS SELECT 1",
    "CREATE TRIGGER t AFTER INSERT ON events BEGIN SELECT 1; END",
    "CREATE VIRTUAL TABLE t USING fts5(x)",
    "ATTACH DATABASE '{other}' AS other",
    "ATTACH\t'{other}' AS other",
    "DETACH DATABASE main",
    "VACUUM",
    "VACUUM INTO '{other}'",
    "REINDEX",
    "ANALYZE",
    "PRAGMA user_version = 99",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA query_only = 0",
    "PRAGMA writable_schema = 1",
    "SELECT * FROM pragma_user_version",
    "SELECT * FROM pragma_database_list",
    "SELECT load_extension('/tmp/x.so')",
    "SELECT writefile('{other}', 'x')",
    "SELECT readfile('/etc/passwd')",
    "SELECT fts3_tokenizer('simple')",
    "BEGIN IMMEDIATE",
    "COMMIT",
    "SAVEPOINT s",
    "SELECT 1; DELETE FROM events",
    "SELECT 1; SELECT 2",
    "",
    "   ",
    "-- nothing",
    "SELECT \x00 1",
    "EXPLAIN DELETE FROM events",
)
GREEDY = (
    "SELECT zeroblob(1000000000)",
    "SELECT randomblob(1000000000)",
    "SELECT replace(hex(zeroblob(2000000)), '0', hex(zeroblob(100000)))",
    "SELECT group_concat(hex(zeroblob(100000))) FROM events a, events b",
)
ENDLESS = (
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c ORDER BY -x",
    "SELECT count(*) FROM events a, events b, events c, events d, events e",
)


@pytest.fixture
def recording(tmp_path, data_dir):
    path = tmp_path / "r.db"
    path.write_bytes((data_dir / "agent_dbs/sample-gpu-node-01.db").read_bytes())
    return path


class HurriedClock(ManualClock):
    """Ten milliseconds pass at every look."""

    def mono_ns(self):
        self.advance(10_000_000)
        return super().mono_ns()


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_but_one_select_is_run(recording, attack):
    before, beside = digest(recording), sorted(Path(recording.parent).iterdir())
    other = recording.parent / "other.db"
    with pytest.raises(BadDataError):
        run_sql(recording, attack.replace("{other}", str(other)))
    assert digest(recording) == before
    assert sorted(Path(recording.parent).iterdir()) == beside


@pytest.mark.parametrize("greedy", GREEDY)
def test_huge_values_are_refused(recording, greedy):
    with pytest.raises(BadDataError, match=r"too big|memory"):
        run_sql(recording, greedy)


@pytest.mark.parametrize("endless", ENDLESS)
def test_endless_statement_meets_its_deadline(recording, endless):
    limits = SqlLimits(timeout_ns=1_000_000_000)
    with pytest.raises(BadDataError, match=r"longer than 1 s|memory"):
        run_sql(recording, endless, limits, HurriedClock())
    assert not [p for p in Path(recording.parent).iterdir() if p != recording]


def test_rows_beyond_the_limit_are_said_to_be_missing(recording):
    answer = run_sql(recording, "SELECT id FROM events", SqlLimits(max_rows=7))
    assert (len(answer.rows), answer.is_truncated) == (7, True)
    assert not run_sql(
        recording, "SELECT id FROM events LIMIT 7", SqlLimits(max_rows=7)
    ).is_truncated


def test_selects_of_every_shape_are_answered(recording):
    assert run_sql(
        recording, "SELECT source, count(*) FROM events GROUP BY source ORDER BY 1"
    ).rows == [(3, 99), (5, 101)]
    joined = run_sql(
        recording,
        "WITH e AS (SELECT * FROM events) SELECT o.name, count(*), count(*) FROM e JOIN ops o "
        "ON o.source_id = e.source AND o.op_id = e.op GROUP BY 1 ORDER BY 2",
    )
    assert joined.columns == ("name", "count(*)", "count(*)_2")
    assert joined.rows[-1] == ("sched_switch", 99, 99)
    assert run_sql(recording, "SELECT name FROM sqlite_master WHERE name = 'events'").rows == [
        ("events",)
    ]
    assert run_sql(recording, "EXPLAIN QUERY PLAN SELECT 1 FROM events").rows


def test_formatting_cannot_make_a_huge_text(recording):
    answer = run_sql(recording, "SELECT length(printf('%.*c', 1000000000, 'x'))")
    assert (answer.rows[0][0] or 0) <= 4 * 1024 * 1024
