"""The trace holds every event once, on tracks that nest, and is the same every time.

The rules of the format are checked here: Trace Event Format (Chromium project). `test_trace_processor` asks Perfetto.
"""

import io
import json
import time
from collections import Counter, defaultdict

import numpy as np
import pytest
from click.testing import CliRunner
from tests.recording.scenarios.ranks import late_rank

from ingero.cli.main import cli
from ingero.model.events import EVENT, NcclOp, Source
from ingero.model.recording import Recording
from ingero.recording.export.perfetto import (
    _iter_flows,
    _Numbering,
    export_file,
    write_perfetto,
)
from ingero.recording.scenarios.catalog import SCENARIOS
from ingero.recording.store.reader import load_recording


def trace_of(recording):
    out = io.BytesIO()
    write_perfetto(recording, out)
    return out.getvalue(), json.loads(out.getvalue())


@pytest.fixture(
    params=["pytorch-dataloader-starvation.db", "sample-cluster.db", "incident", "late_rank"]
)
def recording(request, data_dir):
    if request.param.endswith(".db"):
        return load_recording(data_dir / "agent_dbs" / request.param)
    if request.param == "late_rank":
        return late_rank().build()
    return SCENARIOS[0].build().build()


def test_every_event_is_there_once(recording):
    _, trace = trace_of(recording)
    shapes = Counter(
        e["ph"]
        for e in trace["traceEvents"]
        if e.get("cat") not in {"incident", None} and e["name"] != "collective"
    )
    assert shapes["X"] + shapes["b"] + shapes["i"] == len(recording.events)
    assert shapes["b"] == shapes["e"]


def test_slices_of_one_track_nest(recording):
    _, trace = trace_of(recording)
    tracks = defaultdict(list)
    for element in trace["traceEvents"]:
        if element["ph"] == "X":
            start = round(element["ts"] * 1000)
            tracks[element["pid"], element["tid"]].append((start, -round(element["dur"] * 1000)))
    for spans in tracks.values():
        stack = []
        for start, negative in sorted(spans):
            end = start - negative
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1], "a slice ends after the one around it"
            stack.append(end)


def test_asynchronous_slices_and_flows_are_paired(recording):
    _, trace = trace_of(recording)
    opened = {}
    for e in sorted(trace["traceEvents"], key=lambda e: (e["ts"], e["ph"] != "b")):
        if e["ph"] == "b":
            opened[e["cat"], e["id"]] = e["name"]
        if e["ph"] == "e":
            assert opened.pop((e["cat"], e["id"])) == e["name"]
    assert not opened
    slices = {(e["pid"], e["tid"], e["ts"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    flows = [e for e in trace["traceEvents"] if e["ph"] in {"s", "t", "f"}]
    assert all((e["pid"], e["tid"], e["ts"]) in slices for e in flows)


def test_every_track_has_a_name(recording):
    _, trace = trace_of(recording)
    named = {(e["name"], e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "M"}
    for e in trace["traceEvents"]:
        assert ("process_name", e["pid"], 0) in named
        if e["ph"] == "X":
            assert ("thread_name", e["pid"], e["tid"]) in named


def test_ranks_of_a_collective_are_joined_in_order_of_arrival():
    _, trace = trace_of(late_rank().build())
    flows = [e for e in trace["traceEvents"] if e["name"] == "collective"]
    first = [e for e in flows if e["id"] == 1]
    assert [e["ph"] for e in first] == ["s", "t", "t", "f"]
    assert len({e["pid"] for e in first}) == 4
    assert len(flows) == 60 * 4


def test_arrows_of_many_collectives_take_time_in_proportion():
    n = 200_000
    events = np.zeros(n, EVENT)
    events["source"], events["op"], events["arg1"] = Source.NCCL, NcclOp.ALL_REDUCE, 77
    events["start_ns"], events["duration_ns"] = np.arange(n) * 1000, 500
    events["pid"], events["arg2"] = 1 + np.arange(n) % 2, np.arange(n) // 2
    recording = Recording(events=events)
    numbers = _Numbering(recording)
    began_s = time.process_time()
    flows = list(_iter_flows(recording, numbers, 0))
    assert time.process_time() - began_s < 5, "it was half a minute when each looked at all rows"
    assert [e["ph"] for e in flows] == ["s", "f"] * (n // 2)
    assert [e["id"] for e in flows[:4]] == [1, 1, 2, 2]


def test_same_recording_gives_the_same_bytes(recording):
    assert trace_of(recording)[0] == trace_of(recording)[0]


def test_nanoseconds_are_kept(recording):
    _, trace = trace_of(recording)
    events = [e for e in trace["traceEvents"] if e["ph"] in "Xbi" and e.get("cat") != "incident"]
    start_ns = int(trace["otherData"]["start_unix_ns"])
    assert start_ns + round(min(e["ts"] for e in events) * 1000) == recording.window_ns[0]
    # The machine's load from shortly before is kept; Perfetto drops what has a negative time.
    assert min(e.get("ts", 0) for e in trace["traceEvents"]) == 0
    assert 0 <= recording.window_ns[0] - start_ns <= 10_000_000_000


def test_incidents_and_load_are_in_the_trace(data_dir, tmp_path):
    db, out = data_dir / "agent_dbs/pytorch-dataloader-starvation.db", tmp_path / "out.json"
    result = CliRunner().invoke(
        cli, ["export", "--format", "perfetto", "--db", str(db), "-o", str(out)]
    )
    assert result.exit_code == 0, result.output
    elements = json.loads(out.read_bytes())["traceEvents"]
    (incident,) = [
        e for e in elements if e["ph"] == "b" and e["name"].startswith("HIGH: Input starvation")
    ]
    assert incident["args"]["causes"] == "100% computing on the host"
    assert sum(e["ph"] == "C" and e["name"] == "CPU %" for e in elements) == 40
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_what_another_export_of_that_name_writes_is_left_alone(recording, tmp_path):
    path, other = tmp_path / "out.json", tmp_path / "out.json.part"
    other.write_text("of another")
    export_file(recording, path)
    assert json.loads(path.read_bytes())["traceEvents"]
    assert other.read_text() == "of another"
    assert sorted(tmp_path.iterdir()) == [path, other]
