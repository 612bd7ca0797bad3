"""The arrays of a loaded recording are what a plain loop over its rows gives."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest

from ingero.errors import BadDataError
from ingero.model.events import EVENT, Source
from ingero.model.recording import COVERAGE, ProcessRank, Session
from ingero.recording.scenarios.builder import START_NS
from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.reader import load_recording
from ingero.recording.store.writer import RecordingWriter

WIDE = (1 << 62) - 1
AT_END = (Source.HOST, Source.IO, Source.TCP, Source.NET)
RECORDINGS = (
    "pytorch-dataloader-starvation.db",
    "sample-cluster.db",
    "sample-gpu-node-01.db",
    "sample-gpu-node-02.db",
    "sample-gpu-node-03.db",
)
OPTIONAL = (
    "gpu_id", "arg0", "arg1", "arg2", "arg3", "ret_code", "reason", "flags", "other_pid", "wait_ns",
    "cgroup_id", "stack_hash",
)  # fmt: skip


def read_plainly(path, rest=""):
    """Events of a recording as tuples in the order of EVENT, and its nodes, one row at a time."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        rows = [dict(row) for row in connection.execute(f"SELECT * FROM events{rest}")]
    nodes = sorted({row.get("node", "") for row in rows}) or [""]
    events = []
    for row in rows:
        fields = {name: row.get(name) or 0 for name in OPTIONAL}
        fields |= {name: row[name] for name in ("pid", "tid", "source", "op")}
        fields |= {"duration_ns": row["duration"], "start_ns": row["timestamp"]}
        if row["source"] in AT_END:
            fields["start_ns"] -= row["duration"]
        fields["weight"] = row.get("weight", 1)
        fields["node"] = nodes.index(row.get("node", ""))
        events.append(tuple(fields[name] for name in EVENT.names))
    return sorted(events, key=lambda event: event[0]), tuple(nodes)


def change(path, *statements):
    """Change a recording behind the writer's back."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def written(path, **columns):
    """Three rows with these columns, the rest small."""
    events = np.zeros(3, EVENT)
    events["start_ns"] = START_NS + np.arange(3)
    events["source"], events["op"] = 1, [3, 5, 7]
    events["pid"], events["tid"], events["weight"] = 4821, [4821, 4822, 4823], 1
    for name, values in columns.items():
        events[name] = values
    with RecordingWriter(path, "n") as writer:
        writer.put_events(events)
    return events


@pytest.mark.parametrize(
    "columns",
    [
        {"duration_ns": [0, 5, (1 << 47) - 1], "arg2": [1, 2, 3], "arg3": [0, 256, 1024]},
        {"duration_ns": [0, 5, 1 << 47]},
        {"arg2": [0, 0, (1 << 31) - 1], "arg3": [(1 << 31) - 1, 0, 1]},
        {"arg2": [0, 1 << 31, 3], "arg3": [1, 2, 3]},
        {"arg2": [7, WIDE, 0], "arg3": [0, WIDE, 7]},
        {"arg2": [-1, 5, 6], "arg3": [1, 2, 3]},
        {"arg3": [0, 0, 9], "wait_ns": [0, WIDE, 0]},
        {"ret_code": [0, -5, 0]},
        {"weight": [1, 1, 100], "ret_code": [0, 2, 0]},
        {"other_pid": [0, 0, (1 << 31) - 1], "reason": [0, 1, 2], "flags": [0, 255, 1]},
    ],
    ids=lambda columns: " ".join(columns) + f" {max(map(max, columns.values()))}",
)
def test_columns_come_back_as_they_were(tmp_path, columns):
    events = written(tmp_path / "r.db", **columns)
    assert load_recording(tmp_path / "r.db").events.tolist() == events.tolist()


@pytest.mark.parametrize("name", RECORDINGS)
def test_real_recordings_load_as_a_loop_reads_them(data_dir, name):
    path = data_dir / "agent_dbs" / name
    loaded = load_recording(path, LoadFilter(has_extras=True))
    events, nodes = read_plainly(path)
    assert loaded.events.tolist() == events
    assert loaded.nodes == nodes
    pid, moment = events[0][2], events[len(events) // 2][0]
    part = LoadFilter(pids=(pid,), from_ns=moment, has_extras=True)
    rest = f" WHERE timestamp >= {moment} AND pid = {pid}"
    assert load_recording(path, part).events.tolist() == read_plainly(path, rest)[0]
    newest = load_recording(path, LoadFilter(max_rows=20, has_extras=True))
    assert newest.events.tolist() == read_plainly(path, " ORDER BY timestamp DESC LIMIT 20")[0]
    assert newest.is_truncated


def test_stacks_are_read_when_they_are_wanted(tmp_path):
    events = written(tmp_path / "r.db", stack_hash=[7, -8, 9], cgroup_id=5)
    assert not load_recording(tmp_path / "r.db").events["stack_hash"].any()
    whole = load_recording(tmp_path / "r.db", LoadFilter(has_extras=True))
    assert whole.events.tolist() == events.tolist()


def test_handles_above_half_of_the_range_keep_their_64_bits(tmp_path):
    handles = np.array([(1 << 64) - 1, 1 << 63, (1 << 63) + 12_345], np.uint64)
    written(tmp_path / "r.db", arg0=handles.view(np.int64), arg3=handles.view(np.int64))
    events = load_recording(tmp_path / "r.db").events
    assert np.ascontiguousarray(events["arg0"]).view(np.uint64).tolist() == handles.tolist()
    assert np.ascontiguousarray(events["arg3"]).view(np.uint64).tolist() == handles.tolist()


def test_recording_without_events_loads_empty(tmp_path):
    RecordingWriter(tmp_path / "r.db", "n").close()
    recording = load_recording(tmp_path / "r.db")
    assert recording.events.dtype == EVENT
    assert len(recording.events) == 0
    assert (recording.nodes, recording.ranks, recording.process_names) == (("",), {}, {})


def test_every_node_of_many_is_told_apart(tmp_path):
    written(tmp_path / "r.db")
    change(tmp_path / "r.db", *(
        f"INSERT INTO events (id, timestamp, pid, tid, source, op, duration, node) "
        f"VALUES ('x{i}', {START_NS + 10 + i}, 1, 1, 1, 3, 5, 'node-{i * 7 % 300:03}')"
        for i in range(300)
    ))  # fmt: skip
    loaded = load_recording(tmp_path / "r.db")
    assert (loaded.events.tolist(), loaded.nodes) == read_plainly(tmp_path / "r.db")
    assert len(loaded.nodes) == 301


def test_names_and_ranks_come_from_the_rows_that_carry_them(tmp_path):
    written(tmp_path / "r.db", pid=[1, 2, 3])
    assert not load_recording(tmp_path / "r.db").ranks
    change(
        tmp_path / "r.db",
        "UPDATE events SET comm = 'train' WHERE pid = 2",
        "UPDATE events SET rank = 0, world_size = 4 WHERE pid = 3",
    )
    loaded = load_recording(tmp_path / "r.db")
    assert loaded.process_names == {(0, 2): "train"}
    assert loaded.ranks == {(0, 3): ProcessRank(0, -1, 4)}


def other_recording(path, row):
    """A recording of another tool, whose columns may be NULL: one row, each column with its value."""
    change(
        path,
        f"CREATE TABLE events ({', '.join(row)})",
        f"INSERT INTO events VALUES ({', '.join(row.values())})",
    )


NEEDED = {"timestamp": "5", "pid": "1", "tid": "2", "source": "1", "op": "3", "duration": "4"}


def test_null_reads_as_the_absent_value(tmp_path):
    absent = dict.fromkeys((*OPTIONAL, "weight", "node", "comm", "rank"), "NULL")
    other_recording(tmp_path / "r.db", NEEDED | absent)
    loaded = load_recording(tmp_path / "r.db", LoadFilter(has_extras=True))
    (event,) = loaded.events
    assert event["weight"] == 1
    assert not any(event[name] for name in OPTIONAL)
    assert (event["start_ns"], event["duration_ns"], loaded.nodes) == (5, 4, ("",))


@pytest.mark.parametrize("column", list(NEEDED))
@pytest.mark.parametrize("value", ["NULL", "2.5", "'none'"])
def test_what_is_no_number_where_one_must_be_is_told(tmp_path, column, value):
    other_recording(tmp_path / "r.db", NEEDED | {column: value})
    with pytest.raises(BadDataError, match="not made of integers"):
        load_recording(tmp_path / "r.db")


@pytest.mark.parametrize("column", ["duration", "arg2", "arg3", "wait_ns", "timestamp"])
def test_a_row_with_text_where_a_number_must_be_is_left_out_and_counted(tmp_path, column):
    written(tmp_path / "r.db", arg2=[1, 2, 3], arg3=[1, 2, 3], wait_ns=[1, 2, 3])
    whole = load_recording(tmp_path / "r.db")
    change(tmp_path / "r.db", f"UPDATE events SET {column} = 'none' WHERE rowid = 2")
    loaded = load_recording(tmp_path / "r.db")
    assert loaded.events.tolist() == [whole.events.tolist()[i] for i in (0, 2)]
    assert (loaded.n_damaged, loaded.describe_missing()) == (
        1,
        "incomplete: 1 rows could not be read",
    )


@pytest.mark.parametrize("column", ["reason", "arg2", "duration"])
def test_a_row_with_null_where_the_schema_has_none_is_left_out_and_counted(tmp_path, column):
    path = tmp_path / "r.db"
    written(path, arg3=[1, 2, 3])
    strict = f"{column} INTEGER NOT NULL"
    write = "UPDATE sqlite_master SET sql = replace(sql, '{}', '{}') WHERE name = 'events'"
    change(path, "PRAGMA writable_schema = 1", write.format(strict, f"{column} INTEGER     NULL"))
    change(path, f"UPDATE events SET {column} = NULL WHERE rowid = 2")
    change(path, "PRAGMA writable_schema = 1", write.format(f"{column} INTEGER     NULL", strict))
    loaded = load_recording(path)
    assert loaded.events["arg3"].tolist() == [1, 3]
    assert loaded.n_damaged == 1


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("pid", 1 << 40),
        ("source", 300),
        ("gpu_id", 1 << 20),
        ("duration", -1),
        ("timestamp", (1 << 62) + 5),
    ],
)
def test_a_number_that_does_not_fit_is_not_read_as_another_one(tmp_path, column, value):
    written(tmp_path / "r.db", arg2=[1, 2, 3])
    change(tmp_path / "r.db", f"UPDATE events SET {column} = {value} WHERE rowid = 2")
    loaded = load_recording(tmp_path / "r.db")
    assert loaded.events["arg2"].tolist() == [1, 3]
    assert loaded.n_damaged == 1


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE process_names SET pid = 'x'",
        "UPDATE process_names SET name = x'ff'",
        "UPDATE sessions SET started_at = 'never'",
        "UPDATE coverage SET seen = 1.5e300",
        "UPDATE coverage SET source = 1000",
    ],
)
def test_damage_in_a_small_table_costs_its_row_alone(tmp_path, statement):
    written(tmp_path / "r.db", arg2=[1, 2, 3])
    with RecordingWriter(tmp_path / "r.db", "n") as writer:
        seen = np.zeros(1, COVERAGE)
        seen["source"], seen["seen"] = 1, 3
        writer.put_coverage(seen)
        writer.put_session(Session("n", START_NS))
        writer.put_process_names({7: "train"}, START_NS)
    before = load_recording(tmp_path / "r.db")
    change(tmp_path / "r.db", statement)
    loaded = load_recording(tmp_path / "r.db")
    assert loaded.events.tolist() == before.events.tolist()
    assert loaded.n_damaged >= 1
    assert before.n_damaged == 0
