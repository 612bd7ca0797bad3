"""Columns that travel together come apart again, whatever their width."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest

from ingero.agent.scenarios.builder import START_NS
from ingero.agent.store.reader import load_recording
from ingero.agent.store.writer import RecordingWriter
from ingero.errors import BadDataError
from ingero.model.events import EVENT

WIDE = (1 << 62) - 1


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


@pytest.mark.parametrize("column", ["duration", "arg2", "arg3", "wait_ns", "timestamp"])
def test_text_where_a_number_must_be_is_told(tmp_path, column):
    written(tmp_path / "r.db", arg2=[1, 2, 3], arg3=[1, 2, 3], wait_ns=[1, 2, 3])
    with closing(sqlite3.connect(tmp_path / "r.db")) as connection, connection:
        connection.execute(f"UPDATE events SET {column} = 'none' WHERE rowid = 2")
    with pytest.raises(BadDataError, match="not made of integers"):
        load_recording(tmp_path / "r.db")
