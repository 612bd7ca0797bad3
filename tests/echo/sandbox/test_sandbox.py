"""A tenant's SQL: what is let in works, what is not leaves nothing behind."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import duckdb
import msgspec
import pytest
from tests.echo.sandbox.tables import export, run

from ingero.echo.db.cancellation import Cancellation
from ingero.echo.db.errors import DeadlineError
from ingero.echo.db.sandbox.guard import FUNCTIONS
from ingero.echo.db.sandbox.messages import Data, GuardReply, Result, SandboxJob, receive, send
from ingero.echo.db.sandbox.runner import Sandbox, SandboxSettings, SqlRefusedError
from ingero.echo.schema.tables import TENANT_TABLES
from ingero.telemetry.clock import SystemClock
from ingero.units import NS_PER_S

LEGITIMATE = [
    (
        "SELECT node_id, value_double FROM events ORDER BY node_id",
        [["n1", 1.0], ["n2", 2.0], ["n3", None]],
    ),
    ("SELECT count(*), max(ts) FROM events", [[3, "2026-01-01T00:00:00Z"]]),
    ("WITH a AS (SELECT * FROM events) SELECT count(*) FROM a JOIN events USING (node_id)", [[3]]),
    (
        "SELECT node_id FROM events WHERE value_double > (SELECT avg(value_double) FROM events)",
        [["n2"]],
    ),
    (
        "SELECT time_bucket(INTERVAL '1 hour', ts) AS b, count(*) FROM events GROUP BY ALL",
        [["2026-01-01T00:00:00Z", 3]],
    ),
    ("SELECT attributes ->> '$.k' FROM events LIMIT 1", [["v"]]),
    (
        """SELECT node_id, row_number() OVER (ORDER BY value_double DESC NULLS LAST) FROM events
        QUALIFY row_number() OVER (ORDER BY value_double DESC NULLS LAST) = 1""",
        [["n2", 1]],
    ),
    (
        """SELECT CASE WHEN value_double IS NULL THEN 'none' ELSE 'some' END AS c, count(*) FROM events
        GROUP BY c ORDER BY c""",
        [["none", 1], ["some", 2]],
    ),
    ("SELECT i FROM range(3) t(i) UNION ALL SELECT 9 ORDER BY 1", [[0], [1], [2], [9]]),
    ("SELECT quantile_cont(value_double, 0.5)::INTEGER FROM events", [[2]]),
    (
        "SELECT DISTINCT cluster_id FROM events WHERE node_id LIKE 'n%' AND node_id IN ('n1', 'n2')",
        [["c1"]],
    ),
    (
        "SELECT list_transform([1, 2], lambda x: x + 1), {'a': 1}, 'inf'::DOUBLE",
        [[[2, 3], {"a": 1}, None]],
    ),
    (
        "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r WHERE i < 4) SELECT max(i) FROM r",
        [[4]],
    ),
    (
        "SELECT e.* EXCLUDE (ts, ingested_at, attributes, stream, host_attr, kind, unit) FROM events e WHERE node_id = 'n1'",
        [["c1", "n1", "m", 1.0]],
    ),
    ("SELECT count(*) FROM verdicts", [[0]]),
    ("VALUES (1), (2)", [[1], [2]]),
    ("SELECT mad(value_double), arg_max(node_id, value_double) FROM events", [[0.5, "n2"]]),
    ("SELECT count(*) FROM events\u200b", [[3]]),  # a space to DuckDB: still the caller's own table
    (
        "SELECT year(now()) > 2025, now() > TIMESTAMPTZ '2026-01-01 00:00:00+00' -- end",
        [[True, True]],
    ),
    (
        (
            "SELECT TIMESTAMPTZ '2026-01-01 02:00:00+02' AS a, 1 AS a, [TIMESTAMPTZ '2026-01-01 00:00:00+00', NULL], "
            "{'TIMESTAMP WITH TIME ZONE': to_timestamp(0)}, map([1], [to_timestamp(1)]);"
        ),
        [
            [
                "2026-01-01T00:00:00Z",
                1,
                ["2026-01-01T00:00:00Z", None],
                {"TIMESTAMP WITH TIME ZONE": "1970-01-01T00:00:00Z"},
                {"1": "1970-01-01T00:00:01Z"},
            ]
        ],
    ),
    (
        (
            "WITH with_zones AS (SELECT node_id, ts AT TIME ZONE 'UTC' AS t FROM events) "
            "SELECT t, node_id FROM with_zones ORDER BY node_id DESC LIMIT 2"
        ),
        [["2026-01-01T00:00:00Z", "n3"], ["2026-01-01T00:00:00Z", "n2"]],
    ),
    (
        "VALUES (to_timestamp(0)), (to_timestamp(1))",
        [["1970-01-01T00:00:00Z"], ["1970-01-01T00:00:01Z"]],
    ),
    ("-- a comment\nSELECT 1 /* another */", [[1]]),
]


@pytest.mark.parametrize(("sql", "rows"), LEGITIMATE)
def test_ordinary_analysis_is_let_in_and_right(sandbox, sql, rows):
    assert run(sandbox, sql)[1] == rows


REFUSED = [
    # writes, in every disguise
    "DELETE FROM events",
    "INSERT INTO events SELECT * FROM events",
    "UPDATE events SET node_id = 'x'",
    "DROP TABLE events",
    "CREATE TABLE t AS SELECT 1",
    "CREATE MACRO m() AS 1",
    "ALTER TABLE events ADD COLUMN x INT",
    "TRUNCATE events",
    "WITH x AS (DELETE FROM events RETURNING *) SELECT * FROM x",
    "WITH x AS (INSERT INTO events SELECT * FROM events RETURNING *) SELECT * FROM x",
    "WITH x AS (UPDATE events SET node_id = 'x' RETURNING *) SELECT * FROM x",
    "EXPLAIN ANALYZE DELETE FROM events",
    "MERGE INTO events USING events e ON true WHEN MATCHED THEN DELETE",
    # several statements
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP TABLE events",
    "SELECT 1;;DELETE FROM events",
    # files and the network
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_text('/etc/shadow')",
    "SELECT * FROM read_blob('/var/lib/ingero-echo/echo.db')",
    "SELECT * FROM read_blob('/proc/self/environ')",
    "SELECT * FROM read_parquet('https://example.invalid/x.parquet')",
    "SELECT * FROM read_json_auto('s3://bucket/x')",
    "SELECT * FROM glob('/*')",
    "SELECT * FROM parquet_metadata('/tmp/x')",
    "SELECT * FROM sniff_csv('/etc/passwd')",
    "COPY events TO '/tmp/out.csv'",
    "COPY (SELECT 1) TO '/dev/stdout'",
    "EXPORT DATABASE '/tmp/x'",
    "IMPORT DATABASE '/tmp/x'",
    "SELECT * FROM 'https://example.invalid/x.csv'",
    # other databases, extensions, settings
    "ATTACH '/var/lib/ingero-echo/echo.db' AS other",
    "ATTACH ':memory:' AS m",
    "DETACH memory",
    "USE other",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET memory_limit = '64GB'",
    "SET GLOBAL enable_external_access = true",
    "RESET lock_configuration",
    "PRAGMA database_list",
    "PRAGMA memory_limit='64GB'",
    "CALL pragma_version()",
    "SELECT current_setting('memory_limit')",
    "SELECT getenv('HOME')",
    "SELECT getvariable('x')",
    "SET VARIABLE x = 1",
    # the catalogue
    "SELECT * FROM duckdb_tables()",
    "SELECT * FROM duckdb_settings()",
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM duckdb_logs",
    "SELECT * FROM information_schema.tables",
    "SELECT * FROM pg_catalog.pg_class",
    "SELECT * FROM sqlite_master",
    "SELECT * FROM pragma_storage_info('events')",
    "SELECT * FROM memory.main.events",
    "SELECT * FROM main.events",
    "SELECT main.count(*) FROM events",
    "SELECT system.main.getenv('x')",
    "SELECT current_query()",
    "SELECT current_database(), current_schema()",
    "SELECT version()",
    "SELECT txid_current()",
    "WITH duckdb_tables AS (SELECT 1) SELECT * FROM duckdb_tables",
    "WITH events AS (SELECT 1) SELECT * FROM events",
    "DESCRIBE events",
    "SHOW TABLES",
    "SUMMARIZE events",
    "SHOW ALL TABLES",
    # SQL out of text
    "SELECT * FROM query('SELECT 1')",
    "SELECT * FROM query_table('events')",
    "SELECT * FROM json_execute_serialized_sql('{}')",
    "SELECT json_serialize_sql('SELECT 1')",
    "EXECUTE p",
    "PREPARE p AS SELECT 1",
    # bombs with names
    "SELECT repeat('x', 2000000000)",
    "SELECT lpad('x', 2000000000, 'y')",
    "SELECT format('{:>2000000000}', 'x')",
    "SELECT printf('%2000000000d', 1)",
    "SELECT levenshtein(a, a) FROM (SELECT node_id AS a FROM events)",
    "SELECT sleep_ms(60000)",
    "SELECT nextval('s')",
    # letters that look alike, quotes, comments, nulls
    'SELECT * FROM "main"."events"',
    'SELECT * FROM "/etc/passwd"',
    "SELECT * FROM ｅvents",
    "ѕelect 1",
    "SELECT 1 \x00 ; DROP TABLE events",
    "/* SELECT */ DROP TABLE events",
    "SELECT \"getenv\"('HOME')",
    "SELECT GETENV('HOME')",
    "SELECT $1",
    "SELECT ?",
    # shapes that have no place here
    "FROM events SELECT node_id AT (VERSION => 1)",
    "PIVOT events ON metric_name USING sum(value_double)",
    "SELECT * FROM events TABLESAMPLE 10% JOIN nosuch ON true",
    # samples: they want a descriptor for random numbers
    "SELECT * FROM events TABLESAMPLE 10%",
    "SELECT * FROM events TABLESAMPLE reservoir(2 ROWS) REPEATABLE (1)",
    "SELECT * FROM events USING SAMPLE 2",
    "SELECT * FROM (SELECT * FROM events) TABLESAMPLE 1 ROWS",
    "SELECT * FROM (VALUES (1)) t TABLESAMPLE 1 ROWS",
    "SELECT * FROM range(3) t(i) TABLESAMPLE 1 ROWS",
    "WITH a AS (SELECT * FROM events USING SAMPLE 1) SELECT * FROM a",
    # further parts of the tree
    "SELECT * FROM events AT (TIMESTAMP => '2026-01-01')",
    "SELECT * FROM events PIVOT (count(*) FOR node_id IN ('n1', 'n2'))",
    "SELECT * FROM events UNPIVOT (v FOR n IN (value_double))",
    "SELECT node_id::pg_catalog.int4 FROM events",
    "SELECT node_id::nosuch FROM events",
    "SELECT 'n1'::ENUM('n1', 'n2')",
    "SELECT * FROM (SHOW TABLES)",
    "SELECT * FROM (DESCRIBE events)",
    "SELECT width_bucket(1, 0, 2, 4)",
    "",
    "   ",
    "SELECT",
    "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "SELECT 1" + " + 1" * 5000,
]


@pytest.mark.parametrize("sql", REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_listed_is_refused_and_the_next_statement_is_answered(sandbox, sql):
    with pytest.raises(SqlRefusedError) as raised:
        run(sandbox, sql)
    assert raised.value.code not in {"", "sql_limit"}  # refused, not found out by dying
    assert str(Path(__file__).parents[3]) not in raised.value.message
    assert run(sandbox, "SELECT count(*) FROM events")[1] == [[3]]


def test_a_sample_is_refused_with_the_reason(sandbox):
    for sampled in ("events TABLESAMPLE 10%", "events USING SAMPLE 2"):
        with pytest.raises(SqlRefusedError, match="sampling") as raised:
            run(sandbox, f"SELECT * FROM {sampled}")
        assert raised.value.code == "sql_not_allowed"


def test_every_listed_function_exists_in_the_database_in_use():
    """What has no entry in the catalogue is syntax, and each of these is tried."""
    with duckdb.connect() as connection:
        known = {
            name.lower()
            for (name,) in connection.execute(
                "SELECT DISTINCT function_name FROM duckdb_functions()"
            ).fetchall()
        }
        for name in sorted(FUNCTIONS - known):
            connection.execute(f"SELECT {SYNTAX[name]} FROM (SELECT 1 AS a, 2 AS b)").fetchall()


SYNTAX = {
    "=": "a = b",
    "<>": "a <> b",
    "<": "a < b",
    ">": "a > b",
    "<=": "a <= b",
    ">=": "a >= b",
    "in": "a IN (b)",
    "not": "NOT (a = b)",
    "and": "a = 1 AND b = 2",
    "or": "a = 1 OR b = 2",
    "between": "a BETWEEN 0 AND b",
    "is_null": "a IS NULL",
    "!": "4!",
    "->": "list_transform([a], lambda x: x)",
    "coalesce": "coalesce(a, b)",
    "current_timestamp": "epoch(current_timestamp)",
    "extract": "extract(year FROM DATE '2026-01-01')",
    "if": "if(a = 1, 2, 3)",
    "ifnull": "ifnull(a, b)",
    "percentile_cont": "percentile_cont(0.5) WITHIN GROUP (ORDER BY a)",
    "percentile_disc": "percentile_disc(0.5) WITHIN GROUP (ORDER BY a)",
    "try": "try(a / 0)",
}

KILLED = [
    "SELECT sum(a.i * b.i % 7) FROM range(100000000) a(i), range(100000000) b(i)",
    "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT count(*) FROM r",
    "SELECT string_agg(node_id || i::VARCHAR, ',') FROM events, range(300000000) t(i)",
    "SELECT list(i) FROM range(2000000000) t(i)",
    "SELECT count(DISTINCT i || 'x') FROM range(2000000000) t(i)",
    """SELECT length(a || a || a || a)
    FROM (SELECT string_agg('xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx', '') AS a FROM range(40000000))""",
    "SELECT list_transform(range(1000000), lambda x: range(1000000))",
]


@pytest.mark.slow
@pytest.mark.parametrize("sql", KILLED, ids=range(len(KILLED)))
def test_what_eats_memory_or_time_dies_alone(sandbox, sql):
    with pytest.raises((SqlRefusedError, DeadlineError)):
        run(sandbox, sql)
    assert run(sandbox, "SELECT count(*) FROM events")[1] == [[3]]


def test_rows_and_bytes_are_cut_and_said_so(sandbox):
    columns, rows, is_cut = run(sandbox, "SELECT i FROM range(5000) t(i)", limit=100)
    assert (columns, len(rows), rows[-1], is_cut) == (["i"], 100, [99], True)
    assert run(sandbox, "SELECT i FROM range(100) t(i)", limit=100)[2] is False
    small = Sandbox(SandboxSettings(max_answer_bytes=100), TENANT_TABLES, SystemClock())
    _, rows, is_cut = run(small, "SELECT i FROM range(5000) t(i)")
    assert is_cut
    assert len(msgspec.json.encode(rows)) <= 100
    small.close()


def test_one_row_over_the_limit_is_an_error_and_not_an_empty_answer():
    small = Sandbox(SandboxSettings(max_answer_bytes=100), TENANT_TABLES, SystemClock())
    with pytest.raises(SqlRefusedError, match="one row is larger than the limit") as raised:
        run(small, "SELECT string_agg('x', '') FROM range(1000)")
    assert raised.value.code == "sql_row_too_large"
    small.close()


def test_rows_beyond_the_budget_are_refused_with_what_to_do(sandbox):
    tight = Sandbox(SandboxSettings(max_input_bytes=64), TENANT_TABLES, SystemClock())
    with pytest.raises(SqlRefusedError, match="narrow the window") as raised:
        run(tight, "SELECT * FROM events")
    assert raised.value.code == "sql_input_too_large"
    assert run(tight, "SELECT count(*) FROM range(3)")[1] == [[3]]
    tight.close()


def test_a_statement_that_nobody_waits_for_ends_and_gives_its_place_back():
    one = Sandbox(
        SandboxSettings(n_workers=1, timeout_ns=120 * NS_PER_S), TENANT_TABLES, SystemClock()
    )
    stop, begun = Cancellation(), threading.Event()

    def begin(table, columns):
        begun.set()
        return export(table, columns)

    def stop_it():
        begun.wait()
        stop.set()

    stopping = threading.Thread(target=stop_it)
    stopping.start()
    endless = (
        "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT 1 FROM r) SELECT count(*) FROM r, events"
    )
    with pytest.raises((SqlRefusedError, DeadlineError)):
        one.run(endless, begin, 10, stop)
    stopping.join()
    assert run(one, "SELECT count(*) FROM events")[1] == [[3]]
    with pytest.raises(DeadlineError, match="client has gone"):
        one.run("SELECT 1", export, 10, stop)
    one.close()


OPENERS = [
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_blob('/proc/self/environ')",
    "COPY (SELECT 1) TO '{folder}/escape.csv'",
    "ATTACH '{folder}/escape.db' AS x",
    "SELECT * FROM glob('/etc/*')",
    "INSTALL httpfs",
]


@pytest.mark.parametrize("without", ["guard", "guard and settings"])
@pytest.mark.parametrize("opener", OPENERS)
def test_each_wall_holds_alone(opener, without, tmp_path):
    """With the guard out of the way DuckDB's settings refuse; with those gone too, no descriptor is to be had."""
    code = (
        "import socket, sys\n"
        "from ingero.echo.db.sandbox import guard, worker\n"
        "worker.check_statement = lambda connection, sql, tables: guard.QueryNeeds(frozenset(), None)\n"
        + ("worker._CONFIG = {'threads': 1}\n" if without == "guard and settings" else "")
        + "worker.run_worker(socket.socket(fileno=int(sys.argv[1])))\n"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
        )
        ours.settimeout(30)
        send(ours, SandboxJob(opener.format(folder=tmp_path), [], 10, 1 << 20, 512 << 20, 10.0))
        receive(ours, GuardReply)
        send(ours, Data([]))
        result, _ = receive(ours, Result)
        process.wait()
    found_nothing = result.rows == b"[]" and "glob" in opener
    assert result.code == "sql_failed" or found_nothing
    assert not list(tmp_path.iterdir())
