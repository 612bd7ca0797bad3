"""Whatever a damaged recording holds, each way of asking it gives an answer or one of our errors, never a fault of ours."""

import os
import random
import shutil
import sqlite3
from contextlib import closing, suppress

import msgspec
import pytest

from ingero.cli.main import cli, run_program
from ingero.errors import IngeroError, StoreError
from ingero.recording.queries.api import ANSWERS, Asked
from ingero.recording.queries.catalog import QUERIES
from ingero.recording.queries.recording_file import RecordingFile
from ingero.recording.queries.window import Wanted
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.scenarios.loop import Loop
from ingero.recording.store.annotations import read_annotations
from ingero.recording.store.reader import load_recording

N_DAMAGED = 20 if os.environ.get("INGERO_PROPERTIES") == "any" else 8
"""Of each recording; each is asked in some twenty-five ways. `make fuzz` damages 20 of each."""
OLD = ("sample-gpu-node-01.db", "sample-cluster.db", "pytorch-dataloader-starvation.db")
VALUES = (
    "NULL", "-1", "9223372036854775807", "-9223372036854775808", "1099511627776", "2.5", "1e300", "''", "'x'",
    "x'ff00fe'", "CAST(x'c3285cff' AS TEXT)", "zeroblob(9)",
)  # fmt: skip

ARGUMENTS = {
    "run_sql": {"query": "SELECT * FROM events LIMIT 5"},
    "graph_lifecycle": {"pid": 7},
    "graph_frequency": {"pid": 7},
}


def commands(path, folder):
    db = ("--db", str(path))
    yield from (
        ("explain", *db),
        ("explain", *db, "--json", "--since", "5s"),
        ("explain", *db, "--per-process"),
        ("explain", *db, "--chains"),
        ("query", *db, "--limit", "20"),
        ("query", *db, "SELECT * FROM events LIMIT 50", "--json"),
        ("query", *db, "SELECT * FROM process_names"),
        ("export", "--format", "perfetto", *db, "-o", str(folder / "out.json"), "--force"),
        ("merge", str(path), "--force-node", "x", "-o", str(folder / "out.db"), "--force"),
        ("migrate", "--db-path", str(path), "--dry-run"),
    )


def ask_all(path, folder):
    """Ask in every way; returns the statuses of the commands."""
    statuses = [run_program(cli, args) for args in commands(path, folder)]
    context = RecordingFile(path)
    for find in ANSWERS.values():
        with suppress(IngeroError):
            msgspec.json.encode(find(Asked(context, Wanted(), {})))
    for query in QUERIES:
        if query.name in {"query_fleet", "pagerduty_trigger", "run_demo"}:
            continue
        arguments = ARGUMENTS.get(query.name, {})
        with suppress(IngeroError):
            msgspec.json.encode(query.run(context, msgspec.convert(arguments, query.args)))
    return statuses


def flip_bytes(path, chance):
    content = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 40)):
        at = chance.randrange(100, len(content))
        n_bytes = min(chance.randint(1, 64), len(content) - at)
        content[at : at + n_bytes] = chance.randbytes(n_bytes)
    path.write_bytes(content)


def cut_pages(path, chance):
    content = path.read_bytes()
    n_pages = len(content) // 4096
    kept = bytearray(content)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(1, n_pages) * 4096
        kept[at : at + 4096] = bytes(4096) if chance.random() < 0.5 else chance.randbytes(4096)
    path.write_bytes(kept)


def change_values(path, chance):
    with closing(sqlite3.connect(path)) as connection:
        tables = [
            row[0]
            for row in connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            )
        ]
        for _ in range(chance.randint(1, 12)):
            table = chance.choice(["events", *tables])
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            some = chance.choice(["", f" WHERE rowid % {chance.randint(2, 40)} = 0"])
            with suppress(sqlite3.Error):
                connection.execute(
                    f"UPDATE OR IGNORE {table} SET {chance.choice(columns)} = {chance.choice(VALUES)}{some}"
                )
        connection.commit()


@pytest.fixture(scope="module")
def recordings(tmp_path_factory, data_dir_of_module):
    folder = tmp_path_factory.mktemp("whole")
    built = RecordingBuilder("n1")
    Loop(built, 7, "train").steps(12)
    built.rank(7, 0, 2)
    built.snapshot(0, cpu_pct=20.0)
    built.write(folder / "own.db")
    for name in OLD:
        shutil.copy(data_dir_of_module / "agent_dbs" / name, folder / name)
    return [folder / "own.db", *(folder / name for name in OLD)]


def without_constraints(path, table, rows):
    """A recording whose schema lost what it says of one table, with these rows in it."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"CREATE TABLE loose AS SELECT * FROM {table}")
        connection.execute(f"DROP TABLE {table}")
        connection.execute(f"ALTER TABLE loose RENAME TO {table}")
        for row in rows:
            names, marks = ", ".join(row), ", ".join("?" * len(row))
            connection.execute(
                f"INSERT INTO {table} ({names}) VALUES ({marks})", list(row.values())
            )
        connection.commit()


ROWS = {
    "unwritten": {"bucket": 0, "node": "n1", "source": 1, "op": 1, "cause": "disk full", "count": 3},
    "unprobed": {"pid": 7, "path": "libx.so", "reason": "no symbols", "since": 1, "until": 0, "node": "n1"},
    "system_snapshots": {
        "timestamp": 1 << 60, "cpu_pct": 1.0, "mem_pct": 1.0, "mem_avail": 1, "swap_mb": 0, "load_avg": 1.0, "node": "n1",
    },
    "annotations": {
        "timestamp": 1 << 60, "labels": '{"a": "b"}', "pid": 7, "span_start": 0, "span_end": 0, "node": "n1",
    },
    "recordings": {"id": "abc", "node": "n1", "events": 5, "calls": 5},
    "sessions": {
        "started_at": 1 << 60, "stopped_at": 0, "gpu_model": "", "cpu_cores": 1, "mem_total": 1, "kernel": "",
        "ingero_ver": "", "flags": "", "node": "n1",
    },
}  # fmt: skip
NULLS = [f"{table}.{column}" for table, row in ROWS.items() for column in row]


@pytest.mark.parametrize("where", NULLS)
def test_null_where_the_schema_excludes_it_is_no_fault_of_ours(recordings, where, tmp_path, capsys):
    table, _, column = where.partition(".")
    path = tmp_path / "r.db"
    shutil.copy(recordings[0], path)
    without_constraints(path, table, [ROWS[table], ROWS[table] | {column: None}])
    assert set(ask_all(path, tmp_path)) <= {0, 1, 2, 4}
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "column"),
    [("unwritten", "count"), ("unwritten", "cause"), ("unprobed", "pid"), ("sessions", "kernel")],
)
def test_a_row_with_null_where_the_schema_excludes_it_is_left_out_and_counted(
    recordings, table, column, tmp_path
):
    path = tmp_path / "r.db"
    shutil.copy(recordings[0], path)
    without_constraints(path, table, [ROWS[table]])
    whole = load_recording(path)
    without_constraints(path, table, [ROWS[table] | {column: None}])
    damaged = load_recording(path)
    assert getattr(damaged, table) == getattr(whole, table)
    assert getattr(whole, table)
    assert (whole.n_damaged, damaged.n_damaged) == (0, 1)


def test_an_annotation_of_no_node_is_left_out(recordings, tmp_path):
    path = tmp_path / "r.db"
    shutil.copy(recordings[0], path)
    rows = [ROWS["annotations"], ROWS["annotations"] | {"node": None}]
    without_constraints(path, "annotations", rows)
    assert [one.node for one in read_annotations(path)] == ["n1"]


@pytest.mark.parametrize("name", ["STARTED_AT", "begun_at"])
def test_sessions_that_do_not_say_when_they_started_are_an_error(recordings, name, tmp_path):
    path = tmp_path / "r.db"
    shutil.copy(recordings[0], path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE sessions RENAME COLUMN started_at TO other")
        connection.execute(f"ALTER TABLE sessions RENAME COLUMN other TO {name}")
    with pytest.raises(StoreError, match=r"r\.db: sessions has no column started_at"):
        load_recording(path)


def test_chains_without_a_number_are_not_merged_and_named(recordings, tmp_path, capsys):
    path = tmp_path / "r.db"
    shutil.copy(recordings[0], path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE causal_chains")
        connection.execute("CREATE TABLE causal_chains (detected_at, severity)")
        connection.execute("INSERT INTO causal_chains VALUES (5, 'high')")
    assert run_program(cli, ("merge", str(path), "-o", str(tmp_path / "out.db"))) == 0
    said = capsys.readouterr()
    assert "1 rows of causal_chains are of another version" in said.out + said.err


@pytest.fixture(scope="module")
def data_dir_of_module(request):
    return request.config.rootpath / "tests/data"


@pytest.mark.hypothesis
@pytest.mark.parametrize("damage", [flip_bytes, cut_pages, change_values])
@pytest.mark.parametrize("which", range(4))
def test_no_damage_is_a_fault_of_ours(recordings, damage, which, tmp_path, capsys):
    whole = recordings[which]
    n_damaged = N_DAMAGED if whole.stat().st_size < 300_000 else N_DAMAGED // 4
    for seed in range(n_damaged):
        path = tmp_path / "r.db"
        shutil.copy(whole, path)
        path.chmod(0o600)
        damage(path, random.Random(seed))
        statuses = ask_all(path, tmp_path)
        told = capsys.readouterr()
        assert set(statuses) <= {0, 1, 2, 4}, f"seed {seed}"
        assert "Traceback" not in told.err
        n_errors = sum(status != 0 for status in statuses)
        assert told.err.count("error: ") + told.err.count("Error: ") >= n_errors, f"seed {seed}"
