"""An older recording becomes one that the writer appends to: every row stays, all of it or nothing is done."""

import hashlib
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from click.testing import CliRunner

from ingero.cli.main import cli
from ingero.errors import StoreError
from ingero.model.events import EVENT, Source
from ingero.recording.causal.engine import explain
from ingero.recording.export.merge import merge_recordings
from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.migration import migrate, plan_migration
from ingero.recording.store.reader import load_recording
from ingero.recording.store.schema import TABLES
from ingero.recording.store.writer import RecordingWriter

OLD = (
    "pytorch-dataloader-starvation.db",
    "sample-cluster.db",
    "sample-gpu-node-01.db",
    "sample-gpu-node-02.db",
)


@pytest.fixture(params=OLD)
def old(request, tmp_path, data_dir):
    path = tmp_path / "old.db"
    shutil.copy(data_dir / "agent_dbs" / request.param, path)
    path.chmod(0o600)
    return path


def rows_of(path):
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as connection:
        names = [
            row[0]
            for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        return {
            name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
            for name in names
            if not name.startswith("sqlite_")
        }


def digest(path):
    return hashlib.sha256(path.read_bytes()).digest()


def test_no_row_is_lost_and_the_answers_stay_the_same(old):
    extras = LoadFilter(has_extras=True)
    before, n_before = load_recording(old, extras), rows_of(old)
    migrate(old)
    after, n_after = load_recording(old, extras), rows_of(old)
    for name, n_rows in n_before.items():
        if name not in {
            "sources",
            "ops",
            "schema_info",
        }:  # what the names of codes are, as of this version
            assert n_after[name] == n_rows, name
    assert set(TABLES) <= set(n_after)
    assert not [name for name in n_after if name.startswith("old_")]
    assert after.events.tolist() == before.events.tolist()
    assert after.aggregates.tolist() == before.aggregates.tolist()
    assert after.process_names == before.process_names
    assert len(after.sessions) == len(before.sessions)
    assert [i.rule for i in explain(after).incidents] == [i.rule for i in explain(before).incidents]


def test_the_writer_goes_on_in_it_without_meeting_an_old_number(old):
    n_before = len(load_recording(old).events)
    with pytest.raises(StoreError, match="another version") as caught:
        RecordingWriter(old, "gpu-node-01")
    assert "ingero migrate" in caught.value.hint
    migrate(old)
    events = np.zeros(5000, EVENT)
    events["start_ns"] = 1_900_000_000 * 10**9 + np.arange(5000)
    events["pid"], events["source"], events["op"], events["weight"] = 41, Source.CUDA, 3, 1
    with RecordingWriter(old, "gpu-node-01") as writer:
        writer.put_events(events)
    assert writer.counters.events_lost == 0
    assert len(load_recording(old).events) == n_before + 5000


def test_dry_run_says_what_it_would_do_and_does_nothing(old):
    before = digest(old)
    result = CliRunner().invoke(cli, ["migrate", "--db-path", str(old), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "to apply; nothing was changed" in result.output
    assert "events: " in result.output
    assert digest(old) == before
    assert [path.name for path in old.parent.iterdir()] == ["old.db"]


def test_a_second_time_there_is_nothing_to_do(old):
    assert migrate(old).is_needed
    before = digest(old)
    assert not migrate(old).is_needed
    assert digest(old) == before


def test_a_migrated_file_is_the_recording_that_it_was(old, tmp_path):
    shutil.copy(old, tmp_path / "copy.db")
    migrate(old)
    n_events = len(load_recording(old).events)
    merged = merge_recordings([old, tmp_path / "copy.db"], tmp_path / "m.db", force_node="x")
    assert merged.n_events == n_events


def test_what_the_new_tables_have_no_place_for_stays(old):
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("ALTER TABLE events ADD COLUMN theirs TEXT DEFAULT 'kept'")
    n_rows = len(load_recording(old).events)
    plan = migrate(old)
    assert {change.table: change.kept_as for change in plan.changes}["events"] == "old_events"
    with closing(sqlite3.connect(old)) as connection:
        told = connection.execute("SELECT theirs, count(*) FROM old_events GROUP BY 1").fetchall()
    assert told == [("kept", n_rows)]


def test_a_file_that_cannot_be_brought_over_whole_stays_as_it_is(tmp_path):
    path = tmp_path / "r.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE events (timestamp, pid, tid, source, op, duration)")
        connection.execute("INSERT INTO events VALUES (1, 1, 1, 1, 1, 1)")
        connection.execute("CREATE TABLE process_names (pid INTEGER, name TEXT)")
        connection.executemany("INSERT INTO process_names VALUES (7, ?)", [("a",), ("b",)])
    before = digest(path)
    with pytest.raises(StoreError):
        migrate(path)
    assert rows_of(path) == {"events": 1, "process_names": 2}
    assert digest(path) == before


def test_a_recording_of_this_version_that_lacks_a_table_gets_it(tmp_path):
    path = tmp_path / "r.db"
    RecordingWriter(path, "n").close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE unwritten")
    assert plan_migration(path).missing == ("unwritten",)
    migrate(path)
    assert "unwritten" in rows_of(path)


def test_a_file_that_is_recorded_into_is_left_alone(old):
    migrate(old)
    with RecordingWriter(old, "n"), closing(sqlite3.connect(old)) as connection:
        connection.execute("DROP TABLE unwritten")
        connection.commit()
        with pytest.raises(StoreError, match="records into it"):
            migrate(old)
