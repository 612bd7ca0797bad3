"""What is put is what is read, counts add up, and nothing is lost without a number."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingero.errors import StoreError
from ingero.model.events import EVENT, Source
from ingero.model.gpu_view import UNKNOWN, GpuView
from ingero.model.recording import AGGREGATE, COVERAGE, HISTOGRAM, ProcessRank, Session
from ingero.recording.export.merge import merge_recordings
from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.reader import load_recording
from ingero.recording.store.settings import WriterSettings
from ingero.recording.store.writer import RecordingWriter

MINUTE_NS = 60 * 10**9
T0 = 1_767_225_600 * 10**9


def rows(n, **fields):
    events = np.zeros(n, EVENT)
    events["start_ns"] = T0 + np.arange(n) * 1000
    events["duration_ns"] = 500
    events["pid"] = events["tid"] = 41
    events["source"] = Source.CUDA
    events["op"] = 3
    events["weight"] = 1
    for name, value in fields.items():
        events[name] = value
    return events


_INTS = {
    "u1": (0, 255),
    "<i2": (-(2**15), 2**15 - 1),
    "<i4": (0, 2**31 - 1),
    "<i8": (-(2**63), 2**63 - 1),
}


@st.composite
def event_arrays(draw):
    n = draw(st.integers(1, 6))
    events = np.zeros(n, EVENT)
    for name in EVENT.names:
        if name in {"node", "start_ns", "duration_ns", "weight"}:
            continue
        low, high = _INTS[EVENT[name].str.lstrip("|")]
        events[name] = draw(st.lists(st.integers(low, high), min_size=n, max_size=n))
    events["start_ns"] = T0 + np.arange(n)
    events["duration_ns"] = draw(st.lists(st.integers(0, 10**12), min_size=n, max_size=n))
    events["weight"] = draw(st.lists(st.integers(1, 1000), min_size=n, max_size=n))
    return events


@settings(max_examples=40, deadline=None)
@given(event_arrays())
def test_every_field_of_every_row_survives_the_file(tmp_path_factory, events):
    path = tmp_path_factory.mktemp("w") / "r.db"
    with RecordingWriter(path, "n1") as writer:
        assert writer.put_events(events)
    assert load_recording(path, LoadFilter(has_extras=True)).events.tolist() == events.tolist()


def test_aggregates_of_a_late_batch_are_added_not_replaced(tmp_path):
    path = tmp_path / "r.db"
    first = np.zeros(1, AGGREGATE)
    first[0] = (T0 // MINUTE_NS * MINUTE_NS, 0, 1, 3, 41, 10, 99, 1000, 50, 300, 7, 1, 4)
    late = first.copy()
    late["count"], late["min_duration_ns"], late["max_duration_ns"] = 5, 20, 250
    with RecordingWriter(path, "n1") as writer:
        writer.put_aggregates(first)
        writer.flush()
        writer.put_aggregates(late)
        writer.put_events(rows(3))
    (stored,) = load_recording(path).aggregates
    assert stored["count"] == 15
    assert stored["stored"] == 3  # rows in the table, whatever the caller believed
    assert (stored["min_duration_ns"], stored["max_duration_ns"]) == (20, 300)
    assert (stored["sum_duration_ns"], stored["sum_arg0"], stored["errors"]) == (2000, 14, 2)
    assert stored["lost"] == 8


def test_coverage_balances_when_the_queue_overflows(tmp_path):
    path = tmp_path / "r.db"
    seen = np.zeros(1, COVERAGE)
    seen[0] = (T0 // MINUTE_NS * MINUTE_NS, 0, Source.CUDA, 120, 0, 20, 0)
    with RecordingWriter(path, "n1", WriterSettings(queue_rows=60)) as writer:
        writer.put_coverage(seen)
        assert writer.put_events(rows(60))
        writer.flush()
        assert not writer.put_events(rows(61))  # more than may ever wait
        assert writer.put_events(rows(40))
        writer.flush()
        assert writer.counters.events_lost == 61
    recording = load_recording(path)
    (kept,) = recording.coverage
    assert len(recording.events) == kept["stored"] == 100
    assert kept["lost"] == 61
    assert kept["sampled_out"] == 20


def test_failed_disk_counts_the_rows_and_keeps_the_counts(tmp_path):
    path = tmp_path / "r.db"
    exact = np.zeros(1, AGGREGATE)
    exact[0] = (T0 // MINUTE_NS * MINUTE_NS, 0, 1, 3, 41, 10, 0, 1000, 50, 300, 7, 0, 0)
    with RecordingWriter(path, "n1") as writer:
        writer.flush()
        writer._file.connection.execute("PRAGMA query_only = 1")  # the disk that refuses writes
        writer.put_aggregates(exact)
        writer.put_events(rows(5))
        writer.flush()
        assert writer.counters.events_lost == 5
        assert "readonly" in writer.counters.last_error
        writer._file.connection.execute("PRAGMA query_only = 0")
        writer.put_events(rows(2))
    recording = load_recording(path)
    assert recording.aggregates["count"].tolist() == [10]
    assert recording.aggregates["lost"].tolist() == [5]
    assert recording.coverage["lost"].tolist() == [5]
    assert recording.coverage["stored"].tolist() == [2]


def test_appending_to_a_recording_continues_its_ids(tmp_path):
    path = tmp_path / "r.db"
    for _ in range(2):
        with RecordingWriter(path, "n1") as writer:
            writer.put_events(rows(3))
    with closing(sqlite3.connect(path)) as connection, connection:
        ids = [i for (i,) in connection.execute("SELECT id FROM events ORDER BY rowid")]
    connection.close()
    assert ids == [f"n1:{i}" for i in range(1, 7)]


def test_ranks_names_session_and_histogram_come_back(tmp_path):
    path = tmp_path / "r.db"
    bins = np.zeros(2, HISTOGRAM)
    bins["from_ns"], bins["to_ns"] = (512, 640), (640, 768)
    bins["count"], bins["pid"] = (4, 5), 41
    with RecordingWriter(path, "n1") as writer:
        writer.put_session(Session("ignored", T0, gpu_model="T4", n_cpus=4))
        writer.put_ranks({41: ProcessRank(3, 1, 8)})
        writer.put_process_names({41: "python3"}, T0)
        writer.put_gpu_views({
            41: GpuView(("nvidia0", "nvidia1"), "1", "PCI_BUS_ID"),
            42: GpuView(),
        })
        writer.put_gpu_views({43: GpuView((), ""), 44: GpuView(visible="0")})
        writer.put_gpu_views({43: GpuView((), ""), 44: GpuView(visible="1")})
        writer.put_histograms(bins)
        writer.put_histograms(bins)
        writer.put_events(rows(2))
        writer.close(stopped_wall_ns=T0 + 5)
    recording = load_recording(path)
    assert recording.ranks == {(0, 41): ProcessRank(3, 1, 8)}
    assert recording.process_name(0, 41) == "python3"
    assert recording.gpu_views == {
        (0, 41): GpuView(("nvidia0", "nvidia1"), "1", "PCI_BUS_ID"),
        (0, 42): GpuView(),
        (0, 43): GpuView((), ""),
        (0, 44): UNKNOWN,
    }
    assert recording.histograms["count"].tolist() == [8, 10]
    assert recording.histograms["from_ns"].tolist() == [512, 640]
    assert recording.histograms["to_ns"].tolist() == [640, 768]
    assert recording.sessions == (Session("n1", T0, T0 + 5, "T4", 4),)


def with_octaves(path):
    """A recording as this program wrote it before it stored the kernel's own buckets."""
    with RecordingWriter(path, "n1") as writer:
        writer.put_events(rows(2))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE latency_buckets")
        connection.execute(
            "CREATE TABLE latency_histograms (bucket, source, op, pid, node, log2_ns, count)"
        )
        connection.execute("INSERT INTO latency_histograms VALUES (0, 1, 3, 41, 'n1', 9, 8)")


def test_whole_octaves_of_an_earlier_version_are_read_merged_and_added_to(tmp_path):
    path = tmp_path / "r.db"
    with_octaves(path)
    (octave,) = load_recording(path).histograms
    assert (octave["from_ns"], octave["to_ns"], octave["count"]) == (512, 1024, 8)
    merge_recordings([path], tmp_path / "m.db")
    assert load_recording(tmp_path / "m.db").histograms.tolist() == [octave.tolist()]
    bins = np.zeros(1, HISTOGRAM)
    bins["from_ns"], bins["to_ns"], bins["count"], bins["pid"] = 512, 640, 3, 41
    with RecordingWriter(path, "n1") as writer:
        writer.put_histograms(bins)
    assert sorted(load_recording(path).histograms["count"].tolist()) == [3, 8]


def test_file_of_another_generation_is_not_written_to(tmp_path, data_dir):
    path = tmp_path / "old.db"
    content = (data_dir / "agent_dbs/sample-gpu-node-01.db").read_bytes()
    path.write_bytes(content)
    with pytest.raises(StoreError, match="another version"):
        RecordingWriter(path, "n1")
    assert path.read_bytes() == content


def test_what_workloads_say_is_kept_with_its_node_and_counts_against_the_size_limit(tmp_path):
    path = tmp_path / "r.db"
    labels = '{"step": "' + "x" * 900 + '"}'
    with RecordingWriter(path, "n1", WriterSettings(max_bytes=1_000_000)) as writer:
        for second in range(20):
            at_ns = T0 + second * 10**9
            writer.put_annotations([(at_ns + i, labels, 41, 7, 1, 2, 3, 4, 5) for i in range(200)])
            writer.flush()
    with closing(sqlite3.connect(path)) as connection, connection:
        kept = connection.execute(
            "SELECT timestamp, labels, pid, start_time, span_start, span_end, peer_uid, peer_gid, peer_pid, node "
            "FROM annotations ORDER BY timestamp"
        ).fetchall()
    assert kept[-1] == (T0 + 19 * 10**9 + 199, labels, 41, 7, 1, 2, 3, 4, 5, "n1")
    assert kept[0][0] > T0 + 10**9
    assert path.stat().st_size < 1_300_000


def test_size_limit_deletes_the_oldest_rows(tmp_path):
    path = tmp_path / "r.db"
    with RecordingWriter(path, "n1", WriterSettings(max_bytes=2_000_000)) as writer:
        for i in range(20):
            writer.put_events(rows(2000, start_ns=T0 + i * 10**9 + np.arange(2000)))
            writer.flush()
    events = load_recording(path).events
    assert events["start_ns"].min() > T0 + 10**9
    assert events["start_ns"].max() >= T0 + 19 * 10**9
    assert path.stat().st_size < 2_600_000
