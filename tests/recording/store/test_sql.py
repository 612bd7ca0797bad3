"""A recording answers any SELECT and nothing else, whatever is tried."""

import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from ingero.errors import BadDataError, StoreError
from ingero.model.events import Source
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.store import sql_program
from ingero.recording.store.sql import MAX_BYTES, SqlLimits, run_sql
from ingero.recording.store.writer import RecordingWriter
from ingero.testing.waiting import wait_until

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
ONE_STEP = "WITH z(h, k) AS (SELECT hex(zeroblob(300000)), hex(zeroblob(150000)) || '1') SELECT instr(h, k) FROM z"
"""Seconds in one function, during which SQLite looks at nothing."""
FOREVER = """
import sys
from pathlib import Path
from ingero.recording.store.sql import SqlLimits, run_sql
run_sql(Path(sys.argv[1]), sys.argv[2], SqlLimits(timeout_ns=int(sys.argv[3])))
"""


@pytest.fixture
def recording(tmp_path, data_dir):
    path = tmp_path / "r.db"
    path.write_bytes((data_dir / "agent_dbs/sample-gpu-node-01.db").read_bytes())
    return path


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
    limits = SqlLimits(timeout_ns=500_000_000)
    with pytest.raises(BadDataError, match=r"longer than 500 ms|memory"):
        run_sql(recording, endless, limits)
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


def test_a_deadline_ends_a_statement_within_one_function(recording):
    began = time.monotonic()
    with pytest.raises(BadDataError, match="longer than 100 ms"):
        run_sql(recording, ONE_STEP, SqlLimits(timeout_ns=100_000_000))
    assert time.monotonic() - began < 5


def test_a_statement_leaves_this_process_its_memory(recording):
    run_sql(recording, "SELECT count(*) FROM events")
    with closing(sqlite3.connect(":memory:")) as other:
        assert other.execute("PRAGMA hard_heap_limit").fetchone() == (0,)


def test_rows_are_read_up_to_the_limit_of_bytes_and_no_further(recording):
    many = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200) "
        "SELECT i, {} FROM n"
    )
    large = run_sql(recording, many.format("hex(zeroblob(2000000))"))
    assert (len(large.rows), large.is_truncated) == (MAX_BYTES // 4_000_003, True)
    few = SqlLimits(max_bytes=1000)
    texts = run_sql(recording, many.format("hex(zeroblob(50))"), few)
    blobs = run_sql(recording, many.format("zeroblob(50)"), few)
    assert (len(texts.rows), texts.is_truncated) == (9, True)
    assert blobs.rows == [(i, bytes(50)) for i in range(1, 10)], "a blob is shown in hex"


def test_values_of_every_type_come_back_as_they_are(recording):
    values = (
        None,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        0.1,
        -1.5,
        1e308,
        "",
        "é\U0001f600",
        b"",
        b"\x00\xff",
    )
    spelled = "NULL, 0, -1, 9223372036854775807, -9223372036854775807 - 1, 0.1, -1.5, 1e308, '', 'é\U0001f600', x'', x'00ff'"
    (row,) = run_sql(recording, f"SELECT {spelled}").rows
    assert row == values
    assert list(map(type, row)) == list(map(type, values))
    assert run_sql(recording, "SELECT 1e999, -1e999, CAST(x'61ff' AS TEXT)").rows == [
        (float("inf"), float("-inf"), "a\N{REPLACEMENT CHARACTER}")
    ]
    with pytest.raises(BadDataError, match="surrogates"):
        run_sql(recording, "SELECT '\udc80'")


def test_rows_in_the_log_of_a_writer_and_in_a_log_that_was_left_are_read(tmp_path):
    built = RecordingBuilder()
    built.call((Source.CUDA, 3), 0, 10, pid=7)
    live, left = tmp_path / "live.db", tmp_path / "left.db"
    built.write(live)
    with RecordingWriter(live, "node-0") as writer:
        writer.put_events(built.events())
        writer.flush()
        for suffix in ("", "-wal"):
            Path(f"{left}{suffix}").write_bytes(Path(f"{live}{suffix}").read_bytes())
        for path in (live, left):
            assert run_sql(path, "SELECT count(*) FROM events").rows == [(2,)]
    assert sorted(path.name for path in tmp_path.glob("left*")) == ["left.db", "left.db-wal"]


def find_statements(path):
    """Processes that run a statement over a recording."""
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if sql_program.__file__ in (line := one.info["cmdline"] or [])
        and str(path) in "".join(line)
    ]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind_when_who_asked_is_ended(recording, end):
    timeout_ns = 300_000_000_000 if end == signal.SIGINT else 3_000_000_000
    asking = subprocess.Popen(
        [sys.executable, "-c", FOREVER, recording, ENDLESS[2], str(timeout_ns)],
        env=os.environ | {"PYTHONPATH": str(Path(sql_program.__file__).parents[3])},
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a terminal would send the signal to both
    )
    with asking:
        wait_until(lambda: find_statements(recording), 30)
        asking.send_signal(end)
        asking.wait(30)
    wait_until(lambda: not find_statements(recording), 30)


def test_a_file_that_is_no_recording_is_not_asked(tmp_path):
    with pytest.raises(StoreError, match="no such file"):
        run_sql(tmp_path / "none.db", "SELECT 1")
