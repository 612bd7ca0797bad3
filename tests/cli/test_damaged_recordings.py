"""Whatever a damaged recording holds, each way of asking it gives an answer or one of our errors, never a fault of ours."""

import random
import shutil
import sqlite3
from contextlib import closing, suppress

import msgspec
import pytest

from ingero.cli.main import cli, run_program
from ingero.errors import IngeroError
from ingero.recording.queries.api import ANSWERS, Asked
from ingero.recording.queries.catalog import QUERIES
from ingero.recording.queries.recording_file import RecordingFile
from ingero.recording.queries.window import Wanted
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.scenarios.loop import Loop

N_DAMAGED = 20
"""Of each recording; each is asked in some twenty-five ways."""
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


@pytest.fixture(scope="module")
def data_dir_of_module(request):
    return request.config.rootpath / "tests/data"


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
